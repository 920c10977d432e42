"""The collective restore by itself: which source each shard comes from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.restore import Restored
from resiliency.errors import ConfigError
from resiliency.events import Event, EventKind
from resiliency.storage.sources import Cost, ShardSource
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import Series, flip_bits, make_series, run_ranks, step_dirs


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


@pytest.fixture
def series(tmp_path: Path) -> Series:
    """One step on a local and a remote tier, and a third copy of it that a peer host is said to hold."""
    made = make_series(tmp_path, steps=(10,))
    shutil.copytree(made.local_dir, tmp_path / "peer")
    return made


def load_with_peer(series: Series) -> tuple[list[Restored | None], list[tuple[str, int]]]:
    """Loads on two ranks that know of a peer; returns the results and (source, shard) of what was fetched."""
    sinks = [Sink(), Sink()]

    def work(rank: int, coordinator: Coordinator) -> Restored | None:
        checkpointer = series.open(coordinator, sinks=[sinks[rank]])
        try:
            restorer = checkpointer._parts().restorer
            # What a peer tier has to add: a source in one rank's inventory, and on every rank the way to open it.
            if rank == 0:
                restorer._listed.append(ShardSource(tier="peer", host="another", cost=Cost.PEER))
            restorer._openers["peer"] = lambda source: LocalTier(series.root / "peer", name=f"peer {source.host}")
            return checkpointer.load()
        finally:
            checkpointer.close(flush=False)

    restored = run_ranks(2, work)
    fetched = [
        (str(event.fields["source"]), int(event.fields["shard"]))
        for sink in sinks
        for event in sink.events
        if event.kind == EventKind.CHECKPOINT_REPAIRED
    ]
    return restored, sorted(fetched)


def check(series: Series, restored: list[Restored | None]) -> None:
    for rank, one in enumerate(restored):
        assert one is not None and series.problems(one, rank) == []


def test_a_shard_that_is_here_is_not_fetched(series: Series) -> None:
    restored, fetched = load_with_peer(series)
    check(series, restored)
    assert fetched == []


def test_a_shard_that_is_lost_here_comes_from_the_peer_and_not_from_the_store(series: Series) -> None:
    (folder,) = step_dirs(series.local_dir).values()
    (folder / "shard-00001.shard").unlink()
    restored, fetched = load_with_peer(series)
    check(series, restored)
    assert fetched == [("peer", 1)]


def test_a_damaged_copy_of_the_peer_is_passed_over_for_the_store(series: Series) -> None:
    (folder,) = step_dirs(series.local_dir).values()
    (folder / "shard-00001.shard").unlink()
    (held,) = step_dirs(series.root / "peer").values()
    flip_bits(held / "shard-00001.shard", [(1500, 1501)])
    restored, fetched = load_with_peer(series)
    check(series, restored)
    assert set(fetched) == {("object_store", 1)}


def test_a_tier_only_rank_0_knows_is_passed_over(series: Series) -> None:
    """Rank 0 lists it for all; the rank that is to fetch from it has no way to open it."""
    (folder,) = step_dirs(series.local_dir).values()
    (folder / "shard-00000.shard").unlink()
    (folder / "shard-00001.shard").unlink()

    def work(rank: int, coordinator: Coordinator) -> Restored | None:
        checkpointer = series.open(coordinator)
        try:
            restorer = checkpointer._parts().restorer
            if rank == 0:
                restorer._listed.insert(0, ShardSource(tier="extra", host=None, cost=Cost.REMOTE))
                restorer._openers["extra"] = lambda source: _tier(series)
            return checkpointer.load()
        finally:
            checkpointer.close(flush=False)

    check(series, run_ranks(2, work))


def test_tiers_behind_one_that_cannot_be_listed_are_asked(series: Series) -> None:
    """They were not, and a new host found no checkpoint while the first of its stores was down."""
    shutil.rmtree(series.local_dir)
    (series.root / "down").symlink_to("down")

    def work(rank: int, coordinator: Coordinator) -> Restored | None:
        checkpointer = series.open(coordinator)
        try:
            restorer = checkpointer._parts().restorer
            restorer._openers["down"] = lambda source: LocalTier(series.root / "down", name="down")
            if rank == 0:
                restorer._listed.insert(0, ShardSource(tier="down", host=None, cost=Cost.REMOTE))
            return checkpointer.load()
        finally:
            checkpointer.close(flush=False)

    check(series, run_ranks(2, work))


def _tier(series: Series) -> Tier:
    return LocalTier(series.remote_dir, name="extra")


def test_a_rank_of_another_version_is_refused_on_every_rank(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, coordinator: Coordinator) -> str:
        checkpointer = series.open(coordinator)
        try:
            checkpointer.open()
            real: Any = coordinator.all_gather
            if rank == 1:
                coordinator.all_gather = lambda topic, data, **more: real(topic, b"{}", **more)  # type: ignore[method-assign]
            with pytest.raises(ConfigError) as caught:
                checkpointer.load()
            coordinator.all_gather = real  # type: ignore[method-assign]
            return str(caught.value)
        finally:
            checkpointer.close(flush=False)

    for text in run_ranks(2, work):
        assert "inventory of rank 1 cannot be read: InventoryReport lacks the field 'entries'" in text
