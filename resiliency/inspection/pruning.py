"""Deleting steps by hand: what may go (pure), and how it goes. No torch.

The newest whole step always stays, and so does every step that cannot be judged. The order is the agent's: manifest
first, so that a step which is half deleted is a step that is not there; then records, shards, and the names.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from resiliency.errors import TierError
from resiliency.inspection.survey import is_whole
from resiliency.storage.catalog import StepListing, read_name, step_prefix
from resiliency.storage.manifest import MANIFEST, StepId
from resiliency.storage.retention import steps_to_delete
from resiliency.storage.tiers.base import Tier

__all__ = ["Doomed", "Kept", "Plan", "delete_step", "plan"]


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


def delete_step(tier: Tier, run: str, doomed: Doomed) -> list[str]:
    """Deletes one step; returns the names that went with it. Killed halfway, it can be done again.

    Raises:
        TierError: the tier refused; what is left is no complete step.
    """
    listing = doomed.listing
    prefix = step_prefix(run, listing.id)

    def place(file: str) -> int:
        return 0 if file == MANIFEST else 1 if file.endswith(".json") else 2

    for file in sorted(listing.sizes, key=lambda file: (place(file), file)):
        tier.delete(prefix + file)
    if tier.is_local:
        # Temp files of killed writers are in no listing and would keep the folder alive.
        try:
            shutil.rmtree(f"{tier.root}/{prefix}".rstrip("/"))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TierError(f"{tier.root}/{prefix} cannot be removed: {error}", retryable=False) from error
    gone = []
    for name in doomed.names:
        pointer = read_name(tier, name)
        if pointer is not None and pointer.run == run and pointer.id == listing.id:
            tier.delete(name)
            gone.append(name)
    return gone
