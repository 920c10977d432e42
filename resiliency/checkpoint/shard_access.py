"""Fetches, opens and reads the shards of a restore plan for one rank. Bad copies are returned, not raised.

Not collective; :mod:`resiliency.checkpoint.restore` exchanges the bad copies between the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from resiliency.checkpoint.rank_messages import CopyProblem
from resiliency.checkpoint.shard_assembler import ShardAssembler
from resiliency.checkpoint.shard_reader import MAX_OPEN_FILES, RangeReader, ShardReader, shard_reader
from resiliency.errors import CorruptShard, TierError
from resiliency.events import EventKind, EventWriter
from resiliency.faultpoints import hit
from resiliency.storage.catalog import read_manifest, read_record, step_prefix
from resiliency.storage.fetch import fetch_shard
from resiliency.storage.manifest import Manifest
from resiliency.storage.restore_plan import RestorePlan
from resiliency.storage.sources import BadCopy, Cost, Opener, ShardSource, open_source

__all__ = ["ShardAccess"]

#: Ends of shards that are asked for at the same time, because each takes a tier's time to answer.
_REQUESTS = 8


class ShardAccess:
    """Fetches and reads shards for one rank. Thread: training.

    Args:
        here: the local tier of this host, as a source; shards are fetched into it.
        openers: by tier name: for ``here``, and for every source to fetch from.
        run: name of the run.
        rank: this rank.
        events: receives repairs.
    """

    def __init__(
        self, *, here: ShardSource, openers: Mapping[str, Opener], run: str, rank: int, events: EventWriter
    ) -> None:
        assert here.host is not None
        self._here, self._host = here, here.host
        self._openers = openers
        self._run, self._rank = run, rank
        self._events = events

    def fetch(self, plan: RestorePlan, rank: int) -> list[CopyProblem]:
        """Copies the shard of ``rank`` into the local tier, from the first source with a good copy.

        Blocks: as long as the sources take, with their own retries.

        Returns:
            The bad copies found. When all were bad, the shard was not fetched.
        """
        here = open_source(self._here, self._openers)
        problems = []
        for source in plan.sources[self._host][rank]:
            try:
                tier = open_source(source, self._openers)
                fetch_shard(tier, self._run, plan.step, rank, here, node=self._host)
            except (CorruptShard, TierError) as error:
                problems.append(self._problem(BadCopy(source=source, step=plan.step, rank=rank), error))
                continue
            self._events.emit(
                EventKind.CHECKPOINT_REPAIRED, step=plan.step.step, source=source.tier, shard=rank, path=here.root
            )
            break
        return problems

    def open(self, plan: RestorePlan, readers: dict[int, ShardReader]) -> list[CopyProblem]:
        """Opens the shards this rank needs, which checks the end of each, and returns the bad copies.

        Args:
            readers: opened shards are added here, by rank; the caller closes them, also after errors.
        """
        available = plan.sources[self._host]
        needed = sorted({0, self._rank} & set(available)) if plan.replicated else sorted(available)
        sources = {rank: self._source(plan, rank) for rank in needed}
        problems = []
        elsewhere = []
        for rank, source in sources.items():
            hit("restore.verify", rank=self._rank)
            if source.cost is not Cost.LOCAL:
                elsewhere.append(rank)
                continue
            try:
                tier = open_source(source, self._openers)
                readers[rank] = shard_reader(tier, self._run, read_record(tier, self._run, plan.step, rank))
                if len(needed) > MAX_OPEN_FILES:
                    readers[rank].close()  # reading opens it again
            except (CorruptShard, TierError, OSError) as error:
                problems.append(self._problem(self._copy(plan, rank), error))
        return problems + self._open_ranges(plan, {rank: sources[rank] for rank in elsewhere}, readers)

    def _open_ranges(
        self, plan: RestorePlan, sources: Mapping[int, ShardSource], readers: dict[int, ShardReader]
    ) -> list[CopyProblem]:
        """Opens shards of which ranges are read from their tiers, several at a time."""
        if not sources:
            return []

        def opened(rank: int) -> RangeReader | CorruptShard | TierError:
            try:
                tier = open_source(sources[rank], self._openers)
                manifest = manifests[sources[rank]]
                if isinstance(manifest, Exception):
                    return manifest
                record = manifest.shards[rank] if manifest else read_record(tier, self._run, plan.step, rank)
                return RangeReader(tier, step_prefix(self._run, plan.step) + record.file, record)
            except (CorruptShard, TierError) as error:
                return error

        manifests = {source: self._manifest(plan, source) for source in set(sources.values())}
        problems = []
        with ThreadPoolExecutor(min(_REQUESTS, len(sources)), "resiliency-open") as pool:
            for rank, found in zip(sources, pool.map(opened, sources), strict=True):
                if isinstance(found, RangeReader):
                    readers[rank] = found
                else:
                    problems.append(self._problem(self._copy(plan, rank), found))
        return problems

    def _manifest(self, plan: RestorePlan, source: ShardSource) -> Manifest | CorruptShard | TierError | None:
        """All records of the step in one read, or why they cannot be read; None: another host has only its own ones."""
        if source.cost is not Cost.REMOTE:
            return None
        try:
            manifest = read_manifest(open_source(source, self._openers), self._run, plan.step)
        except (CorruptShard, TierError) as error:
            return error
        return manifest if len(manifest.shards) == plan.world_size else None

    def fill(
        self, plan: RestorePlan, readers: Mapping[int, ShardReader], assembler: ShardAssembler, *, threads: int
    ) -> list[CopyProblem]:
        """Carries out the assembler's read plan, with digest checks, and returns the bad copies."""
        found = assembler.read(threads=threads)
        return [self._problem(self._copy(plan, rank), error) for rank, error in found.items()]

    def problem_with(self, plan: RestorePlan, readers: Mapping[int, ShardReader], error: CorruptShard) -> CopyProblem:
        """The bad copy that an error is about, found by the error's path."""
        rank = next((rank for rank, reader in readers.items() if reader.path == error.path), 0)
        return self._problem(self._copy(plan, rank), error)

    def _source(self, plan: RestorePlan, rank: int) -> ShardSource:
        """The source from which a shard is read: one in place, or the local tier it was fetched into."""
        return plan.in_place(self._host, rank) or self._here

    def _copy(self, plan: RestorePlan, rank: int) -> BadCopy:
        return BadCopy(source=self._source(plan, rank), step=plan.step, rank=rank)

    @staticmethod
    def _problem(copy: BadCopy, error: Exception) -> CopyProblem:
        ranges = tuple(error.ranges) if isinstance(error, CorruptShard) else ()
        return CopyProblem(copy=copy, reason=str(error), damaged=isinstance(error, CorruptShard), ranges=ranges)
