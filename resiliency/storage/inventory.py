"""Lists what each source holds of each step, from which every rank plans a restore.

Reads records and manifests, not shards. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from resiliency.storage.catalog import StepListing, damage, scan, step_prefix
from resiliency.storage.sources import ShardSource
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["StepInventory", "list_inventory"]


@dataclass(frozen=True, kw_only=True)
class StepInventory:
    """What one source holds of one step.

    Attributes:
        source: the source.
        step: the step.
        world_size: number of shards of the step; 0 when no record of it can be read there.
        ranks: ranks whose record is there with all digests, and whose shard is there with its full size.
        replicated: the whole state is in shard 0; the other shards hold only what belongs to their ranks alone.
        names: names of the step.
        exact: False when resuming from it is not exact.
        lost: for each file of a committed step that is missing, shortened or unreadable, a text with its path.
        folder: path or address of the step's folder there, which ends with "/", for messages.
        job: what identifies the job that wrote it, see :class:`resiliency.settings.Launch`.
    """

    source: ShardSource
    step: StepId
    world_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    exact: bool = True
    replicated: bool = False
    lost: tuple[str, ...] = ()
    folder: str = ""
    job: Mapping[str, str] = field(default_factory=dict)


def list_inventory(tier: Tier, run: str, source: ShardSource) -> list[StepInventory]:
    """Lists the steps of a run on a tier. Blocks: one listing, and a read per manifest or record.

    On a source of one host, which may hold only that host's part of a step, records count without a manifest. In remote
    storage a step counts only once its manifest is there.

    Raises:
        TierError: the tier cannot be listed.
    """
    found = []
    for listing in scan(tier, run):
        if listing.sizes or listing.problems:
            found.append(_entry(tier, run, source, listing))
    return found


def _entry(tier: Tier, run: str, source: ShardSource, listing: StepListing) -> StepInventory:
    """What the source holds of a step. Listed also when it is nothing that can be restored, so that the run does not
    look empty: a save or an upload that was cut off, a step whose records were deleted. What cannot be read is damage,
    and no reason to start from scratch."""
    counts = listing.committed or source.host is not None
    records = listing.records if counts else {}
    missing = listing.faults()
    return StepInventory(
        source=source,
        step=listing.id,
        world_size=next((record.world_size for record in records.values()), 0),
        ranks=tuple(sorted(rank for rank, record in records.items() if record.complete and record.file not in missing)),
        names=tuple(dict.fromkeys(name for record in records.values() for name in record.names)),
        exact=all(record.exact for record in records.values()),
        replicated=any(record.replicated for record in records.values()),
        lost=tuple(damage(tier, run, listing) if counts else listing.problems.values()),
        folder=tier.location(step_prefix(run, listing.id)),
        job=next((record.job for record in records.values() if record.job), {}),
    )
