"""Ctrl-C, or what another signal's handler raises, is raised where the program stands; the save does not suffer."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from resiliency.checkpoint import checkpointer as checkpointer_module
from resiliency.checkpoint import snapshot as snapshot_module
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.copier import Copier
from resiliency.checkpoint.copy_sources import CopyTask
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.checkpoint.snapshot import Job, Snapshot
from resiliency.events import EventWriter
from resiliency.spans import traced
from resiliency.storage.blocks import Blocks
from resiliency.testing.checkpoints import make_checkpointer, run_ranks
from resiliency.to_thread import to_thread

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
        done = threading.Event()
        copier.fence(copier.start(job, lambda snapshot: done.set()), deadline_s=10)
        assert done.wait(10)
    finally:
        copier.close()


class OfTheHandler(OSError):
    """Of a kind that files and sockets raise, too, as TimeoutError is."""


@pytest.fixture
def usr2() -> Iterator[Callable[[type[BaseException]], None]]:
    """Sets what the handler of SIGUSR2 raises."""
    before = signal.getsignal(signal.SIGUSR2)

    def set_handler(error: type[BaseException]) -> None:
        def handler(*_: Any) -> None:
            raise error

        signal.signal(signal.SIGUSR2, handler)

    yield set_handler
    signal.signal(signal.SIGUSR2, before)


def _usr2() -> None:
    signal.raise_signal(signal.SIGUSR2)


class Interruption:
    """A profiler that raises at the n-th moment at which Python may run a signal's handler: the begin and the end of a
    function, and the end of one in C. Of those in this package, on one thread."""

    def __init__(self, number: int, raises: Callable[[], None], *, of: str = "MainThread") -> None:
        self.number = number
        self.raises = raises
        self.of = of
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.where or event == "c_call" or code.co_name == "<genexpr>":  # of which Python drops what close() raises
            return
        if "/resiliency/" not in code.co_filename or threading.current_thread().name != self.of:
            return
        if self.of != "MainThread" and code.co_filename == to_thread.__code__.co_filename:
            return  # the caller may have the result already
        if code is EventWriter.emit.__code__ or (frame.f_back and frame.f_back.f_code is EventWriter.emit.__code__):
            return  # which takes what is raised for an error of the sink
        self.number = max(0, self.number - 1)
        if self.number == 0:
            self.where = f"{event}\n" + "".join(traceback.format_stack(frame, 4))
            sys.setprofile(None)
            self.raises()


@pytest.mark.parametrize(
    ("lazy", "agent", "stride", "error"),
    [
        (True, "embedded", 1, KeyboardInterrupt),
        (False, "embedded", 2, KeyboardInterrupt),
        (True, "process", 4, KeyboardInterrupt),
        (True, "process", 3, OfTheHandler),
    ],
    ids=str,
)
def test_ctrl_c_at_any_moment_is_raised_and_harms_no_checkpoint(
    lazy: bool, agent: Any, stride: int, error: type[BaseException], tmp_path: Path, usr2: Callable[..., None]
) -> None:
    """The program goes on with a fence, changes what torch does not count, and saves again."""
    usr2(error)
    local = LocalTierOptions(directory=str(tmp_path), keep=2)
    number, step, tried = 1, 0, 0
    with make_checkpointer(local, options=CheckpointerOptions(agent=agent)) as checkpointer:
        checkpointer.save(step, {"w": torch.zeros(4000)})
        assert checkpointer.flush(timeout=SOON)
        while True:
            step, interruption, raised = step + 1, Interruption(number, _usr2), False
            weights, name = torch.full((4000,), float(step)), f"{step}.ckpt"
            try:
                sys.setprofile(interruption)
                ticket = checkpointer.save(step, {"w": weights}, lazy=lazy, names=[name])
                checkpointer.fence()
                assert ticket is not None
                ticket.wait(timeout=SOON)
                checkpointer.poll()
            except error:
                raised = True
            finally:
                sys.setprofile(None)
            if not interruption.where:
                break
            assert raised, interruption.where
            checkpointer.fence()
            weights.numpy()[:] = -1
            again = checkpointer.save(step + 1, {"w": torch.full((4000,), step + 1.0)}, names=["next.ckpt"])
            assert again is not None, interruption.where
            again.wait(timeout=SOON)
            assert torch.load(tmp_path / "next.ckpt")["w"].eq(step + 1).all(), interruption.where
            if (tmp_path / name).exists():
                assert torch.load(tmp_path / name)["w"].eq(step).all(), interruption.where
                checkpointer.delete(name)
            checkpointer.poll()
            number, step, tried = number + stride, step + 1, tried + 1
    assert tried > 300 / stride


@pytest.mark.parametrize(("agent", "stride"), [("embedded", 37), ("process", 211)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OfTheHandler])
def test_what_a_handler_raises_while_the_engine_starts_is_raised_and_leaves_nothing(
    error: type[BaseException], agent: Any, stride: int, tmp_path: Path, usr2: Callable[..., None]
) -> None:
    """Then the directory is free for the next one, in this process too."""
    usr2(error)
    main, number, tried = threading.main_thread().ident or 0, 1, 0
    while True:
        interruption = Interruption(number, lambda: signal.pthread_kill(main, signal.SIGUSR2), of="resiliency-call")
        folder = tmp_path / str(tried // 20)  # each try leaves the claim of its attempt
        checkpointer = Checkpointer(folder, run="r", rank=0, world_size=1, options=CheckpointerOptions(agent=agent))
        raised = False
        try:
            threading.setprofile(interruption)
            checkpointer.open()
        except error:
            raised = True
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("resiliency-")]
        if not interruption.where:
            checkpointer.close(flush=False)
            break
        assert raised, interruption.where
        for thread in ours:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name}: {interruption.where}"
        if tried % 20 == 19:  # an agent that was just started waits for a rank for 30 s; it serves this one, and ends
            with Checkpointer(folder, run="r", rank=0, world_size=1, options=CheckpointerOptions(agent=agent)):
                pass
        number, tried = number + stride, tried + 1
    assert tried > 500 / stride


@pytest.mark.parametrize("where", ["the fence begins", "the copy is queued"])
def test_ctrl_c_before_the_fence_leaves_the_copy_to_the_next_fence(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the program changes tensors that are being copied, and wrong bytes are committed."""
    go_on, real = threading.Event(), snapshot_module._copy

    def begins(recorder: Any, name: str) -> Any:
        if name == "wait at the fence" and not go_on.is_set():
            raise KeyboardInterrupt
        return traced(recorder, name)

    class Left:
        """A lock in whose exit the signal comes."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt

    monkeypatch.setattr(snapshot_module, "_copy", lambda *args: (go_on.wait(30), real(*args))[1])
    with make_checkpointer(tmp_path) as checkpointer:
        copier = checkpointer._parts().copier
        state, wanted = {"w": torch.ones(600_000)}, torch.ones(600_000)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            if where == "the fence begins":
                patched.setattr(checkpointer_module, "traced", begins)
            else:
                patched.setattr(copier, "_lock", Left(copier._lock))
                threading.Timer(0.2, go_on.set).start()  # save() fences before it raises
            checkpointer.save(1, state, lazy=where != "the fence begins")
            checkpointer.fence()
        assert checkpointer.pending is (where == "the fence begins")
        go_on.set()
        checkpointer.fence()
        state["w"].numpy()[:] = 7
        assert checkpointer.flush(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and torch.equal(restored.state["w"], wanted)
        assert [outcome.reason for outcome in checkpointer.poll() if outcome.failed] == []


def test_a_message_that_ctrl_c_keeps_from_being_handled_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        saves = checkpointer._parts().saves
        first = checkpointer.save(1, {"w": torch.ones(10)})
        assert first is not None and checkpointer._parts().session.client.wait_message(20)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(saves, "_process", mock.Mock(side_effect=KeyboardInterrupt))
            checkpointer.poll()
        first.wait(timeout=SOON)
        second = checkpointer.save(2, {"w": torch.ones(10)})
        assert second is not None
        second.wait(timeout=SOON)


def test_a_part_is_counted_once_when_ctrl_c_makes_its_message_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step would be taken for whole that is not."""
    starting, counted = threading.Lock(), []

    def work(rank: int, coordinator: Coordinator) -> None:
        with starting:
            monkeypatch.setenv("RESILIENCY_NODE", f"host{rank}")
            checkpointer = make_checkpointer(tmp_path / f"local{rank}", coordinator)
        with checkpointer:
            saves = checkpointer._parts().saves
            real, interrupted = saves._count, []

            def count(step: Any, amount: int) -> Any:
                found = real(step, amount)
                if amount == 1 and not interrupted:
                    interrupted.append(step)
                    raise KeyboardInterrupt
                return found

            monkeypatch.setattr(saves, "_count", count)
            ticket = checkpointer.save(1, {"w": torch.ones(10)})
            assert ticket is not None
            with pytest.raises(KeyboardInterrupt):
                ticket.wait(timeout=SOON)
            ticket.wait(timeout=SOON)
            counted.append(coordinator.count(f"recorded/{interrupted[0].dirname}", 0))

    run_ranks(2, work, timeout_s=60)
    assert counted == [2, 2]
