"""What each place holds of each step: the list every rank plans a restore from. Reads records and manifests, no shards.

No torch.
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
        source: the place.
        step: the step.
        world_size: shards the step has; 0 when nothing of the step can be read there.
        ranks: writers whose shard and record lie there in full length.
        names: names of the step.
        exact: False when the writer said that resuming from it is not exact.
        lost: in words, what of a committed step is missing, cut or unreadable, with paths.
    """

    source: ShardSource
    step: StepId
    world_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    exact: bool = True
    lost: tuple[str, ...] = ()


def list_inventory(tier: Tier, run: str, source: ShardSource) -> list[StepInventory]:
    """Lists what a tier holds of a run. Blocks: one listing, and a read per manifest or record.

    A source on one host holds that host's part of a step, so its records count by themselves. Remote storage counts a
    step only once its manifest is there.

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
        # A manifest or record that cannot be read is damage, because both are written whole or not at all. There is
        # nothing to restore from, but it is no reason to start from scratch without a word.
        lost = tuple(listing.problems)
        found.append(StepInventory(source=source, step=listing.id, world_size=0, ranks=(), lost=lost))
    if listing.records and (listing.committed or source.host is not None):
        found.append(_readable_entry(tier, run, source, listing))
    return found


def _readable_entry(tier: Tier, run: str, source: ShardSource, listing: StepListing) -> StepInventory:
    missing = set(listing.missing_files())
    records = listing.records
    prefix = f"{tier.root}/{step_prefix(run, listing.id)}"
    return StepInventory(
        source=source,
        step=listing.id,
        world_size=next(iter(records.values())).world_size,
        ranks=tuple(sorted(rank for rank, record in records.items() if record.file not in missing)),
        names=tuple(dict.fromkeys(name for record in records.values() for name in record.names)),
        exact=all(record.exact for record in records.values()),
        lost=tuple(f"{prefix}{name} is missing or cut" for name in sorted(missing)) if listing.committed else (),
    )
