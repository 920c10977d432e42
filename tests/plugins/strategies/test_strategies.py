"""Which strategies are served, what may be done with their tensors, and that one more is one class."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resiliency.plugins import _lightning
from resiliency.plugins.strategies import registry
from resiliency.plugins.strategies.base import TensorRules
from resiliency.plugins.strategies.replicated import ReplicatedAdapter
from resiliency.plugins.strategies.sharded import ShardedAdapter
from tests.callbacks.harness import NAMESPACES, content, loader, make_net, make_trainer, names, ours


def strategy(namespace: str, name: str) -> Any:
    kind = getattr(importlib.import_module(f"{namespace}.strategies"), name)
    return kind.__new__(kind)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_strategies_with_the_whole_model_on_every_rank_are_served(namespace: str) -> None:
    for name in ("SingleDeviceStrategy", "DDPStrategy"):
        assert isinstance(registry.adapter_for(strategy(namespace, name)), ReplicatedAdapter)
    assert registry.adapter_for(strategy(namespace, "FSDPStrategy")) is None


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_model_parallel_is_served_when_each_rank_writes_its_part(namespace: str) -> None:
    kind = type(strategy(namespace, "ModelParallelStrategy"))
    assert isinstance(registry.adapter_for(kind()), ShardedAdapter)
    assert registry.adapter_for(kind(save_distributed_checkpoint=False)) is None


def test_a_sharding_strategy_derived_from_ddp_is_not_served() -> None:
    ddp = type(strategy(NAMESPACES[0], "DDPStrategy"))
    assert registry.adapter_for(object.__new__(type("MegatronStrategy", (ddp,), {}))) is None
    assert registry.adapter_for(object.__new__(type("OurDDP", (ddp,), {}))) is not None


def stepped(net: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], **arguments)
    sum(p.sum() for p in net.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def test_trained_parameters_and_their_moments_are_late_and_replicated_buffers_are_neither() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    net[2].requires_grad_(False)  # moved by somebody else, such as a moving average
    optimizer = stepped(net)
    trainer = SimpleNamespace(lightning_module=net, optimizers=[optimizer])
    rules = ReplicatedAdapter().tensor_rules(trainer)

    def judged(tensor: torch.Tensor) -> tuple[bool, bool]:
        return rules.may_copy_late(tensor), rules.is_replicated(tensor)

    state = net.state_dict()
    assert judged(state["0.weight"]) == (True, True)
    assert judged(state["2.weight"]) == (False, True)
    assert judged(state["1.running_mean"]) == (False, False)
    moment = optimizer.state[net[0].weight]["exp_avg"]
    assert judged(moment) == (True, True)
    assert judged(state["0.weight"].clone()) == (False, False)  # what a callback keeps for itself

    net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)  # an optimizer may run in there
    assert not ReplicatedAdapter().tensor_rules(trainer).may_copy_late(state["0.weight"])


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda p: torch.optim.Adam(p), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.SGD(p, 0.1), set()),
    ],
    ids=["adam", "amsgrad", "momentum", "sgd"],
)
def test_expected_tensors_are_those_a_stepped_optimizer_has(make: Any, moments: set[str]) -> None:
    net = torch.nn.Linear(3, 5, bias=False)
    trainer = SimpleNamespace(lightning_module=net, optimizers=[make(net.parameters())])
    expected = ReplicatedAdapter().expected_tensors(trainer)
    assert set(expected) == {"state_dict/weight"} | {f"optimizer_states/0/state/0/{name}" for name in moments}
    assert all(tensor.shape == (5, 3) and tensor.device.type == "meta" for tensor in expected.values())
    sum(p.sum() for p in net.parameters()).backward()  # type: ignore[union-attr]
    trainer.optimizers[0].step()
    assert set(ReplicatedAdapter().expected_tensors(trainer)) == set(expected)


class MadeUpAdapter:
    """For a strategy nobody has, which saves in its own way: adds a word to the state and lets nothing be late."""

    is_sharded = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def supports(self, strategy: Any) -> bool:
        return type(strategy).__name__ == "MadeUpStrategy"

    def dump_state(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        self.asked.append("state")
        return {**trainer._checkpoint_connector.dump_checkpoint(weights_only), "made_up": torch.arange(3)}

    def tensor_rules(self, trainer: Any) -> TensorRules:
        self.asked.append("rules")
        return TensorRules(may_copy_late=lambda tensor: False, is_replicated=lambda tensor: False)

    def expected_tensors(self, trainer: Any) -> dict[str, torch.Tensor]:
        self.asked.append("expected")
        return {"made_up": torch.empty(3, dtype=torch.int64, device="meta")}

    def stored_state(self, trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        self.asked.append("stored")
        return checkpoint

    def target_state(self, trainer: Any) -> None:
        self.asked.append("target")

    def load_state(self, trainer: Any, state: dict[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
        self.asked.append("load")
        return state


def saves_itself(self: Any, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
    self.checkpoint_io.save_checkpoint(checkpoint, filepath)


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({}, "MadeUpStrategy is not supported"),
        ({"save_checkpoint": saves_itself}, "written by the strategy MadeUpStrategy of this Trainer"),
    ],
    ids=["", "with a save of its own"],
)
def test_one_more_strategy_is_one_class(
    namespace: str,
    methods: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a Trainer leaves it set
    single = type(strategy(namespace, "SingleDeviceStrategy"))
    # As a sharding strategy that derives from a replicated one: the general adapter does not want it.
    made_up = type("MadeUpStrategy", (type("FSDPStrategy", (single,), {}),), methods)

    def fit(root: Path, **more: Any) -> Any:
        callback = ours(namespace, root, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        trainer = make_trainer(namespace, [callback], root=root, max_epochs=1, strategy=made_up(torch.device("cpu")))
        with caplog.at_level(logging.WARNING, logger="resiliency"):
            trainer.fit(make_net(namespace), loader(), **more)
        return callback

    fit(tmp_path / "without")
    assert says in caplog.text
    assert not (tmp_path / "without" / ".resiliency").exists()
    assert names(tmp_path / "without") == {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}, "written the stock way"

    caplog.clear()
    adapter = MadeUpAdapter()
    monkeypatch.setattr(registry, "ADAPTERS", (*registry.ADAPTERS, adapter))
    fit(tmp_path / "with")
    assert "not supported" not in caplog.text
    assert adapter.asked == ["expected", *["state", "rules", "stored"] * 3]
    assert torch.equal(content(tmp_path / "with" / "step=6.ckpt")["made_up"], torch.arange(3))
    del adapter.asked[:]
    fit(tmp_path / "with", ckpt_path=str(tmp_path / "with" / "step=6.ckpt"))
    assert adapter.asked == ["target", "load", "expected"]


@pytest.mark.parametrize("first", ["watched", "loads"])
def test_who_watches_loads_is_told_of_those_in_place_and_leaves_no_trace(first: str, tmp_path: Path) -> None:
    trainer = make_trainer(NAMESPACES[0], [], root=tmp_path)
    told: list[str] = []

    def load(path: str, weights_only: bool | None) -> dict[str, Any]:
        told.append(path)
        return {"found": path}

    def watch() -> Any:
        return _lightning.around_load(trainer, lambda: told.append("began"), lambda: told.append("ended"))

    if first == "watched":
        undo = watch()
        _lightning.patch_load_checkpoint(trainer, load, of_strategy=True)
    else:
        _lightning.patch_load_checkpoint(trainer, load, of_strategy=True)
        undo = watch()
    assert trainer.strategy.load_checkpoint("a") == {"found": "a"}
    assert told == ["began", "a", "ended"]
    undo()
    assert trainer.strategy.load_checkpoint("b") == {"found": "b"}
    assert told == ["began", "a", "ended", "b"]
