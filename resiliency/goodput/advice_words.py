"""Helpers and phrases that the advice rules share, see :mod:`resiliency.goodput.advice`. Pure."""

from __future__ import annotations

from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.taxonomy import Bucket

__all__ = ["INTERVAL_FACTOR", "Said", "launched", "of_each", "wall"]

#: Figures that differ by less than this factor give no reason to change anything.
INTERVAL_FACTOR = 1.5
#: A sentence (what was measured and what to do, up to "would return"), and the seconds of wall time it would return.
Said = tuple[str, float]


def wall(ledger: Ledger, bucket: Bucket) -> float:
    return ledger.wall[bucket] / 1e6


def of_each(count: int, what: str) -> str:
    return f"of each of {count} {what}s" if count > 1 else f"of the {what}"


def launched(ledger: Ledger) -> bool:
    """True when ``resiliency run`` started the job, which shows because it logs each start of ranks."""
    return any(mark.kind == EventKind.RANKS_STARTED for mark in ledger.facts.marks)
