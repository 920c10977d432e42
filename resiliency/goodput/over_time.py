"""Goodput as it changes over the run. Pure.

The run is divided into equal columns. A column's figure is rolling: goodput of the last few columns up to this one. So
one restart does not hide in an average over days, and one slow step does not look like a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from resiliency.goodput.lanes import LaneInterval
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.taxonomy import Bucket

__all__ = ["Column", "Point", "columns_of", "over_time"]

COLUMNS = 96
#: Number of columns that one rolling figure covers, its own included.
ROLLING = 6
#: With more lanes than this, at most this many are used, evenly chosen.
MOST_LANES = 64


@dataclass
class Column:
    """``[start_us, end_us)`` and its GPU-microseconds by bucket."""

    start_us: int
    end_us: int
    parts: dict[Bucket, float] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Point:
    """Goodput at the end of a column (``time``, UTC seconds), as shares in [0, 1].

    ``goodput`` is the rolling figure, ``so_far`` that of the run up to here. ``worst`` is the bucket other than
    productive with the most time in the column; None when there is none.
    """

    time: float
    goodput: float
    so_far: float
    worst: Bucket | None


def columns_of(ledger: Ledger, count: int = COLUMNS) -> list[Column]:
    """The run's time in ``count`` columns of equal length."""
    if not ledger.kept:
        return []
    begin, end = ledger.kept[0][0], ledger.kept[-1][1]
    count = max(1, min(count, end - begin))
    edges = [begin + (end - begin) * number // count for number in range(count + 1)]
    columns = [Column(low, high) for low, high in zip(edges, edges[1:], strict=False)]
    every = max(1, -(-len(ledger.lanes) // MOST_LANES))
    for lane in ledger.lanes[::every]:
        for interval in lane.intervals:
            for piece in interval.pieces() if interval.length_us * count > end - begin else (interval,):
                _add(columns, piece, lane.copies, begin, end)
    return columns


def _add(columns: list[Column], piece: LaneInterval, copies: int, begin: int, end: int) -> None:
    count, length = len(columns), piece.length_us
    place = max(0, min(count - 1, (piece.start_us - begin) * count // max(1, end - begin)))
    while place > 0 and columns[place].start_us > piece.start_us:
        place -= 1
    while place < count and columns[place].start_us < piece.end_us:
        column = columns[place]
        overlap = min(column.end_us, piece.end_us) - max(column.start_us, piece.start_us)
        if overlap > 0:
            for bucket, amount in piece.parts.items():
                column.parts[bucket] = column.parts.get(bucket, 0.0) + amount * copies * overlap / length
        place += 1


def over_time(ledger: Ledger) -> list[Point]:
    """One point per column, except for columns whose time was left out."""
    columns = columns_of(ledger)
    points: list[Point] = []
    done = whole = 0.0
    for number, column in enumerate(columns):
        done += column.parts.get(Bucket.PRODUCTIVE, 0.0)
        whole += column.whole
        recent = columns[max(0, number + 1 - ROLLING) : number + 1]
        spent = sum(one.whole for one in recent)
        if not column.whole or not spent:
            continue
        bad = {bucket: amount for bucket, amount in column.parts.items() if bucket is not Bucket.PRODUCTIVE}
        points.append(
            Point(
                time=column.end_us / 1e6,
                goodput=min(1.0, sum(one.parts.get(Bucket.PRODUCTIVE, 0.0) for one in recent) / spent),
                so_far=min(1.0, done / whole),
                worst=max(bad, key=lambda bucket: bad[bucket]) if bad else None,
            )
        )
    return points
