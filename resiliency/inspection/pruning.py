"""Decides which steps ``resiliency ckpt prune`` may delete, and deletes them. No torch.

The newest committed step always stays, and so does every step with a file that cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from resiliency.inspection.survey import is_committed
from resiliency.storage.catalog import StepListing
from resiliency.storage.deletion import delete_step
from resiliency.storage.retention import steps_to_delete
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["Deletion", "KeptStep", "PrunePlan", "delete", "plan_pruning"]


@dataclass(frozen=True)
class Deletion:
    """A step to delete, and the reason."""

    listing: StepListing
    why: str

    @property
    def nbytes(self) -> int:
        return sum(self.listing.sizes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names the step was saved under. Those that point to another step by now are not deleted."""
        return tuple(dict.fromkeys(name for record in self.listing.records.values() for name in record.names))


@dataclass(frozen=True)
class KeptStep:
    """A step that is kept although the options ask to delete steps like it, and the reason."""

    id: StepId
    why: str


@dataclass(frozen=True)
class PrunePlan:
    """Steps to delete, oldest first; steps kept for a special reason; the newest committed step, None: none."""

    deletions: tuple[Deletion, ...]
    kept: tuple[KeptStep, ...]
    newest: StepListing | None


def plan_pruning(listings: Sequence[StepListing], *, keep: int | None, unfinished: bool) -> PrunePlan:
    """Decides which steps to delete. Pure.

    Args:
        listings: one run's steps on one tier.
        keep: number of newest committed steps to keep, named or not; None: all.
        unfinished: also delete steps that are not committed and older than the newest committed one.
    """
    committed = [listing for listing in listings if is_committed(listing)]
    unreadable = [listing for listing in listings if listing.problems]
    unfinished_here = [listing for listing in listings if not listing.problems and not is_committed(listing)]
    partial = [listing for listing in unfinished_here if listing.part is None]
    newest = max(committed, key=lambda listing: listing.id, default=None)
    deleted_ids: Collection[StepId] = set(
        steps_to_delete(
            [listing.manifest for listing in committed if listing.manifest is not None],
            [listing.id for listing in partial] if unfinished else [],
            keep=keep,
            keep_named=False,
        )
    )
    deletions = tuple(
        Deletion(listing, "older" if is_committed(listing) else "unfinished" if listing.manifest is None else "damaged")
        for listing in sorted(listings, key=lambda listing: listing.id)
        if listing.id in deleted_ids
    )
    kept = [
        KeptStep(listing.id, f"a file cannot be read: {next(iter(listing.problems.values()))}")
        for listing in unreadable
    ]
    if unfinished:
        kept += [
            KeptStep(listing.id, "it is committed, and its other shards are on other hosts")
            for listing in unfinished_here
            if listing.part is not None
        ]
        late = "newer than every committed step here; a job may still commit it, or its other shards are on other hosts"
        kept += [KeptStep(listing.id, late) for listing in partial if listing.id not in deleted_ids]
    return PrunePlan(deletions, tuple(sorted(kept, key=lambda item: item.id)), newest)


def delete(tier: Tier, run: str, deletion: Deletion) -> list[str]:
    """Deletes one step, with the temporary files that killed writers left in its folder. No other process may write
    there.

    Returns:
        The names that were deleted with the step.

    Raises:
        TierError: a file could not be deleted; calling again continues from there.
    """
    listing = deletion.listing
    return delete_step(tier, run, listing.id, files=listing.sizes, names=deletion.names, leftovers=True)
