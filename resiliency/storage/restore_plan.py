"""Plans a restore: which step all ranks restore, and from which sources each host gets each shard. Pure, no torch.

Every rank has the same inventory, so every rank makes the same plan. When any rank finds a bad copy, all ranks exclude
it and plan again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from resiliency.storage.inventory import StepInventory
from resiliency.storage.sources import BadCopy, Cost, ShardSource, SourceResolver
from resiliency.storage.step_id import StepId

__all__ = ["RestorePlan", "plan_restore"]


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """The step to restore and where each host gets each shard.

    Attributes:
        step: its identity.
        world_size: number of shards.
        replicated: the whole state is in shard 0. A host then needs that shard and those of its own ranks.
        sources: ``sources[host][rank]`` -> sources to try, cheapest first; never empty. For a replicated step it leaves
            out shards that a host does not need or cannot get.
    """

    step: StepId
    world_size: int
    replicated: bool = False
    sources: Mapping[str, Mapping[int, tuple[ShardSource, ...]]]

    def to_fetch(self, host: str) -> list[int]:
        """Ranks whose shards a host has to copy into its local tier before it can read them: none of a sharded step, of
        which each rank reads what it wants where it is."""
        if not self.replicated:
            return []
        return [rank for rank, sources in self.sources[host].items() if sources[0].cost is not Cost.LOCAL]

    @property
    def fetches(self) -> bool:
        """True when some host has to fetch something."""
        return any(self.to_fetch(host) for host in self.sources)

    def in_place(self, host: str, rank: int) -> ShardSource | None:
        """The source that the host's ranks read the shard from as it is, or None when it is fetched."""
        first = self.sources[host][rank][0]
        return None if self.replicated and first.cost is not Cost.LOCAL else first


def plan_restore(
    inventory: Sequence[StepInventory],
    hosts: Collection[str],
    bad: Collection[BadCopy] = (),
    *,
    only: StepId | None = None,
    ranks: Mapping[str, Collection[int]] | None = None,
) -> RestorePlan | None:
    """Plans the newest step for which every host can get what it needs; None when there is none. Deterministic.

    A host must reach all shards; of a replicated step it needs shard 0, and takes those of its own ranks where it can.

    Args:
        inventory: of all sources.
        hosts: hosts of the job.
        bad: copies known to be bad.
        only: consider only this step.
        ranks: ranks of each host in this job; None: unknown, and every host takes every shard.
    """
    by_step: dict[StepId, list[StepInventory]] = {}
    for entry in inventory:
        if entry.world_size > 0 and only in (None, entry.step):
            by_step.setdefault(entry.step, []).append(entry)
    for step in _best_first(by_step):
        # Sources differ in world size only when one of them is damaged; a world size with all shards is the right one.
        for world_size in sorted({entry.world_size for entry in by_step[step]}, reverse=True):
            entries = [entry for entry in by_step[step] if entry.world_size == world_size]
            plan = _plan_of_step(step, world_size, entries, hosts, bad, ranks)
            if plan is not None:
                return plan
    return None


def _best_first(by_step: Mapping[StepId, Sequence[StepInventory]]) -> list[StepId]:
    """Newest line and step first. Among saves of one step, one that resumes exactly comes before a later one that
    does not (for example one in the middle of gradient accumulation)."""
    exact = {step: all(entry.exact for entry in entries) for step, entries in by_step.items()}
    return sorted(by_step, key=lambda step: (step.line, step.step, exact[step], step), reverse=True)


def _plan_of_step(
    step: StepId,
    world_size: int,
    entries: Sequence[StepInventory],
    hosts: Collection[str],
    bad: Collection[BadCopy],
    ranks: Mapping[str, Collection[int]] | None,
) -> RestorePlan | None:
    if len({rank for entry in entries for rank in entry.ranks}) < world_size:
        return None  # first, because a damaged record may have a huge world size
    resolver = SourceResolver(step, [(entry.source, entry.ranks) for entry in entries], bad)
    replicated = any(entry.replicated for entry in entries)
    sources: dict[str, dict[int, tuple[ShardSource, ...]]] = {}
    for host in hosts:
        wanted: Collection[int] = range(world_size)
        if replicated and ranks is not None:
            wanted = sorted({0, *(rank for rank in ranks.get(host, ()) if rank < world_size)})
        found = {rank: resolver.sources(host, rank) for rank in wanted}
        if replicated:
            found = {rank: usable for rank, usable in found.items() if usable or rank == 0}
        if not all(found.values()):
            return None
        sources[host] = found
    return RestorePlan(step=step, world_size=world_size, replicated=replicated, sources=sources)
