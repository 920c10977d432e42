"""Fetches, opens and reads the shards of a restore plan for one rank. Bad copies are returned, not raised.

Not collective; :mod:`resiliency.checkpoint.restore` exchanges the bad copies between the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from resiliency.checkpoint.rank_messages import CopyProblem
from resiliency.checkpoint.shard_assembler import ShardAssembler
from resiliency.checkpoint.shard_reader import ShardReader, shard_reader
from resiliency.errors import CorruptShard, TierError
from resiliency.events import EventKind, EventWriter
from resiliency.faultpoints import hit
from resiliency.storage.catalog import read_record
from resiliency.storage.fetch import fetch_shard
from resiliency.storage.restore_plan import RestorePlan
from resiliency.storage.sources import BadCopy, Opener, ShardSource, open_source

__all__ = ["ShardAccess"]

logger = logging.getLogger(__name__)


class ShardAccess:
    """Fetches and reads shards for one rank. Thread: training.

    Args:
        here: the local tier of this host, as a source; shards are fetched into it.
        openers: by tier name: for ``here``, and for every source to fetch from.
        run: name of the run.
        rank: this rank.
        events: receives repairs and bad copies.
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
        """Opens the shards this rank needs, which checks the end of each file, and returns the bad copies.

        Args:
            readers: opened shards are added here, by rank; the caller closes them, also after errors.
        """
        problems = []
        available = plan.sources[self._host]
        needed = sorted({0, self._rank} & set(available)) if plan.replicated else sorted(available)
        for rank in needed:
            try:
                hit("restore.verify", rank=self._rank)
                tier = open_source(self._source(plan, rank), self._openers)
                readers[rank] = shard_reader(tier, self._run, read_record(tier, self._run, plan.step, rank))
            except (CorruptShard, TierError, OSError) as error:
                problems.append(self._problem(self._copy(plan, rank), error))
        return problems

    def fill(
        self, plan: RestorePlan, readers: Mapping[int, ShardReader], assembler: ShardAssembler, *, threads: int
    ) -> list[CopyProblem]:
        """Carries out the assembler's read plan, with digest checks, and returns the bad copies."""
        problems = []
        for rank, ranges in assembler.read(threads=threads).items():
            path = readers[rank].path
            error = CorruptShard(f"{path}: bytes {ranges} do not match their digests", path=path, ranges=ranges)
            problems.append(self._problem(self._copy(plan, rank), error))
        return problems

    def problem_with(self, plan: RestorePlan, readers: Mapping[int, ShardReader], error: CorruptShard) -> CopyProblem:
        """The bad copy that an error is about, found by the error's path."""
        rank = next((rank for rank, reader in readers.items() if reader.path == error.path), 0)
        return self._problem(self._copy(plan, rank), error)

    def _source(self, plan: RestorePlan, rank: int) -> ShardSource:
        """The source from which a shard is read in place: one on this host, or the local tier it was fetched into."""
        return plan.in_place(self._host, rank) or self._here

    def _copy(self, plan: RestorePlan, rank: int) -> BadCopy:
        return BadCopy(source=self._source(plan, rank), step=plan.step, rank=rank)

    def _problem(self, copy: BadCopy, error: Exception) -> CopyProblem:
        """Logs a bad copy, and returns its description for the other ranks."""
        ranges = list(error.ranges) if isinstance(error, CorruptShard) else []
        self._events.emit(EventKind.CHECKPOINT_CORRUPT, step=copy.step.step, path=str(error), ranges=ranges)
        logger.warning("rank %d: %s; trying the next copy", self._rank, error)
        return CopyProblem(copy=copy, reason=str(error), damaged=isinstance(error, CorruptShard))
