"""Spans, the work that the script names: how often, how long, where on the time line. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from resiliency.goodput.ledger import Ledger
from resiliency.telemetry.facts import Segment

__all__ = ["NamedSpan", "span_rows", "spans_of"]

MOST_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class NamedSpan:
    """One span, in UTC seconds. ``ended`` is False when the log ends before the span does."""

    name: str
    start: float
    end: float
    rank: int
    attempt: int
    ended: bool


def _segments(ledger: Ledger) -> Iterator[tuple[int, int, Segment]]:
    for timing in ledger.timings:
        for lane, pieces in timing.attempt.lanes.items():
            for segment in pieces:
                yield timing.index, lane, segment


def spans_of(ledger: Ledger) -> list[NamedSpan]:
    """The spans whose times the log keeps one by one, within the accounted time, in order of time."""
    found = []
    for attempt, lane, segment in _segments(ledger):
        for name, start, seconds in segment.spans:
            end = max(start, segment.end or start) if seconds is None else start + seconds
            one = NamedSpan(
                name=name,
                start=start,
                end=end,
                rank=lane,
                attempt=attempt,
                ended=seconds is not None,
            )
            if ledger.is_whole or ledger.kept_us(one.start, one.end):
                found.append(one)
    return sorted(found, key=lambda one: one.start)


def span_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """One row per span name, the largest total first: count over all ranks, number of ranks, and seconds."""
    sums: dict[str, list[float]] = {}
    ranks: dict[str, set[int]] = {}
    longest: dict[str, float] = {}
    for one in spans_of(ledger):
        seconds = ledger.kept_us(one.start, one.end) / 1e6 if not ledger.is_whole else one.end - one.start
        longest[one.name] = max(longest.get(one.name, 0.0), seconds)
        ranks.setdefault(one.name, set()).add(one.rank)
        if not ledger.is_whole or not one.ended:
            _add(sums, one.name, 1, seconds)
    if ledger.is_whole:  # span_sums also count the spans that are not kept one by one
        for _, lane, segment in _segments(ledger):
            for name, (count, seconds) in segment.span_sums.items():
                ranks.setdefault(name, set()).add(lane)
                _add(sums, name, count, seconds)
    rows = [
        {
            "span": name,
            "count": int(count),
            "ranks": len(ranks[name]),
            "total_s": seconds,
            "mean_s": seconds / count,
            "longest_s": longest.get(name, seconds / count),
        }
        for name, (count, seconds) in sums.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["total_s"])))[:MOST_NAMES]


def _add(sums: dict[str, list[float]], name: str, count: float, seconds: float) -> None:
    kept = sums.setdefault(name, [0, 0.0])
    kept[0] += count
    kept[1] += seconds
