"""A store that does not answer stops neither training nor the end of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from resiliency.checkpoint import Stage, save_tracker, shared_counts
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import Coordinator, SoloCoordinator, StoreCoordinator
from resiliency.checkpoint.shared_counts import SharedCounts
from resiliency.testing.checkpoints import make_checkpointer, make_state

#: Far more than any wait that is expected here.
LONG_S = 60


class Stopped(SoloCoordinator):
    """Counters on a host that hangs until ``goes_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def count(self, topic: str, amount: int) -> int:
        self.asked.set()
        assert self.goes_on.wait(LONG_S)
        return super().count(topic, amount)


class StoppedStore(StoreCoordinator):
    """A store whose counters do not answer while ``goes_on`` is not set."""

    def __init__(self, store: HashStore, rank: int, goes_on: threading.Event) -> None:
        super().__init__(store, rank=rank, world_size=2, prefix="ranks")
        self._goes_on = goes_on

    def count(self, topic: str, amount: int) -> int:
        assert self._goes_on.wait(LONG_S)
        return super().count(topic, amount)


@pytest.fixture
def stopped() -> Iterator[Stopped]:
    coordinator = Stopped()
    yield coordinator
    coordinator.goes_on.set()


def test_a_request_is_answered_later(stopped: Stopped) -> None:
    counts = SharedCounts(stopped)
    counts.request("a", 2)
    assert stopped.asked.wait(LONG_S)
    assert not counts.wait(0)
    assert counts.take() == {}
    assert counts.unanswered_s > 0
    stopped.goes_on.set()
    assert counts.wait(LONG_S)
    assert counts.take() == {"a": 2}
    assert counts.take() == {}
    assert counts.unanswered_s == 0
    counts.close(LONG_S)


def test_a_count_that_is_not_answered_is_given_up_and_the_next_does_not_wait(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = SharedCounts(stopped)
    monkeypatch.setattr(shared_counts, "_COUNT_S", 0.1)
    with pytest.raises(RuntimeError, match="has not answered"):
        counts.count("a", 1)
    sent = len(counts._requests)
    with pytest.raises(RuntimeError, match="has not answered"):
        counts.count("a", 1)
    assert len(counts._requests) == sent == 1
    stopped.goes_on.set()
    assert counts.wait(LONG_S)
    monkeypatch.undo()
    assert counts.count("a", 1) == 2
    counts.close(LONG_S)


def test_a_failure_of_the_store_is_raised_once_to_the_one_who_asked() -> None:
    class Gone(SoloCoordinator):
        def count(self, topic: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    counts = SharedCounts(Gone())
    with pytest.raises(RuntimeError, match="Broken pipe"):
        counts.count("a", 1)
    assert counts.take() == {}
    counts.request("a", 1)
    assert counts.wait(LONG_S)
    with pytest.raises(RuntimeError, match="Broken pipe"):
        counts.take()
    assert counts.take() == {}
    counts.close(LONG_S)


def test_what_was_requested_is_counted_before_the_end(stopped: Stopped) -> None:
    counts = SharedCounts(stopped)
    for _ in range(3):
        counts.request("a", 1)
    threading.Timer(0.1, stopped.goes_on.set).start()
    counts.close(LONG_S)
    assert stopped.count("a", 0) == 3
    counts.request("a", 1)
    assert counts.unanswered_s == 0


def test_training_goes_on_while_the_host_of_the_store_hangs_and_the_step_is_committed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each poll waited without a limit: a TCPStore whose host was stopped had not answered after 40 s."""
    monkeypatch.setattr(save_tracker, "_SILENT_S", 0.05)
    store, goes_on = HashStore(), threading.Event()
    coordinators: list[Coordinator] = [StoppedStore(store, rank, goes_on) for rank in range(2)]
    ranks = [make_checkpointer(tmp_path / f"host-{rank}", one) for rank, one in enumerate(coordinators)]
    _both(ranks, "open")
    try:
        tickets = [rank.save(1, make_state(1)) for rank in ranks]
        end = time.monotonic() + LONG_S
        polled = threading.Event()

        def train() -> None:
            for ticket in tickets:
                assert ticket is not None
                ticket.wait(Stage.RECORDED)
            while "has not answered" not in caplog.text and time.monotonic() < end:
                for rank in ranks:
                    rank.poll()
            polled.set()

        training = threading.Thread(target=train)
        training.start()
        assert polled.wait(LONG_S / 2), "a poll waits for the store"
        training.join()
        for _ in range(3):
            ranks[0].poll()
        assert caplog.text.count("rank 0: the job's store has not answered") == 1
        goes_on.set()
        for ticket in tickets:
            assert ticket is not None
            ticket.wait(Stage.COMMITTED)
    finally:
        goes_on.set()
        _both(ranks, "close")


def _both(ranks: list[Checkpointer], what: str) -> None:
    """Calls a method of both at once."""
    threads = [threading.Thread(target=getattr(rank, what)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
