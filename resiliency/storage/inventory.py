"""Lists what each source holds of each step, from which every rank plans a restore.

Reads records and manifests, not shards. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from resiliency.storage.catalog import StepListing, scan, step_prefix
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
    """

    source: ShardSource
    step: StepId
    world_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    exact: bool = True
    replicated: bool = False
    lost: tuple[str, ...] = ()


def list_inventory(tier: Tier, run: str, source: ShardSource) -> list[StepInventory]:
    """Lists the steps of a run on a tier. Blocks: one listing, and a read per manifest or record.

    On a source of one host, which may hold only that host's part of a step, records count without a manifest. In remote
    storage a step counts only once its manifest is there.

    Raises:
        TierError: the tier cannot be listed.
    """
    found = []
    for listing in scan(tier, run):
        found += _entries(tier, run, source, listing)
    return found


def _entries(tier: Tier, run: str, source: ShardSource, listing: StepListing) -> list[StepInventory]:
    found = []
    if listing.problems and not listing.committed:
        # Manifests and records are written atomically, so an unreadable one is damage. The step cannot be restored, but
        # the job must not start from scratch without an error.
        lost = tuple(listing.problems)
        found.append(StepInventory(source=source, step=listing.id, world_size=0, ranks=(), lost=lost))
    if listing.records and (listing.committed or source.host is not None):
        found.append(_readable_entry(tier, run, source, listing))
    if not listing.records and not found and listing.sizes:
        # Either a save that was cut off, or a step whose records were deleted. Listed, so that the run does not look
        # empty.
        found.append(StepInventory(source=source, step=listing.id, world_size=0, ranks=()))
    return found


def _readable_entry(tier: Tier, run: str, source: ShardSource, listing: StepListing) -> StepInventory:
    missing = set(listing.missing_files())
    records = listing.records
    prefix = tier.location(step_prefix(run, listing.id))
    return StepInventory(
        source=source,
        step=listing.id,
        world_size=next(iter(records.values())).world_size,
        ranks=tuple(sorted(rank for rank, record in records.items() if record.complete and record.file not in missing)),
        names=tuple(dict.fromkeys(name for record in records.values() for name in record.names)),
        exact=all(record.exact for record in records.values()),
        replicated=any(record.replicated for record in records.values()),
        lost=tuple(f"{prefix}{name} is missing or cut" for name in sorted(missing)) if listing.committed else (),
    )
