"""Which step all ranks restore, and where each host gets each shard of it.

All ranks see the same inventory, so all plan the same; a bad copy that any rank finds is struck out for everyone and
the plan is made again. :func:`plan_restore` is pure; :func:`list_inventory` reads records and manifests, no shards. No
torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.manifest import MANIFEST, StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["BadCopy", "RestorePlan", "StepInventory", "list_inventory", "plan_restore"]


@dataclass(frozen=True)
class StepInventory:
    """What one place holds of one step.

    Attributes:
        tier: name of the tier ("local" tiers differ by node, remote ones do not).
        node: the host whose local tier it is; "" for a remote tier, which every host reaches.
        step: dirname of the step.
        world_size: shards the step has.
        ranks: writers whose shard and record lie there in full length.
        names: names of the step.
        lost: in words, what of a committed step is missing, cut or unreadable, with paths.
        exact: False when the writer said (``info["exact"]``) that resuming from it is not exact.
    """

    tier: str
    node: str
    step: str
    world_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    exact: bool = True
    lost: tuple[str, ...] = ()

    def to_list(self) -> list[Any]:
        return [
            self.tier,
            self.node,
            self.step,
            self.world_size,
            list(self.ranks),
            list(self.names),
            self.exact,
            list(self.lost),
        ]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> StepInventory:
        return cls(data[0], data[1], data[2], data[3], tuple(data[4]), tuple(data[5]), bool(data[6]), tuple(data[7]))


#: A copy known to be bad: (tier, node, step dirname, rank).
BadCopy = tuple[str, str, str, int]


def list_inventory(tier: Tier, run: str, *, node: str) -> list[StepInventory]:
    """Lists what a tier holds of a run. Remote tiers count a step only with its manifest.

    Raises:
        TierError: the tier cannot be listed.
    """
    found = []
    for listing in scan(tier, run):
        if MANIFEST in listing.sizes and not listing.committed and (not listing.records or not node):
            # It was whole once and cannot be read now: nothing to restore from, but no reason to start from scratch
            # either.
            found.append(StepInventory(tier.name, node, listing.id.dirname, 0, (), lost=tuple(listing.problems)))
            continue
        if listing.problems and not listing.committed:
            # Records are written whole or not at all, so one that cannot be read is damage, not a save cut short.
            found.append(StepInventory(tier.name, node, listing.id.dirname, 0, (), lost=tuple(listing.problems)))
        if not listing.records or (not node and not listing.committed):
            continue
        missing = set(listing.missing_files())
        first = next(iter(listing.records.values()))
        ranks = tuple(sorted(rank for rank, record in listing.records.items() if record.file not in missing))
        names = tuple(dict.fromkeys(name for record in listing.records.values() for name in record.names))
        exact = all(record.exact for record in listing.records.values())
        prefix = f"{tier.root}/{step_prefix(run, listing.id)}"
        lost = tuple(f"{prefix}{name} is missing or cut" for name in sorted(missing)) if listing.committed else ()
        found.append(StepInventory(tier.name, node, listing.id.dirname, first.world_size, ranks, names, exact, lost))
    return found


@dataclass(frozen=True)
class RestorePlan:
    """The step to restore and where each host gets each shard.

    Attributes:
        step: identity.
        world_size: number of shards.
        sources: ``sources[node][rank]`` -> names of tiers to try, the local one first.
    """

    step: StepId
    world_size: int
    sources: Mapping[str, Mapping[int, tuple[str, ...]]]


def _sources(
    places: Sequence[StepInventory], node: str, world_size: int, strikes: Collection[BadCopy]
) -> dict[int, tuple[str, ...]]:
    """Tiers from which a host can get each shard, its own first."""
    reachable = sorted((h for h in places if h.node in ("", node)), key=lambda h: h.node == "")
    return {
        rank: tuple(h.tier for h in reachable if rank in h.ranks and (h.tier, h.node, h.step, rank) not in strikes)
        for rank in range(world_size)
    }


def plan_restore(
    inventory: Sequence[StepInventory],
    nodes: Collection[str],
    strikes: Collection[BadCopy] = (),
    *,
    only: StepId | None = None,
) -> RestorePlan | None:
    """The newest step every host can get whole. Pure: same inventory and strikes, same choice on every rank.

    Args:
        inventory: of all places.
        nodes: hosts of the job.
        strikes: copies known to be bad.
        only: consider this step alone.
    """
    by_step: dict[StepId, list[StepInventory]] = {}
    for holding in inventory:
        step = StepId.parse(holding.step)
        if step is not None and holding.world_size > 0 and (only is None or step == only):
            by_step.setdefault(step, []).append(holding)
    # Among saves of the same step an exact one is better than a later one (in the middle of gradient accumulation,
    # say).
    order = sorted(by_step, key=lambda s: (s.attempt, s.step, all(h.exact for h in by_step[s]), s.serial), reverse=True)
    for step in order:
        # Places can only disagree about the world size when one of them is damaged; one that is whole decides.
        for world_size in sorted({place.world_size for place in by_step[step]}, reverse=True):
            places = [place for place in by_step[step] if place.world_size == world_size]
            if len({rank for place in places for rank in place.ranks}) < world_size:
                continue
            sources = {node: _sources(places, node, world_size, strikes) for node in nodes}
            if all(tiers for shards in sources.values() for tiers in shards.values()):
                return RestorePlan(step, world_size, sources)
    return None
