"""The time line of one rank: contiguous intervals over the whole run, each split into buckets that sum to it. Pure.

Integer microseconds throughout: sums are exact by construction, because every
interval begins where the one before ends, and its parts are rounded so that they sum to its length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from resiliency.goodput.finer import Trained, finer
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.taxonomy import Bucket

__all__ = ["LaneInterval", "Lane", "apportion", "us"]

Name = TypeVar("Name", bound=Hashable)


def us(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * 1_000_000)


@dataclass(frozen=True)
class LaneInterval:
    """``[start_us, end_us)`` of one rank. ``parts`` are microseconds by bucket and sum to its length.

    ``start_part`` is the part of a start or restart that it belongs to; it means nothing in other buckets. ``trained``
    holds the steps of a training interval; None: not known.
    """

    start_us: int
    end_us: int
    attempt: int
    phase: str
    parts: dict[Bucket, int]
    start_part: StartPart = StartPart.OTHER
    trained: Trained | None = field(default=None, compare=False)

    @property
    def length_us(self) -> int:
        return self.end_us - self.start_us

    def pieces(self) -> list[LaneInterval]:
        """A training interval divided at the windows of its steps; any other interval undivided. The pieces sum to the
        interval, bucket by bucket."""
        if self.trained is None:
            return [self]
        found, start = [], self.start_us
        for parts in finer(self.parts, self.trained):
            end = start + sum(parts.values())
            found.append(LaneInterval(start, end, self.attempt, self.phase, parts))
            start = end
        return found

    def within(self, start_us: int, end_us: int) -> list[LaneInterval]:
        """The pieces of the interval between two moments. A piece that reaches beyond one of them is scaled down to
        the part inside."""
        if start_us <= self.start_us and self.end_us <= end_us:
            return [self]
        found = []
        for piece in self.pieces():
            low, high = max(start_us, piece.start_us), min(end_us, piece.end_us)
            if low < high:
                parts = apportion(piece.parts, high - low)
                found.append(LaneInterval(low, high, self.attempt, self.phase, parts, self.start_part))
        return found


def apportion(amounts: dict[Name, int], total: int) -> dict[Name, int]:
    """Scales non-negative ``amounts`` to whole numbers that sum to ``total`` (largest remainder). Returns {} when all
    amounts, or the total, are 0."""
    have = sum(amounts.values())
    if have <= 0 or total <= 0:
        return {}
    scaled = {name: amount * total // have for name, amount in amounts.items()}
    short = total - sum(scaled.values())
    by_remainder = sorted(amounts, key=lambda name: (-(amounts[name] * total % have), -amounts[name]))
    for name in by_remainder[:short]:
        scaled[name] += 1
    return {name: amount for name, amount in scaled.items() if amount}


class Lane:
    """Builds the time line of one rank from ``start_us`` to ``end_us``."""

    def __init__(self, start_us: int, end_us: int) -> None:
        self.cursor = start_us
        self.end_us = end_us
        #: No interval ends after this, the start of the next attempt.
        self.limit_us = end_us
        self.attempt = 0
        self.intervals: list[LaneInterval] = []

    def until(self, time_us: int, bucket: Bucket, phase: str, part: StartPart = StartPart.OTHER) -> None:
        """Puts the time from the cursor to ``time_us`` into one bucket; does nothing when ``time_us`` is not after the
        cursor."""
        stop = min(time_us, self.limit_us)
        if stop > self.cursor:
            parts = {bucket: stop - self.cursor}
            self.intervals.append(LaneInterval(self.cursor, stop, self.attempt, phase, parts, part))
            self.cursor = stop

    def mixed(
        self,
        time_us: int,
        claims: Iterable[tuple[Bucket, float]],
        rest: Bucket,
        phase: str,
        *,
        whole_us: int = 0,
        trained: Trained | None = None,
    ) -> None:
        """Splits the time up to ``time_us`` among ``claims`` (seconds by bucket); what is left goes to ``rest``.

        Args:
            whole_us: the length that the claims cover; when a newer attempt cut the interval shorter, they are scaled
                down with it. 0: the interval's own length.
            trained: the steps of the interval.
        """
        stop = min(time_us, self.limit_us)
        length = stop - self.cursor
        if length <= 0:
            return
        amounts: dict[Bucket, int] = {}
        for bucket, seconds in claims:
            if seconds > 0.0:
                amounts[bucket] = amounts.get(bucket, 0) + us(seconds)
        if whole_us > length:
            amounts = {bucket: amount * length // whole_us for bucket, amount in amounts.items()}
        claimed = sum(amounts.values())
        if claimed > length:
            amounts = apportion(amounts, length)
        elif claimed < length:
            amounts[rest] = amounts.get(rest, 0) + length - claimed
        parts = {bucket: amount for bucket, amount in amounts.items() if amount}
        self.intervals.append(LaneInterval(self.cursor, stop, self.attempt, phase, parts, trained=trained))
        self.cursor = stop
