"""One observer of steps per trainer, whichever of our callbacks are there: each step is told once, to all subscribers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resiliency.callbacks import goodput
from resiliency.plugins.step_hooks import step_observer
from resiliency.telemetry.reader import find_logs
from resiliency.telemetry.step_observer import StepSubscriber, StepTiming
from tests.callbacks.harness import EITHER, NAMESPACES, content, loader, make_net, make_trainer, names, ours, stock


class Heartbeat(StepSubscriber):
    """A consumer none of our callbacks knows of."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.steps: list[int] = []
        self.timings: list[StepTiming] = []
        self.ends: list[int] = []

    def training_started(self, step: int, world_size: int | None) -> None:
        self.starts.append(step)

    def step_ended(self, timing: StepTiming) -> None:
        self.steps.append(timing.step)
        self.timings.append(timing)

    def training_ended(self, step: int) -> None:
        self.ends.append(step)


def callbacks(namespace: str, which: str, root: Path) -> list[Any]:
    """``g``: goodput, ``a`` and ``b``: checkpoints in folders of these names, ``s``: the stock checkpoint callback."""
    made = {
        "g": lambda: goodput.build(namespace)(log=False),
        "a": lambda: ours(namespace, root / "a", every_n_train_steps=2, save_top_k=-1, filename="{step}"),
        "b": lambda: ours(namespace, root / "b", every_n_train_steps=3),
        "s": lambda: stock(namespace)(dirpath=root / "s"),
    }
    return [made[letter]() for letter in which]


COMBINATIONS = ["g", "a", "ga", "ag", "ab", "gab", "gg", "sg", "gs"]


@pytest.mark.parametrize("which", COMBINATIONS)
def test_each_step_is_told_once_and_written_to_one_log(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCY_ATTEMPT", "1")  # a launcher's job: its log begins with the fit
    namespace = NAMESPACES[COMBINATIONS.index(which) % 2]
    trainer = make_trainer(namespace, callbacks(namespace, which, tmp_path), root=tmp_path, num_sanity_val_steps=1)
    listed = list(trainer.callbacks)
    heartbeat = Heartbeat()
    step_observer(trainer).subscribe(heartbeat)
    trainer.fit(make_net(namespace), loader(), loader(batches=1))

    assert (heartbeat.starts, heartbeat.steps, heartbeat.ends) == ([0], list(range(1, 13)), [12])
    assert [timing.eval_s > 0 for timing in heartbeat.timings] == [timing.step == 7 for timing in heartbeat.timings]
    assert all(timing.busy_s > 0 and timing.duration_s > 0 for timing in heartbeat.timings)
    assert any(timing.stall_s > 0 for timing in heartbeat.timings) == ("a" in which)
    written = [
        (event["event_type"], event["step"])
        for log in find_logs([tmp_path])
        for event in map(json.loads, log.read_text().splitlines())
        if event["event_type"] in ("train_started", "step", "train_ended")
    ]
    last = [("step", 11), ("step", 12)] if ("step", 11) in written else [("step", 12)]  # short steps may share a line
    assert written == [("train_started", 0), *(("step", step) for step in range(1, 11)), *last, ("train_ended", 12)]
    assert trainer.callbacks == listed, "the user's list of callbacks is theirs"


@pytest.mark.parametrize("namespace", EITHER)
def test_both_callbacks_save_each_step_once_and_checkpoints_know_no_callback_of_ours_but_these(
    namespace: str, tmp_path: Path
) -> None:
    trainer = make_trainer(namespace, callbacks(namespace, "ga", tmp_path), root=tmp_path, max_epochs=1)
    trainer.fit(make_net(namespace), loader())
    assert names(tmp_path / "a") == {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}
    (log,) = (path for path in find_logs([tmp_path]) if path.name == "rank-00000.jsonl")
    taken = [event for event in map(json.loads, log.read_text().splitlines()) if event["event_type"] == "step"]
    assert [event["step"] for event in taken] == [1, 2, 3, 4, 5, 6]
    states = content(tmp_path / "a" / "step=6.ckpt")["callbacks"]
    assert [key.split("{")[0] for key in states] == ["ModelCheckpoint"]


def test_what_was_subscribed_by_callbacks_of_an_earlier_fit_is_not_written_again(tmp_path: Path) -> None:
    """A second fit after an exception: events of each fit are there once, in the log of that fit."""
    namespace = NAMESPACES[0]
    trainer = make_trainer(namespace, callbacks(namespace, "ga", tmp_path), root=tmp_path, max_steps=6, max_epochs=-1)
    net = make_net(namespace)
    step = net.training_step
    net.training_step = lambda batch, batch_idx: 1 / 0 if batch_idx == 3 else step(batch, batch_idx)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(net, loader())
    observer = step_observer(trainer)
    assert [type(subscriber).__name__ for subscriber in observer.subscribers] == ["_Beats", "StepTotals"]
    heartbeat = Heartbeat()
    observer.subscribe(heartbeat)
    assert heartbeat.starts == [], "nothing trains now"
    net.training_step = step
    trainer.fit(net, loader())
    assert heartbeat.starts == [3]
    assert heartbeat.steps == [4, 5, 6]


def test_the_figure_of_the_first_step_counts_the_first_step(tmp_path: Path) -> None:
    namespace = NAMESPACES[0]
    callback = goodput.build(namespace)(log=False)
    trainer = make_trainer(namespace, [callback], root=tmp_path, max_steps=1, enable_checkpointing=False)
    trainer.fit(make_net(namespace), loader())
    assert float(trainer.callback_metrics["goodput"]) > 0


HOOKS_OF_STEPS = ["on_train_start", "on_train_batch_start", "on_train_batch_end", "setup"]


@pytest.mark.parametrize("hook", HOOKS_OF_STEPS)
def test_a_subclass_that_leaves_out_super_does_not_silence_the_others(tmp_path: Path, hook: str) -> None:
    """Stock callbacks have empty hooks, so people leave it out."""
    kind = goodput.build("lightning.pytorch")
    silent = type("Silent", (kind,), {hook: lambda self, *args, **kwargs: None})(log=False)
    checkpoint = ours("lightning.pytorch", tmp_path / "c", every_n_train_steps=3)
    trainer = make_trainer("lightning.pytorch", [silent, checkpoint], root=tmp_path, max_epochs=1)
    trainer.fit(make_net("lightning.pytorch"), loader())
    lines = [
        json.loads(line) for log in (tmp_path / "c").rglob("rank-00000.jsonl") for line in log.read_text().splitlines()
    ]
    steps = [line for line in lines if line["event_type"] == "step"]
    assert sum(line.get("count", 1) for line in steps) == trainer.global_step
    assert silent.goodput > 0
