"""What a checkpoint holds is what was there when its hook (and the module's own) ran, whoever changes tensors afterwards.

A callback that runs right before ours takes an eager copy of what Lightning would save; the checkpoint must equal it bit for
bit. All tensors are copied late here, however small, and the copy thread is held up, so that the training thread reaches the
next change long before the copy is done by itself.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.snapshot import Snapshot
from tests.callbacks.harness import (
    ALL_LATE,
    EITHER,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    ours,
)
from tests.rings import few

PL = "lightning.pytorch"


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied before somebody fences."""
    work = Snapshot.work

    def only_at_the_fence(self: Snapshot, *, helping: bool = False) -> bool:
        if helping:
            return work(self, helping=True)
        self.copied.wait(60)
        return False

    monkeypatch.setattr(Snapshot, "work", only_at_the_fence)


def checkpoint_base(namespace: str) -> type[Any]:
    found: type[Any] = importlib.import_module(f"{namespace}.callbacks").Checkpoint
    return found


def reference(namespace: str, path: Callable[[Any], str], hook: str = "on_train_batch_end") -> Any:
    """A checkpoint callback, so that it runs where ours does and sees the same moment: copies what would be saved there."""

    def take(self: Any, trainer: Any, *args: Any) -> None:
        if trainer.sanity_checking or not trainer.training and hook != "on_validation_end":
            return
        if path(trainer) in self.taken:
            return  # a step is saved once, at the first occasion
        state = trainer._checkpoint_connector.dump_checkpoint(False)
        self.taken[path(trainer)] = _clone(
            {key: state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}
        )

    def __init__(self: Any) -> None:
        self.taken = {}

    return type("Reference", (checkpoint_base(namespace),), {"__init__": __init__, hook: take})()


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((k, _clone(v)) for k, v in value.items())
    return type(value)(_clone(v) for v in value) if isinstance(value, (list, tuple)) else value


def check(tmp_path: Path, witness: Any, *, at_least: int = 3) -> None:
    found = names(tmp_path)
    assert len(found) >= at_least
    assert found <= set(witness.taken)
    for name in sorted(found):
        state = content(tmp_path / name)
        kept = {key: state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}
        assert differences(witness.taken[name], kept) == [], name


def step_name(trainer: Any) -> str:
    return f"step={trainer.global_step}.ckpt"


def every_step(tmp_path: Path, namespace: str = PL, **more: Any) -> Any:
    arguments = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", "options": ALL_LATE}
    return ours(namespace, tmp_path, **(arguments | more))


def train(
    tmp_path: Path, callbacks: list[Any], net: Any, namespace: str = PL, val: bool = False, **settings: Any
) -> Any:
    trainer = make_trainer(namespace, callbacks, root=tmp_path, **settings)
    trainer.fit(net, loader(), loader(batches=1) if val else None)
    return trainer


@pytest.mark.parametrize("manual", ["", "wrapped", "raw"])
@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_batchnorm_and_adam_are_saved_exactly_by_every_kind_of_optimisation(
    namespace: str, manual: str, tmp_path: Path
) -> None:
    if manual == "raw":
        # Lightning does not count steps it does not see, so the clock makes the saves: here, batches do.
        net = make_net(namespace, manual="raw")
        net.on_train_batch_start = lambda batch, batch_idx: setattr(net, "seen", getattr(net, "seen", 0) + 1)
        callback = every_step(tmp_path, namespace)
        callback.__class__ = type(
            "SavesEveryBatch",
            (type(callback),),
            {"on_train_batch_end": lambda self, trainer, module, *a: _save_now(self, trainer, f"step={net.seen}.ckpt")},
        )
        witness = reference(namespace, lambda trainer: f"step={net.seen}.ckpt")
    else:
        net, callback, witness = (
            make_net(namespace, manual=manual),
            every_step(tmp_path, namespace),
            reference(namespace, step_name),
        )
    train(tmp_path, [witness, callback], net, namespace)
    check(tmp_path, witness, at_least=12)


def _save_now(callback: Any, trainer: Any, name: str) -> None:
    callback._saver.session.deliver_outcomes()
    with callback._saver.collect(overlap=True):
        callback._save_checkpoint(trainer, str(Path(callback.dirpath) / name))


def test_copies_are_late_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fences every test here must fail: this one shows that they would."""
    monkeypatch.setattr("resiliency.callbacks.checkpointing.trainer_session.TrainerSession.fence", lambda self: 0.0)
    witness = reference(PL, step_name)
    train(tmp_path, [witness, every_step(tmp_path)], make_net(PL), max_epochs=1)
    with pytest.raises(AssertionError):
        check(tmp_path, witness)


def test_lbfgs_is_saved_exactly(tmp_path: Path) -> None:
    net = make_net(PL)
    net.configure_optimizers = lambda: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    witness = reference(PL, step_name)
    train(tmp_path, [witness, every_step(tmp_path)], net)
    check(tmp_path, witness, at_least=12)


def test_two_alternating_optimizers_with_momentum_are_saved_exactly(tmp_path: Path) -> None:
    net = make_net(PL, manual="wrapped")
    first, second = list(net.layers[0].parameters()), list(net.layers[3].parameters())

    def training_step(batch: Any, batch_idx: int) -> None:
        for optimizer in net.optimizers():
            optimizer.zero_grad()
            net.manual_backward(net.layers(batch[0]).square().mean())
            optimizer.step()

    net.training_step = training_step
    net.configure_optimizers = lambda: [torch.optim.SGD(first, 0.1, momentum=0.9), torch.optim.Adam(second, 0.1)]
    witness = reference(PL, step_name)
    with pytest.warns(UserWarning, match="manual optimization"):
        train(tmp_path, [witness, every_step(tmp_path)], net)
    check(tmp_path, witness, at_least=12)


def test_a_raw_optimizer_with_a_closure_is_saved_exactly(tmp_path: Path) -> None:
    """No hook of Lightning is called here, and torch's own one sees a closure."""
    net = make_net(PL, manual="raw")

    def training_step(batch: Any, batch_idx: int) -> None:
        net.seen = getattr(net, "seen", 0) + 1
        optimizer = net.optimizers(use_pl_optimizer=False)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = net.layers(batch[0]).square().mean()
            net.manual_backward(loss)
            return loss

        optimizer.step(closure)

    net.training_step = training_step
    callback = every_step(tmp_path)
    callback.__class__ = type(
        "SavesEveryBatch",
        (type(callback),),
        {"on_train_batch_end": lambda self, trainer, module, *a: _save_now(self, trainer, f"step={net.seen}.ckpt")},
    )
    witness = reference(PL, lambda trainer: f"step={net.seen}.ckpt")
    train(tmp_path, [witness, callback], net)
    check(tmp_path, witness, at_least=12)


def test_weight_averaging_is_saved_exactly(tmp_path: Path) -> None:
    averaging = importlib.import_module(f"{PL}.callbacks").WeightAveraging(
        avg_fn=lambda old, new, count: old + (new - old) / (count + 1), use_buffers=True
    )
    witness = reference(PL, step_name)
    train(tmp_path, [averaging, witness, every_step(tmp_path)], make_net(PL), val=True, val_check_interval=2)
    check(tmp_path, witness, at_least=12)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.filterwarnings("ignore:SWA")
def test_stochastic_weight_averaging_is_saved_exactly(tmp_path: Path) -> None:
    averaging = importlib.import_module(f"{PL}.callbacks").StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    net = make_net(PL)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    witness = reference(PL, step_name)
    train(tmp_path, [averaging, witness, every_step(tmp_path)], net, max_epochs=4)
    check(tmp_path, witness, at_least=18)


CALLBACK_HOOKS = [
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_save_checkpoint",
]
MODULE_HOOKS = [
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_model_eval",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_model_zero_grad",
]


def spoil(module: Any, how: str) -> None:
    for parameter in module.parameters():
        if how == "data":
            parameter.data.mul_(1.01)  # torch's version counter does not see this
        elif how == "replaced":
            parameter.data = parameter.data * 1.01
        else:
            with torch.no_grad():
                parameter.mul_(1.01)


@pytest.mark.parametrize("own_batch_end", few([True, False], [True]))
@pytest.mark.parametrize("when", ["batch_end", "validation_end", "epoch_end"])
def test_weights_changed_by_hooks_outside_the_step_are_saved_exactly(
    when: str, own_batch_end: bool, tmp_path: Path
) -> None:
    """All hooks of callbacks and module at once, in each of the hooks where checkpoints are saved.

    A module with an ``on_train_batch_end`` of its own runs it after the callbacks, and what it changes is saved.
    """
    changer = importlib.import_module(f"{PL}.callbacks").Callback()
    net = make_net(PL)
    for hook in CALLBACK_HOOKS:
        setattr(changer, hook, lambda trainer, module, *args, **kwargs: spoil(module, "data"))
    for hook in MODULE_HOOKS if own_batch_end else MODULE_HOOKS[1:]:
        setattr(net, hook, lambda *args, **kwargs: spoil(net, "data"))
    for hook in ("on_validation_model_zero_grad", "on_validation_model_eval"):
        original = getattr(type(net), hook)
        setattr(net, hook, lambda original=original: (spoil(net, "data"), original(net)))

    more = {
        "batch_end": {},
        "validation_end": {"save_on_train_epoch_end": False, "every_n_train_steps": None},
        "epoch_end": {"save_on_train_epoch_end": True, "every_n_train_steps": None},
    }[when]
    hook = {
        "batch_end": "on_train_batch_end",
        "validation_end": "on_validation_end",
        "epoch_end": "on_train_epoch_end",
    }[when]
    if own_batch_end and when == "batch_end":
        witness = reference(PL, step_name, "after_the_module")
        net.on_train_batch_end = lambda *args: (spoil(net, "data"), witness.after_the_module(net.trainer))
    else:
        witness = reference(PL, step_name, hook)
    changer.on_save_checkpoint = lambda *args, **kwargs: (
        None
    )  # called for the witness too; nobody can expect two equal results
    train(tmp_path, [changer, witness, every_step(tmp_path, **more)], net, val=True, val_check_interval=3, max_epochs=3)
    check(tmp_path, witness, at_least=3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_module_that_changes_weights_in_its_own_batch_end_is_copied_late_and_exactly(
    accumulate: int, tmp_path: Path
) -> None:
    """Also between two optimizer steps, where nothing but its own hook tells that weights change."""
    net = make_net(PL)
    witness = reference(PL, step_name, "after_the_module")
    late = []

    def on_train_batch_end(*args: Any) -> None:
        spoil(net, "data")
        if not net.trainer.fit_loop._should_accumulate():
            witness.after_the_module(net.trainer)

    ours = every_step(tmp_path)
    net.on_train_batch_end = on_train_batch_end
    net.on_before_zero_grad = lambda optimizer: late.append(
        ours._saver.engine is not None and ours._saver.engine.pending
    )
    train(tmp_path, [witness, ours], net, accumulate_grad_batches=accumulate)
    assert any(late)
    check(tmp_path, witness, at_least=6)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward"])  # in between, torch itself refuses
def test_weights_changed_between_batch_and_step_are_noticed(
    hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not promised to be safe: such a save is given up with a warning, and later ones are copied at once."""
    changer = importlib.import_module(f"{PL}.callbacks").Callback()
    setattr(changer, hook, lambda trainer, module, *args: spoil(module, "in place"))
    witness = reference(PL, step_name)
    with caplog.at_level(logging.WARNING, logger="resiliency"):
        train(tmp_path, [changer, witness, every_step(tmp_path)], make_net(PL))
    assert caplog.text.count("is given up") == 1
    assert "step=1.ckpt" not in names(tmp_path)
    check(tmp_path, witness, at_least=10)


def test_an_optimizer_of_two_passes_in_manual_optimization_loses_one_save_and_writes_nothing_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As SAM: it shifts the weights before the pass whose gradients it uses. Manual steps are not watched beforehand."""
    net = make_net(PL, manual="wrapped")
    weights = list(net.layers.parameters())

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = net.optimizers()
        net.manual_backward(net.layers(batch[0]).square().mean())
        shifts = [0.05 * weight.grad.sign() for weight in weights]
        with torch.no_grad():
            for weight, shift in zip(weights, shifts, strict=True):
                weight.add_(shift)
        optimizer.zero_grad()
        net.manual_backward(net.layers(batch[0]).square().mean())
        with torch.no_grad():
            for weight, shift in zip(weights, shifts, strict=True):
                weight.sub_(shift)
        optimizer.step()
        optimizer.zero_grad()

    net.training_step = training_step
    net.configure_optimizers = lambda: torch.optim.SGD(weights, 0.1, momentum=0.9)
    witness = reference(PL, step_name)
    with caplog.at_level(logging.WARNING, logger="resiliency"):
        with pytest.warns(UserWarning, match="manual optimization"):
            train(tmp_path, [witness, every_step(tmp_path)], net)
    assert caplog.text.count("is given up") == 1
    assert set(witness.taken) - names(tmp_path) == {"step=1.ckpt"}
    check(tmp_path, witness, at_least=10)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_zero_grad", "on_after_backward"])
def test_weights_changed_between_batch_and_step_are_safe_without_lazy_copies(hook: str, tmp_path: Path) -> None:
    changer = importlib.import_module(f"{PL}.callbacks").Callback()
    setattr(changer, hook, lambda trainer, module, *args: spoil(module, "data"))
    witness = reference(PL, step_name)
    train(tmp_path, [changer, witness, every_step(tmp_path, lazy=False)], make_net(PL))
    check(tmp_path, witness, at_least=12)


@pytest.mark.parametrize("how", ["data", "replaced", "in place"])
def test_a_target_network_updated_in_forward_is_saved_exactly(how: str, tmp_path: Path) -> None:
    """Parameters no optimizer owns (momentum encoders) may change anywhere."""
    net = make_net(PL)
    net.target = torch.nn.Linear(4, 8).requires_grad_(False)
    net.layers.register_forward_pre_hook(lambda module, args: spoil(net.target, how))
    witness = reference(PL, step_name)
    train(tmp_path, [witness, every_step(tmp_path)], net)
    check(tmp_path, witness, at_least=12)


def test_callback_states_and_hyper_parameters_are_those_of_the_saved_step(tmp_path: Path) -> None:
    """Python state and tensors of callbacks and schedulers change as soon as the next batch begins."""

    class Counting(importlib.import_module(f"{PL}.callbacks").Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.history: list[int] = []
            self.tensor = torch.zeros(3)

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            self.history.append(trainer.global_step)
            self.tensor += 1

        def state_dict(self) -> dict[str, Any]:
            return {"history": self.history, "tensor": self.tensor}

    train(tmp_path, [Counting(), every_step(tmp_path)], make_net(PL))
    for step in (1, 5, 12):
        states = content(tmp_path / f"step={step}.ckpt")["callbacks"]
        state = next(value for key, value in states.items() if key.endswith("Counting"))
        assert state["history"] == list(range(step))
        assert torch.equal(state["tensor"], torch.full((3,), float(step)))


def test_tensors_in_a_precision_plugin_are_saved_exactly(tmp_path: Path) -> None:
    """A loss scale changes in the optimizer step, and would be saved by reference."""
    precision = importlib.import_module(f"{PL}.plugins.precision").Precision
    scale = torch.full((40_000,), 1.0)
    kind = type(
        "Scaling",
        (precision,),
        {"state_dict": lambda self: {"scale": scale}, "load_state_dict": lambda self, state: None},
    )
    net = make_net(PL)
    net.on_before_zero_grad = lambda optimizer: scale.add_(1.0)
    trainer = make_trainer(PL, [every_step(tmp_path)], root=tmp_path, plugins=[kind()])
    trainer.fit(net, loader())
    for step in (1, 6, 12):
        assert content(tmp_path / f"step={step}.ckpt")["Scaling"]["scale"][0] == 1.0 + step
