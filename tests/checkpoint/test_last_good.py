"""The step that the job stands on lives until one that follows it is safe, whatever is asked for meanwhile.

After a resume from an older step, because the newest is damaged, that older step is the only good one. A deletion and
the retention must not take the damaged one for its successor.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency import faultpoints
from resiliency.agent import core
from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Stage, Ticket
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.snapshot import Snapshot
from resiliency.storage.manifest import ShardRecord
from resiliency.testing.checkpoints import flip_bits, step_dir
from tests.embedded import host_agent

SOON = timedelta(seconds=30)
RUN = "r"
GOOD = "20.ckpt"


@contextmanager
def job(
    folder: Path, *, keep: int | None = 1, bucket: Path | None = None, agent: str = "embedded"
) -> Iterator[Checkpointer]:
    remotes = [RemoteTierOptions(address=str(bucket), name="bucket", keep=keep)] if bucket else []
    options = CheckpointerOptions(agent=agent, lazy_bytes=1)  # type: ignore[arg-type]
    local = LocalTierOptions(directory=str(folder), keep=keep)
    with Checkpointer(local, remotes=remotes, run=RUN, rank=0, world_size=1, options=options) as made:
        yield made


def save(checkpointer: Checkpointer, step: int, **more: object) -> Ticket:
    ticket = checkpointer.save(step, {"w": torch.full((5000,), float(step))}, **more)  # type: ignore[arg-type]
    assert ticket is not None
    return ticket


def damage(folder: Path, step: int) -> None:
    flip_bits(step_dir(folder, RUN, step) / "shard-00000.shard", [(1100, 1200)])


def damaged_newest(folder: Path, *, bucket: Path | None = None) -> None:
    """Named steps 10, 20 and 30, of which 30 is damaged wherever it is."""
    with job(folder, bucket=bucket) as first:
        for step in (10, 20, 30):
            save(first, step, names=[f"{step}.ckpt"]).wait(Stage.DURABLE, timeout=SOON)
            assert first.flush(timeout=SOON)  # a step that the bucket is too busy for gives way to the next one
    for place in (folder, bucket):
        if place is not None:
            damage(place, 30)


def resume(checkpointer: Checkpointer) -> None:
    restored = checkpointer.load()
    assert restored is not None and restored.step == 20


def is_good(folder: Path) -> bool:
    return (folder / GOOD).exists() and torch.load(folder / GOOD)["w"][0] == 20


def settled(checkpointer: Checkpointer) -> None:
    assert checkpointer.flush(timeout=SOON)
    checkpointer.poll()


def gone_soon(folder: Path, name: str = GOOD) -> bool:
    deadline, pause = time.monotonic() + 20, threading.Event()
    while (folder / name).exists() and time.monotonic() < deadline:
        pause.wait(0.05)  # a folder notifies nobody
    return not (folder / name).exists()


def nothing_left_to_delete(checkpointer: Checkpointer) -> bool:
    """Waits until the agent, which is in this process, has done all that it can by now."""
    return host_agent(checkpointer)._commits.wait_idle(time.monotonic() + 20)


def test_a_deletion_before_the_first_save_waits_for_it(tmp_path: Path) -> None:
    damaged_newest(tmp_path)
    with job(tmp_path) as second:
        resume(second)
        second.delete(GOOD)
        settled(second)
        assert is_good(tmp_path), "the only good step was deleted, and nothing follows it"
        save(second, 25).wait(Stage.DURABLE, timeout=SOON)
        settled(second)
        assert gone_soon(tmp_path), "and it is done when it may be"


def test_a_deletion_is_not_forgotten_while_a_start_still_syncs_the_steps_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the steps 10, 20 and 30 only the first is durable when the agent first looks what it may delete."""
    damaged_newest(tmp_path)
    held, go_on, fsync = threading.Event(), threading.Event(), core.fsync_step

    def fsync_step(root: str, folder: str, records: list[ShardRecord]) -> None:
        if records[0].id.step == 20:
            held.set()
            assert go_on.wait(20)
        fsync(root, folder, records)

    monkeypatch.setattr(core, "fsync_step", fsync_step)
    with job(tmp_path) as second:
        try:
            resume(second)
            assert held.wait(20)
            second.delete(GOOD)
            assert nothing_left_to_delete(second)
        finally:
            go_on.set()
        save(second, 25).wait(Stage.DURABLE, timeout=SOON)
        settled(second)
        assert gone_soon(tmp_path)


def test_other_names_are_deleted_without_waiting(tmp_path: Path) -> None:
    damaged_newest(tmp_path)
    with job(tmp_path, keep=None) as second:
        resume(second)
        second.delete("10.ckpt")
        settled(second)
        assert is_good(tmp_path) and not (tmp_path / "10.ckpt").exists()


@pytest.mark.parametrize("how", ["deleted", "superseded"])
@pytest.mark.parametrize("until", ["copied", "committed"])
def test_it_lives_while_its_successor_is_not_durable(
    how: str, until: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_newest(tmp_path)
    go_on = threading.Event()
    with job(tmp_path) as second:
        resume(second)
        held_up(monkeypatch, until, go_on)
        try:
            ticket = save(second, 25, names=["25.ckpt"], lazy=True, supersedes=[GOOD] if how == "superseded" else [])
            if how == "deleted":
                second.delete(GOOD)
            if until == "committed":
                ticket.wait(Stage.COMMITTED, timeout=SOON)
            assert nothing_left_to_delete(second)
            assert is_good(tmp_path), f"deleted although its successor was only being {until}"
        finally:
            go_on.set()
        ticket.wait(Stage.DURABLE, timeout=SOON)
        settled(second)
        assert gone_soon(tmp_path) and torch.load(tmp_path / "25.ckpt")["w"][0] == 25


def held_up(monkeypatch: pytest.MonkeyPatch, until: str, go_on: threading.Event) -> None:
    """Stops the next save before its copy, or after its commit and before its fsync."""
    if until == "copied":
        work: Callable[..., bool] = Snapshot.work
        monkeypatch.setattr(
            Snapshot, "work", lambda self, helping=False: (go_on.wait(20), work(self, helping=helping))[1]
        )
    else:
        fsync = core.fsync_step
        monkeypatch.setattr(core, "fsync_step", lambda *args: (go_on.wait(20), fsync(*args))[1])


def test_a_successor_that_is_given_up_deletes_nothing(tmp_path: Path) -> None:
    damaged_newest(tmp_path)
    with job(tmp_path) as second:
        resume(second)
        state = {"w": torch.full((2_000_000,), 3.7)}
        faultpoints.arm("save.block:delay=0.5")  # the copy is not done before the change
        try:
            ticket = second.save(25, state, names=["25.ckpt"], supersedes=[GOOD], lazy=True)
            assert ticket is not None
            second.delete(GOOD)
            state["w"].igamma_(torch.full((2_000_000,), 3.9))
            second.fence()
            settled(second)
        finally:
            faultpoints.arm("")
        assert ticket.failed is not None and is_good(tmp_path)


def test_retention_takes_nothing_at_a_start(tmp_path: Path) -> None:
    """The newest may be damaged: only ``load`` finds out, and the agent resumes an upload before."""
    bucket = tmp_path / "bucket"
    folder = tmp_path / "local"
    with job(folder, keep=2) as first:
        for step in (20, 30):
            save(first, step).wait(Stage.DURABLE, timeout=SOON)
        settled(first)
    damage(folder, 30)
    with job(folder, keep=1, bucket=bucket) as second:
        settled(second)
        second.delete("something.ckpt")
        settled(second)
        resume(second)
        second.delete("something.ckpt")
        settled(second)
        resume(second)
        save(second, 25).wait(Stage.DURABLE, timeout=SOON)
        settled(second)
        assert [step.step for step, _ in second.steps()] == [25]


def test_on_a_slower_tier_it_lives_until_its_successor_is_there(tmp_path: Path) -> None:
    bucket, folder = tmp_path / "bucket", tmp_path / "local"
    damaged_newest(folder, bucket=bucket)
    with job(folder, bucket=bucket) as second:
        resume(second)
        second.delete(GOOD)
        settled(second)
        assert is_good(folder) and is_good(bucket)
        save(second, 25)
        settled(second)
        assert gone_soon(bucket) and gone_soon(folder)


def test_an_agent_that_follows_a_killed_one_keeps_it_too(tmp_path: Path) -> None:
    damaged_newest(tmp_path)
    with job(tmp_path, agent="process") as second:
        resume(second)
        agent = second.session.client._process
        assert agent is not None
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait(10)
        second.delete(GOOD, "10.ckpt")
        assert gone_soon(tmp_path, "10.ckpt"), "the next agent has not got the deletion"
        settled(second)
        assert is_good(tmp_path)
