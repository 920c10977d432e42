"""A run resumed within an epoch equals the undisturbed one: its weights, its epochs' metrics, what they decide.

The job is in :mod:`tests.callbacks.epoch_job`. Every save is resumed by our callback in a fresh trainer, after other
seeds.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from resiliency.inspection.by_path import locate
from resiliency.plugins import _lightning
from resiliency.testing.zygote import Zygote
from tests.callbacks.epoch_job import Case, Outcome, loader, make_logger, make_module, savers, train
from tests.callbacks.harness import (
    ALL_LATE,
    EITHER,
    content,
    differences,
    make_trainer,
    names,
    ours,
    rank_state,
    stock,
)
from tests.ports import free_port
from tests.rings import few

PL = "lightning.pytorch"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice about workers, logging and small data
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CASES = {
    "batches of other sizes": Case(),
    "the other package": Case(namespace="pytorch_lightning", monitor="loss_sum"),
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}, monitor="loss_epoch"),
    "validation within the epoch": Case(trainer={"val_check_interval": 2}, monitor="order"),
    "two loaders, accumulation, validation within the epoch": Case(
        trainer={"val_check_interval": 3, "accumulate_grad_batches": 2}, loaders="two", monitor="third_epoch"
    ),
    "max steps": Case(trainer={"max_epochs": -1, "max_steps": 17}, monitor="loss_min"),
    "a scheduler by step": Case(interval="step", monitor="loss"),
    "a scheduler by step on a validation metric": Case(
        interval="step", monitor="val_loss", trainer={"val_check_interval": 1}
    ),
    "metrics the module computes itself": Case(monitor="own"),
    "stopped early": Case(monitor="average", stop_on="average", patience=1, trainer={"max_epochs": 3}),
}


def saves_of(folder: Path) -> dict[str, list[Path]]:
    """Checkpoints by the hook that saved them, oldest first."""
    return {
        kind: sorted((folder / kind).glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))
        for kind in ("batch", "validation", "epoch")
    }


def chosen_of(saves: dict[str, list[Path]], name: str) -> list[Path]:
    """By lot one save within each epoch; and those at the last batch of the first, and of the hooks that follow it."""
    lot, end = random.Random(name), saves["epoch"][0].name
    batch, at = saves["batch"], [path.name for path in saves["batch"]].index(end)
    sides = [next((path for path in saves["validation"] if (path.name == end) == last), None) for last in (False, True)]
    found = [lot.choice(batch[:at]), batch[at], lot.choice(batch[at + 1 : -1]), *filter(None, sides), saves["epoch"][0]]
    assert len(found) >= 5, "no validation was saved"
    return found


def resumed(case: Case, path: Path, tmp_path: Path) -> Outcome:
    return train(
        case, tmp_path / "resumed", ckpt=path, callbacks=[ours(case.namespace, tmp_path / "new", save_top_k=0)]
    )


def unequal(whole: Outcome, again: Outcome) -> list[str]:
    """What of the resumed run is not the end of the undisturbed one."""
    same = {
        "weights": again.weights == whole.weights,
        "rates": again.rates == whole.rates[len(whole.rates) - len(again.rates) :],
        "logged": differences(whole.rows[len(whole.rows) - len(again.rows) :], again.rows) == [],
        "metrics": again.shown == whole.shown,
        "early stopping": again.stopping == whole.stopping,
        "place": (again.epoch, again.step) == (whole.epoch, whole.step),
    }
    return [name for name, equal in same.items() if not equal]


@pytest.mark.parametrize(
    "name",
    few(CASES, ["validation within the epoch", "batches of other sizes", "a scheduler by step", "stopped early"]),
)
def test_resumed_run_equals_the_undisturbed_one(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    case = CASES[name]
    whole = train(case, tmp_path, callbacks=savers(case, tmp_path))
    assert len(set(whole.rates)) > 2, "the learning rate must depend on the metric"
    chosen = chosen_of(saves_of(tmp_path), name)
    wrong = {
        f"{path.parent.name} {path.stem}": found
        for path in chosen
        if (found := unequal(whole, resumed(case, path, tmp_path)))
    }
    assert wrong == {}
    assert "exact resume" not in caplog.text
    assert not [warning for warning in recwarn if "before the ``update``" in str(warning.message)]


def test_saves_hold_plain_data_only(tmp_path: Path) -> None:
    case = Case()
    train(case, tmp_path, callbacks=savers(case, tmp_path))
    for path in [path for paths in saves_of(tmp_path).values() for path in paths]:
        state = rank_state(path)["rank_state"]
        assert state["caveats"] == []
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert differences(state, torch.load(file, weights_only=True)) == []


@pytest.mark.parametrize(("sanity", "steps"), [(0, (1, 4, 7)), (2, (2, 5))])
def test_a_resumed_run_runs_the_validations_that_were_left(sanity: int, steps: Iterable[int], tmp_path: Path) -> None:
    """A save right before a validation: the stock trainer leaves that validation out, and the end of the epoch."""
    case = Case(trainer={"val_check_interval": 2, "num_sanity_val_steps": sanity})
    whole = train(case, tmp_path, callbacks=savers(case, tmp_path))
    done = [0, 0, 0, 1, 1, 2, 2, 3]  # before the save at this step
    for step in steps:
        again = resumed(case, tmp_path / "batch" / f"step={step}.ckpt", tmp_path)
        assert again.validations == whole.validations - bool(sanity) - done[step]


@pytest.mark.parametrize(("batch", "every"), few(product([1, 4], [3, 7]), [(1, 3), (4, 7)]))
def test_terminated_within_a_validation_all_of_it_is_run_again(
    every: int, batch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the second validation, which is within an epoch or at its end."""
    settings = {"num_sanity_val_steps": 0, "val_check_interval": every, "max_epochs": 3}
    case = Case(monitor="val_mse", trainer=settings)
    whole = train(case, tmp_path, callbacks=savers(case, tmp_path))
    saving = {"filename": "{step}", "save_on_exception": True, "save_top_k": -1, "every_n_epochs": 100}
    with pytest.raises(SystemExit):
        train(
            dataclasses.replace(case, terminate_at=len(loader()) + batch),
            tmp_path,
            callbacks=[ours(PL, tmp_path / "stopped", **saving)],
        )
    assert "exact resume" not in caplog.text
    (path,) = (tmp_path / "stopped").glob("*.ckpt")
    assert unequal(whole, resumed(case, path, tmp_path)) == []


# -- the module's own hook --------------------------------------------------------------------------------------------


def averaging(namespace: str, calls: list[str] | None = None, fail_at: int = 0) -> Any:
    module = make_module(Case(namespace=namespace, fail_at=fail_at))
    if calls is not None:
        hook = type(module).on_train_batch_end

        def on_train_batch_end(self: Any, *args: Any) -> None:
            calls.append(f"module {self.trainer.global_step}")
            hook(self, *args)

        type(module).on_train_batch_end = on_train_batch_end
    return module


@pytest.mark.parametrize("namespace", EITHER)
def test_a_save_holds_what_the_module_changes_in_its_own_hook(namespace: str, tmp_path: Path) -> None:
    averages = {}
    callback = ours(namespace, tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}", options=ALL_LATE)
    module = averaging(namespace)
    hook = type(module).on_train_batch_end

    def on_train_batch_end(self: Any, *args: Any) -> None:
        hook(self, *args)
        averages[self.trainer.global_step] = self.average.weight.clone()

    type(module).on_train_batch_end = on_train_batch_end
    make_trainer(namespace, [callback], root=tmp_path, max_epochs=1).fit(module, loader())
    assert len(averages) == 7
    for step, average in averages.items():
        assert torch.equal(content(tmp_path / f"step={step}.ckpt")["state_dict"]["average.weight"], average)


@pytest.mark.parametrize("namespace", EITHER)
def test_names_steps_and_loggers_are_those_of_the_stock_class(namespace: str, tmp_path: Path) -> None:
    """With a module whose hook logs a metric: file names and scores are decided before it, as in the stock class."""
    seen = []
    for make in (stock(namespace), lambda *args, **kwargs: ours(namespace, *args, **kwargs)):
        calls: list[str] = []
        directory = tmp_path / "run"
        logger = make_logger_of(namespace, calls)
        callback = make(
            directory,
            every_n_train_steps=2,
            monitor="loss",
            save_top_k=2,
            save_last=True,
            filename="{step}-{loss:.6f}-{average:.6f}",
        )
        torch.manual_seed(3)
        random.seed(3)
        module = averaging(namespace, calls)
        trainer = make_trainer(namespace, [callback], root=directory, logger=logger, log_every_n_steps=1, max_epochs=2)
        trainer.fit(module, loader())
        state = callback.state_dict()
        seen.append((names(directory), state, calls, trainer.global_step, callback._last_global_step_saved))
        directory.rename(tmp_path / f"done-{len(seen)}")
    saved = [call for call in seen[1][2] if call.startswith("saved")]
    assert len(saved) >= 4
    assert seen[0][0] == seen[1][0]
    assert differences(seen[0][1], seen[1][1]) == []
    without = [[call for call in one[2] if not call.startswith("saved")] for one in seen]
    assert without[0] == without[1]  # the loggers hear of a save once it is committed
    assert seen[0][3:] == seen[1][3:]


def make_logger_of(namespace: str, calls: list[str]) -> Any:
    logger = make_logger(namespace)
    log_metrics = type(logger).log_metrics

    def log(self: Any, metrics: dict[str, float], step: int | None = None) -> None:
        calls.append(f"log {step} {sorted(metrics)}")
        log_metrics(self, metrics, step)

    type(logger).log_metrics = log
    type(logger).after_save_checkpoint = lambda self, callback: calls.append("saved")
    return logger


@pytest.mark.parametrize("save_on_exception", [True, False])
def test_a_hook_that_raises_loses_no_save(
    save_on_exception: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stock class has saved by then; ours saves when training ends, and says that it is not exact."""
    callback = ours(PL, tmp_path, every_n_train_steps=2, filename="{step}", save_on_exception=save_on_exception)
    trainer = make_trainer(PL, [callback], root=tmp_path, max_epochs=1)
    with pytest.raises(RuntimeError, match="in the module's hook"):
        trainer.fit(averaging(PL, fail_at=4), loader())
    assert "step=4.ckpt" in names(tmp_path)
    located = locate(str(tmp_path / "step=4.ckpt"))
    assert located is not None and located.listing.manifest is not None
    assert not located.listing.manifest.exact
    assert "exception in on_train_batch_end" in caplog.text
    assert "on_batch_end" not in vars(trainer._logger_connector)


def test_actions_after_the_hooks_run_once_and_in_order() -> None:
    calls: list[str] = []

    class Connector:
        def on_batch_end(self) -> None:
            calls.append("lightning")

    class Trainer:
        _logger_connector = Connector()

    trainer = Trainer()
    for name in ("a", "b"):
        _lightning.after_batch_end_hooks(trainer, lambda name=name: calls.append(name))
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.on_batch_end()
    assert calls == ["a", "b", "lightning", "lightning"]


# -- what is not exact is said ----------------------------------------------------------------------------------------


class Text:
    """An object without a plain form that can be moved between devices."""

    def to(self, *args: Any) -> Text:
        return self

    cpu = to

    def is_floating_point(self) -> bool:
        return False

    is_complex = is_floating_point


class Unsaved(torchmetrics.Metric):
    """Keeps an object of its own among its states."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx=None)

    def update(self, value: Any) -> None:
        self.seen.append(Text())

    def compute(self) -> torch.Tensor:
        return torch.tensor(float(len(self.seen)))


def test_a_metric_that_cannot_be_saved_is_said_once_and_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = averaging(PL)
    module.odd = Unsaved()
    step = type(module).training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.odd.update(0)
        self.log("odd", self.odd, on_step=False, on_epoch=True)
        self.log("grouped", torch.ones(()), on_step=False, on_epoch=True, batch_size=1, sync_dist_group="a group")
        return step(self, batch, batch_idx)

    type(module).training_step = training_step
    callback = ours(PL, tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    make_trainer(PL, [callback], root=tmp_path, max_epochs=1).fit(module, loader())
    said = [record.message for record in caplog.records if "exact resume" in record.message]
    assert len(said) == 2
    assert "odd" in said[0] and "Text" in said[0]
    assert "'grouped' is logged with sync_dist_group" in said[1]
    located = locate(str(tmp_path / "step=3.ckpt"))
    assert located is not None and located.listing.manifest is not None
    assert not located.listing.manifest.exact


def test_a_module_with_its_own_on_validation_end_says_what_it_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hook runs after the save. A metric that it resets is restored as reset: a usual case stays exact."""

    def with_hook() -> Any:
        module = averaging(PL)
        module.hand = torchmetrics.SumMetric()

        def on_validation_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hand.update(1.0)

        def on_validation_epoch_end(self: Any) -> None:
            self.log("hand", self.hand.compute())

        type(module).on_validation_batch_end = on_validation_batch_end
        type(module).on_validation_epoch_end = on_validation_epoch_end
        type(module).on_validation_end = lambda self: self.hand.reset()
        return module

    def fit(directory: Path, steps: int, callback: Any) -> Any:
        settings: dict[str, Any] = {"val_check_interval": 3, "max_steps": steps, "max_epochs": -1}
        trainer = make_trainer(PL, [callback], root=directory, **settings)
        module = with_hook()
        module.training_step = lambda batch, batch_idx: module.net(batch[0][:, :4]).square().mean()
        module.on_train_epoch_end = lambda: None
        torch.manual_seed(1)
        trainer.fit(module, loader(), loader())
        return trainer

    saving = {"monitor": "hand", "save_top_k": -1, "save_on_train_epoch_end": False, "filename": "{step}"}
    first = fit(tmp_path, 3, ours(PL, tmp_path, **saving))
    assert "on_validation_end, which a restart does not run" in caplog.text
    located = locate(str(tmp_path / "step=3.ckpt"))
    assert located is not None and located.listing.manifest is not None
    assert not located.listing.manifest.exact
    second = fit(tmp_path, 6, ours(PL, tmp_path, **saving))
    assert second.global_step == 6
    assert second.callback_metrics["hand"] == first.callback_metrics["hand"]  # of the second validation alone


def test_a_module_without_the_metric_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = ours(PL, tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    make_trainer(PL, [callback], root=tmp_path, max_steps=3, max_epochs=-1).fit(averaging(PL), loader())
    module = averaging(PL)
    del module.own
    type(module).training_step = lambda self, batch, batch_idx: self.net(batch[0][:, :4]).square().mean()
    type(module).on_train_epoch_end = type(module).on_train_batch_end = lambda self, *args: None
    callback = ours(PL, tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}", auto_resume=True)
    make_trainer(PL, [callback], root=tmp_path, max_steps=8, max_epochs=-1).fit(module, loader())
    assert "no longer the metrics ['own']" in caplog.text


# -- two ranks --------------------------------------------------------------------------------------------------------


def ranks(zygote: Zygote, directory: Path, *, ckpts: Sequence[Path | None], **case: Any) -> list[list[Outcome]]:
    """The outcomes of each of two ranks, of one training after the other; fails when one is not done in time."""
    port, result = str(free_port()), directory.parent / f"outcome-{time.monotonic_ns()}"
    arguments = {
        "directory": str(directory),
        "result": str(result),
        "ckpts": [str(ckpt) if ckpt else None for ckpt in ckpts],
        "case": case,
    }
    started = [
        zygote.start(
            "tests.callbacks.epoch_job:on_rank",
            arguments,
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "epochs",
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
            },
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 90
    try:
        for worker in started:
            worker.wait(timeout_s=max(0.1, deadline - time.monotonic()))
    finally:
        for worker in started:
            worker.kill()
    return [[Outcome(**one) for one in json.loads(Path(f"{result}.{rank}").read_text())] for rank in range(2)]


SIDES = ("batch/step=2", "batch/step=3", "validation/step=3", "batch/step=7", "epoch/step=7")


@pytest.mark.parametrize(
    ("monitor", "saves"), few([("loss_epoch", SIDES), ("order", SIDES[:4:3])], [("order", SIDES[:4:3])])
)
def test_two_ranks_with_batches_of_their_own_sizes_resume_exactly(
    monitor: str, saves: tuple[str, ...], zygote: Zygote, tmp_path: Path
) -> None:
    """Metrics are reduced over the ranks at the end of the epoch, from what each rank has saved of its own."""
    settings: dict[str, Any] = {"monitor": monitor, "trainer": {"val_check_interval": 3, "max_epochs": 2}}
    (one,), (other,) = ranks(zygote, tmp_path / "whole", ckpts=[None], **settings)
    assert one.shown["loss_epoch"] == other.shown["loss_epoch"]
    assert one.shown["step_only"] != other.shown["step_only"]
    ckpts = [tmp_path / "whole" / f"{save}.ckpt" for save in saves]
    for whole, resumed in zip((one, other), ranks(zygote, tmp_path / "again", ckpts=ckpts, **settings), strict=True):
        assert {save: unequal(whole, again) for save, again in zip(saves, resumed, strict=True)} == dict.fromkeys(
            saves, []
        )
