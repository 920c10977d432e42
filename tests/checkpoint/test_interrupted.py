"""Ctrl-C, or what another signal's handler raises, is raised where the program stands; the save does not suffer."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from resiliency.checkpoint import _freed_memory
from resiliency.checkpoint import checkpointer as checkpointer_module
from resiliency.checkpoint import snapshot as snapshot_module
from resiliency.checkpoint.copier import Copier
from resiliency.checkpoint.copy_sources import CopyTask
from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.checkpoint.save_trace import SaveTrace
from resiliency.checkpoint.snapshot import Job, Snapshot
from resiliency.storage.blocks import Blocks
from resiliency.testing.checkpoints import make_checkpointer

SOON = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Processes that a shell has started in the background ignore it."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("lazy", [True, False])
def test_ctrl_c_while_the_training_thread_copies_is_raised_and_the_save_is_committed(
    lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = snapshot_module._copy, threading.Event()

    def copy(*args: Any) -> tuple[int, int]:
        if threading.current_thread() is threading.main_thread() and not sent.is_set():
            sent.set()
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    wanted = torch.arange(3_000_000.0)
    with make_checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(snapshot_module, "_copy", copy)
            # The copy thread comes late, so that this thread has blocks to copy.
            patched.setattr(Snapshot, "wait_device", lambda self: sent.wait(30))
            state = {"w": wanted.clone()}
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, state, lazy=lazy)
                checkpointer.fence()
        assert not checkpointer.pending
        state["w"].fill_(0)
        assert checkpointer.flush(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and torch.equal(restored.state["w"], wanted)
        assert [outcome.reason for outcome in checkpointer.poll() if outcome.failed] == []
        ticket = checkpointer.save(2, state)
        assert ticket is not None
        ticket.wait(timeout=SOON)


def test_a_fence_that_ctrl_c_has_ended_too_early_is_made_up_for_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next update would get into the copy."""
    go_on, real = threading.Event(), snapshot_module._copy

    def fence(self: Copier, snapshot: Snapshot, *, deadline_s: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot_module, "_copy", lambda *args: (go_on.wait(30), real(*args))[1])
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(600_000)}, lazy=True)
        with monkeypatch.context() as patched:
            patched.setattr(Copier, "fence", fence)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.fence()
        assert checkpointer.pending
        go_on.set()
        checkpointer.fence()
        assert not checkpointer.pending and checkpointer.flush(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1


@pytest.mark.parametrize("where", ["saves.begin", "Seal", "copies.start"])
def test_ctrl_c_in_the_middle_of_a_save_does_not_end_saving(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(real: Any, after: bool) -> Any:
        def call(*args: Any, **further: Any) -> Any:
            if after:
                real(*args, **further)
            raise KeyboardInterrupt

        return call

    with make_checkpointer(tmp_path) as checkpointer:
        state = {"w": torch.ones(10)}
        checkpointer.warm_up(state)
        parts = checkpointer._opened
        assert parts is not None
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            if where == "Seal":
                patched.setattr(checkpointer_module, "Seal", interrupted(checkpointer_module.Seal, after=False))
            elif where == "saves.begin":
                patched.setattr(parts.saves, "begin", interrupted(parts.saves.begin, after=True))
            else:
                patched.setattr(parts.copies, "start", interrupted(parts.copies.start, after=False))
            checkpointer.save(1, state)
        ticket = checkpointer.save(2, state)
        assert ticket is not None
        ticket.wait(timeout=SOON)


@pytest.mark.parametrize("where", ["before the copy thread is woken", "after"])
def test_ctrl_c_while_a_copy_is_queued_leaves_none_that_nobody_does(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = Copier()
    notify = copier._wake.notify_all

    def interrupted() -> None:
        if where == "after":
            notify()
        raise KeyboardInterrupt

    job = Job(copies=(), blocks=Blocks(0, 4096), mine=())
    live = Job(copies=(CopyTask(torch.ones(9), 0, 36, storage=0),), blocks=Blocks(36, 4096), mine=range(1))
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(copier._wake, "notify_all", interrupted)
            copier.start(live, lambda snapshot: None)
        assert not _freed_memory._guarded, "who frees a tensor's memory would wait for that copy"
        done = threading.Event()
        copier.fence(copier.start(job, lambda snapshot: done.set()), deadline_s=10)
        assert done.wait(10)
    finally:
        copier.close()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("agent", ["embedded", "process"])
def test_the_training_thread_enters_no_lock_in_python_code(agent: Any, lazy: bool, tmp_path: Path) -> None:
    """Ctrl-C between the lock and the ``with`` of ``Condition.__enter__`` leaves it held, and the next save hangs."""
    entered: list[str] = []
    saved: list[bool] = []
    traces = {step: SaveTrace(step=step, rank=0, write=lambda _: None, timeout_s=30) for step in (2, 3)}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is threading.Condition.__enter__.__code__:
            entered.append("".join(traceback.format_stack(frame.f_back, 4)))

    remote = RemoteTierOptions(address=str(tmp_path / "remote"))
    options = CheckpointerOptions(agent=agent)
    with make_checkpointer(tmp_path / "local", remotes=[remote], options=options) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(300_000)}, lazy=lazy)
        assert checkpointer.flush(timeout=SOON)
        sys.setprofile(profile)
        try:
            for step in (2, 3):
                ticket = checkpointer.save(step, {"w": torch.ones(300_000)}, lazy=lazy, trace=traces[step])
                checkpointer.fence()
                checkpointer.poll()
                assert ticket is not None
                ticket.wait(timeout=SOON)
                saved.append(checkpointer.flush(timeout=SOON))
        finally:
            sys.setprofile(None)
    assert saved == [True, True] and not entered, "\n".join(entered)
