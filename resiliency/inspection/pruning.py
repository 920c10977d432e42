"""Which steps ``resiliency ckpt prune`` may delete (pure), and their deletion. No torch.

The newest whole step always stays, and so does every step that cannot be judged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from resiliency.inspection.survey import is_whole
from resiliency.storage.catalog import StepListing
from resiliency.storage.deletion import delete_step
from resiliency.storage.manifest import StepId
from resiliency.storage.retention import steps_to_delete
from resiliency.storage.tiers.base import Tier

__all__ = ["Doomed", "Kept", "Plan", "delete", "plan"]


@dataclass(frozen=True)
class Doomed:
    """A step that may go: why, and what it takes with it."""

    listing: StepListing
    why: str

    @property
    def nbytes(self) -> int:
        return sum(self.listing.sizes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names the step was given; those that point to a later step by now stay."""
        return tuple(dict.fromkeys(name for record in self.listing.records.values() for name in record.names))


@dataclass(frozen=True)
class Kept:
    """A step that stays although one might have expected it to go, and why."""

    id: StepId
    why: str


@dataclass(frozen=True)
class Plan:
    """Steps that may go, oldest first; unexpected survivors; and the newest whole step, None when there is none."""

    doomed: tuple[Doomed, ...]
    kept: tuple[Kept, ...]
    newest: StepListing | None


def plan(listings: Sequence[StepListing], *, keep: int | None, unfinished: bool) -> Plan:
    """Decides what may go. Pure.

    Args:
        listings: one run's steps on one tier.
        keep: keep this many of the newest whole steps, whatever they are called; None: all.
        unfinished: also delete what is not whole and older than the newest whole step.
    """
    whole = [listing for listing in listings if is_whole(listing)]
    broken = [listing for listing in listings if listing.problems]
    partial = [listing for listing in listings if not listing.problems and not is_whole(listing)]
    newest = max(whole, key=lambda listing: listing.id, default=None)
    doomed_ids: Collection[StepId] = set(
        steps_to_delete(
            [listing.manifest for listing in whole if listing.manifest is not None],
            [listing.id for listing in partial] if unfinished else [],
            keep=keep,
            keep_named=False,
        )
    )
    doomed = tuple(
        Doomed(listing, "older" if is_whole(listing) else "unfinished" if listing.manifest is None else "incomplete")
        for listing in sorted(listings, key=lambda listing: listing.id)
        if listing.id in doomed_ids
    )
    kept = [Kept(listing.id, f"cannot be judged: {listing.problems[0]}") for listing in broken]
    if unfinished:
        late = "newer than every whole step here: the next start of the job decides, or it is one host's part of a step"
        kept += [Kept(listing.id, late) for listing in partial if listing.id not in doomed_ids]
    return Plan(doomed, tuple(sorted(kept, key=lambda item: item.id)), newest)


def delete(tier: Tier, run: str, doomed: Doomed) -> list[str]:
    """Deletes one step, with the temp files that killed writers left in its folder. Nobody may be writing there.

    Returns:
        The names that were deleted with it.

    Raises:
        TierError: the tier refused; calling it again goes on where this ended.
    """
    listing = doomed.listing
    return delete_step(tier, run, listing.id, files=listing.sizes, names=doomed.names, leftovers=True)
