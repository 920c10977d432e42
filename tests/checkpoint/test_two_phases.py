"""A late copy counts once the training thread has agreed that nothing changed under it; what is given up is gone at once.

Torch counts a change in place when its kernel ends. A kernel that runs for a while right after a save changes what the
copy thread still reads or has just read, and no count has moved when the copy is done.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Stage, Ticket
from resiliency.checkpoint import snapshot as snapshot_module
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ResiliencyError
from resiliency.testing.checkpoints import run_ranks, step_dirs
from resiliency.testing.zygote import Zygote
from tests.zygote import start_script

SOON = timedelta(seconds=20)
SLOW = torch.full((2_000_000,), 3.9)
ALL_LATE = CheckpointerOptions(agent="embedded", lazy_bytes=1)


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    local = LocalTierOptions(directory=str(tmp_path), keep=1)
    with Checkpointer(local, run="r", rank=0, world_size=1, options=ALL_LATE) as made:
        yield made


def weight() -> torch.Tensor:
    return torch.full((2_000_000,), 3.7)


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("shard-*") if path.is_file())


def save(checkpointer: Checkpointer, step: int, state: object, **more: object) -> Ticket:
    ticket = checkpointer.save(step, state, **more)  # type: ignore[arg-type]
    assert ticket is not None
    return ticket


def given_up(ticket: Ticket) -> bool:
    with pytest.raises(ResiliencyError, match="changed before the fence"):
        ticket.wait(Stage.COMMITTED, timeout=SOON)
    return ticket.failed is not None


def slow_change(state: dict[str, torch.Tensor]) -> None:
    """Holds the thread in one kernel for some tenths of a second, and is counted at its end."""
    state["w"].igamma_(SLOW)


def test_a_change_in_place_right_after_a_late_save_leaves_nothing_of_it(
    checkpointer: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": weight()}
    good = {"w": state["w"].clone()}
    save(checkpointer, 1, state, names=["a.ckpt"]).wait(Stage.DURABLE, timeout=SOON)
    kept = files(tmp_path)
    with caplog.at_level(logging.WARNING, logger="resiliency"):
        ticket = save(checkpointer, 2, state, names=["b.ckpt"], supersedes=["a.ckpt"], lazy=True)
        slow_change(state)
        checkpointer.fence()
        assert given_up(ticket)
    assert checkpointer.torn == 1 and "'w' was changed before the fence" in caplog.text
    assert checkpointer.flush(timeout=SOON)
    assert files(tmp_path) == kept, "a file of the save that was given up is left"
    assert [step.step for step, _ in checkpointer.steps()] == [1]
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["w"], good["w"]) and not (tmp_path / "b.ckpt").exists()
    assert torch.equal(checkpointer.load().state["w"], good["w"])  # type: ignore[union-attr]


def test_the_next_save_after_one_that_was_given_up_is_good(checkpointer: Checkpointer, tmp_path: Path) -> None:
    state = {"w": weight()}
    ticket = save(checkpointer, 1, state, lazy=True)
    slow_change(state)
    checkpointer.fence()
    assert given_up(ticket)
    save(checkpointer, 1, state, lazy=True).wait(Stage.DURABLE, timeout=SOON)
    assert torch.equal(checkpointer.load().state["w"], state["w"])  # type: ignore[union-attr]


def test_a_copy_that_was_done_when_the_training_thread_settled_is_kept(checkpointer: Checkpointer) -> None:
    """Also where nobody calls the fence before the change."""
    state = {"w": weight()}
    good = state["w"].clone()
    ticket = save(checkpointer, 1, state, lazy=True)
    snapshot = checkpointer._opened.saves.in_flight.snapshot  # type: ignore[union-attr]
    assert snapshot is not None and snapshot.copied.wait(10)
    assert not snapshot.decided
    checkpointer.settle()
    slow_change(state)
    checkpointer.fence()
    ticket.wait(Stage.COMMITTED, timeout=SOON)
    assert torch.equal(checkpointer.load().state["w"], good)  # type: ignore[union-attr]


def test_a_late_save_is_committed_without_a_fence_while_the_training_thread_polls(checkpointer: Checkpointer) -> None:
    """A validation that lasts for an hour must not put the commit off for an hour."""
    ticket = save(checkpointer, 1, {"w": weight()}, lazy=True)
    deadline = time.monotonic() + 20
    while not ticket.has_reached(Stage.COMMITTED) and time.monotonic() < deadline:
        checkpointer.poll()
    assert ticket.has_reached(Stage.COMMITTED)


def test_of_ranks_that_write_one_file_one_gives_the_step_up_for_all(tmp_path: Path) -> None:
    """Whichever of them it is."""

    def job(rank: int, coordinator: object) -> list[int]:
        with Checkpointer(
            tmp_path,
            run="r",
            rank=rank,
            world_size=2,
            coordinator=coordinator,  # type: ignore[arg-type]
            options=CheckpointerOptions(agent="embedded", lazy_bytes=1),
        ) as checkpointer:
            state = {"w": weight().repeat(4)}
            first = save(checkpointer, 1, state, names=["a.ckpt"])
            first.wait(Stage.COMMITTED, timeout=SOON)
            for step, torn_rank in ((2, 0), (3, 1)):
                save(checkpointer, step, state, names=["b.ckpt"], supersedes=["a.ckpt"], lazy=True)
                checkpointer._opened.saves.in_flight.snapshot.copied.wait(10)  # type: ignore[union-attr]
                if rank == torn_rank:
                    torch.autograd.graph.increment_version(state["w"])
                checkpointer.fence()
                assert checkpointer._opened.copier.wait_idle(10)  # type: ignore[union-attr]
            # A part that may still come is waited for longer.
            assert checkpointer.flush(timeout=SOON), "it waited for a part that does not come"
            failed = [outcome.id.step for outcome in checkpointer.poll() if outcome.stage is None]
            assert sorted(failed) == [2, 3]
            return [step.step for step, _ in checkpointer.steps()]

    assert run_ranks(2, job) == [[1], [1]]
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["w"], weight().repeat(4)) and not (tmp_path / "b.ckpt").exists()


KILLED = """
import os, signal, sys, time
from datetime import timedelta
import torch
from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Stage

checkpointer = Checkpointer(sys.argv[1], run="r", rank=0, world_size=1, options=CheckpointerOptions(lazy_bytes=1))
state, slow = {"w": torch.full((2_000_000,), 3.7)}, torch.full((2_000_000,), 3.9)
checkpointer.save(1, state, names=["last.ckpt"]).wait(Stage.DURABLE, timeout=timedelta(seconds=60))
checkpointer.warm_up(state)
ticket = checkpointer.save(2, state, names=["last.ckpt"], lazy=True)
state["w"].igamma_(slow)
if sys.argv[2] == "fence":
    checkpointer.fence()
    time.sleep(0.5)  # the agent is a process of its own: it would commit what it was told
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["fence", "kernel"])
def test_a_kill_after_a_change_under_the_copy_resumes_from_the_step_before(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, when: str
) -> None:
    output = tmp_path_factory.mktemp("output") / "killed"
    child = start_script(zygote, KILLED, output, str(tmp_path), when)
    assert child.wait(timeout_s=120) == -signal.SIGKILL, output.read_text()[-2000:]
    with Checkpointer(tmp_path, run="r", rank=0, world_size=1) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1
        assert torch.equal(restored.state["w"], weight())
        assert torch.equal(torch.load(tmp_path / "last.ckpt")["w"], weight())
        # After a kill in the kernel nobody was left to remove the file.
        assert when == "kernel" or [step.step for step in step_dirs(tmp_path, "r")] == [1]


# ---- changes that torch does not count


def uncounted(
    checkpointer: Checkpointer, change: Callable[[torch.Tensor], object], saves: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Saves ``saves`` times, and changes the tensor while it is copied. Steps that were given up."""
    weight = torch.zeros(300_000)
    copy = snapshot_module._copy

    def copy_and_change(*arguments: Any) -> Any:
        found = copy(*arguments)
        change(weight)
        return found

    monkeypatch.setattr(snapshot_module, "_copy", copy_and_change)
    found = []
    for step in range(1, saves + 1):
        ticket = save(checkpointer, step, {"a": torch.ones(10), "w": weight}, lazy=True)
        checkpointer.fence()
        weight.add_(1)  # the optimizer's step
        try:
            ticket.wait(timeout=SOON)
        except ResiliencyError as error:
            assert "'w'" in str(error) and ".data" in str(error)
            found.append(step)
    return found


def test_a_change_through_data_is_noticed_at_the_first_save_and_named(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uncounted(checkpointer, lambda weight: weight.data.add_(1.0), 1, monkeypatch) == [1]
    checkpointer.flush()
    assert files(Path(checkpointer.directory)) == []


def test_it_is_looked_for_ever_more_rarely(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert uncounted(checkpointer, lambda weight: weight.data.add_(1.0), 9, monkeypatch) == [1, 2, 4, 8]


def test_nothing_is_given_up_when_nothing_changes(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert uncounted(checkpointer, lambda weight: weight.sum(), 9, monkeypatch) == []


def test_a_tensor_that_is_given_other_memory_under_a_late_copy_is_saved_as_it_was(tmp_path: Path) -> None:
    """In a fork, which must not end with SIGSEGV: nobody else holds the memory that it had."""
    weights = [torch.full((8_000_000,), float(step)) for step in (1, 2, 3)]  # a fork has no threads of OpenMP

    def work() -> None:
        local = LocalTierOptions(directory=str(tmp_path))
        with Checkpointer(local, run="r", rank=0, world_size=1, options=ALL_LATE) as made:
            for step, weight in enumerate(weights, 1):
                ticket = save(made, step, {"weight": weight}, names=[f"{step}.ckpt"], lazy=True)
                weight.data = torch.zeros(3)
                made.fence()
                ticket.wait(timeout=SOON)

    assert forked(work) == 0
    for step in (1, 2, 3):
        weight = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["weight"]
        assert torch.equal(weight, torch.full((8_000_000,), float(step)))


def forked(work: Callable[[], None]) -> int:
    """How a child ends that does this: 0, or the signal that ended it, negative."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    pidfd = os.pidfd_open(child)
    ended, _, _ = select.select([pidfd], [], [], 60)
    os.close(pidfd)
    if not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
