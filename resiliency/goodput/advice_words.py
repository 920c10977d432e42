"""What rules of advice have in common: see :mod:`resiliency.goodput.advice`. Pure."""

from __future__ import annotations

from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.taxonomy import Bucket

__all__ = ["INTERVAL_FACTOR", "Said", "launched", "of_each", "wall"]

#: Less than this much more or less is no difference to act on.
INTERVAL_FACTOR = 1.5
#: What was measured and what to do, up to "would return", and seconds of wall time.
Said = tuple[str, float]


def wall(ledger: Ledger, bucket: Bucket) -> float:
    return ledger.wall[bucket] / 1e6


def of_each(count: int, what: str) -> str:
    return f"of each of {count} {what}s" if count > 1 else f"of the {what}"


def launched(ledger: Ledger) -> bool:
    """``resiliency run`` has started the job: it logs when it starts ranks."""
    return any(mark.kind == EventKind.RANKS_STARTED for mark in ledger.facts.marks)
