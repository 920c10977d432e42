"""Everybody hears everybody, or a deadline names who is missing."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from resiliency.checkpoint.coordinator import Coordinator, SoloCoordinator, StoreCoordinator
from resiliency.errors import Timeout
from resiliency.testing.checkpoints import run_ranks

SHORT = timedelta(seconds=0.5)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_hears_everybody_in_every_round(world_size: int) -> None:
    def work(rank: int, coordinator: Coordinator) -> list[list[bytes]]:
        return [
            coordinator.all_gather(topic, f"{topic}{rank}".encode() * 1000, timeout=timedelta(seconds=10))
            for topic in ("a", "b", "a")
        ]

    for said in run_ranks(world_size, work):
        assert said == [[f"{topic}{rank}".encode() * 1000 for rank in range(world_size)] for topic in ("a", "b", "a")]


def test_empty_words() -> None:
    assert (
        run_ranks(2, lambda rank, coordinator: coordinator.all_gather("x", b"", timeout=SHORT * 30)) == [[b"", b""]] * 2
    )


def test_missing_ranks_are_named_within_the_deadline() -> None:
    coordinator = StoreCoordinator(HashStore(), rank=1, world_size=4, prefix="p")
    began = time.monotonic()
    with pytest.raises(Timeout) as caught:
        coordinator.all_gather("inventory", b"x", timeout=SHORT)
    assert 0.4 < time.monotonic() - began < 1.2, "the deadline counts once, not for every missing rank"
    for word in ("rank 1", "[0, 2, 3]", "'inventory'", "of 4"):
        assert word in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


def test_a_rank_that_comes_late_is_waited_for() -> None:
    store = HashStore()
    ranks = [StoreCoordinator(store, rank=rank, world_size=2, prefix="p") for rank in range(2)]
    timer = threading.Timer(0.2, lambda: ranks[1].all_gather("x", b"1", timeout=timedelta(seconds=10)))
    timer.start()
    assert ranks[0].all_gather("x", b"0", timeout=timedelta(seconds=10)) == [b"0", b"1"]
    timer.join()


def test_two_starts_on_one_store_do_not_hear_each_other() -> None:
    """torchrun keeps its store over restarts."""
    store = HashStore()
    StoreCoordinator(store, rank=0, world_size=1, prefix="first").all_gather("x", b"old", timeout=SHORT)
    assert StoreCoordinator(store, rank=0, world_size=1, prefix="second").all_gather("x", b"new", timeout=SHORT) == [
        b"new"
    ]
    assert StoreCoordinator(store, rank=0, world_size=1, prefix="first").count("c", 1) == 1
    assert StoreCoordinator(store, rank=0, world_size=1, prefix="second").count("c", 0) == 0


def test_counts_are_shared() -> None:
    counts = run_ranks(4, lambda rank, coordinator: [coordinator.count("a", 1) for _ in range(50)])
    assert sorted(value for values in counts for value in values) == list(range(1, 201))


def test_alone() -> None:
    solo = SoloCoordinator()
    assert solo.all_gather("x", b"y", timeout=timedelta(0)) == [b"y"]
    assert (solo.count("a", 2), solo.count("a", 0), solo.count("b", 1)) == (2, 2, 1)
