"""Divides a training interval into pieces, one for each window of its steps, for views of a part of the run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resiliency.goodput.slowdown import SlowStretch
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.facts import Segment
from resiliency.telemetry.stepstats import Window

__all__ = ["Piece", "Trained", "finer"]

Piece = dict[Bucket, int]


@dataclass(frozen=True)
class Trained:
    """The steps of a training interval.

    Attributes:
        segment: the rank in the attempt.
        start: start of the interval, UTC seconds.
        lost_above: steps after this one were run again; None: all were kept.
        slow: stretches of steps that were slower than the best stable step time.
    """

    segment: Segment
    start: float
    lost_above: int | None
    slow: Sequence[SlowStretch]


def finer(parts: Piece, trained: Trained) -> list[Piece]:
    """Divides ``parts`` (microseconds by bucket) among the windows of the steps, in order. The pieces sum exactly to
    ``parts``, bucket by bucket; a piece is as long as the sum of its parts."""
    windows = [window for _, window in sorted(trained.segment.steps.windows.items()) if window.n]
    if not windows:
        return [parts]
    columns = {bucket: _shares(total, _weights(bucket, windows, trained)) for bucket, total in parts.items()}
    rows = []
    for number in range(len(windows)):
        row = {bucket: column[number] for bucket, column in columns.items() if column[number]}
        if row:
            rows.append(row)
    return rows


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divides ``total`` into whole numbers in proportion to ``weights``."""
    whole, seen, given = sum(weights), 0.0, 0
    found = []
    for number, weight in enumerate(weights):
        seen += weight
        upto = total if number + 1 == len(weights) else min(total, max(given, round(total * (seen / whole))))
        found.append(upto - given)
        given = upto
    return found


def _weights(bucket: Bucket, windows: Sequence[Window], trained: Trained) -> list[float]:
    found = _measured(bucket, windows, trained)
    if sum(found) <= 0.0:
        found = [window.compute_s for window in windows]
    return found if sum(found) > 0.0 else [float(window.n) for window in windows]


def _measured(bucket: Bucket, windows: Sequence[Window], trained: Trained) -> list[float]:
    if bucket is Bucket.DATA_WAIT:
        return [window.data_s for window in windows]
    if bucket is Bucket.LOOP:
        return [window.loop_s for window in windows]
    if bucket is Bucket.CHECKPOINT_STALL:
        return [window.stall_s for window in windows]
    if bucket is Bucket.INTERFERENCE:
        return [float(window.flight_n) for window in windows]
    if bucket is Bucket.UNKNOWN:
        return _gaps(windows, trained)
    if bucket is Bucket.WARM_UP:
        last = max((head.step for head in trained.segment.steps.head), default=-1)
        return [float(window.last_step - window.n < last) for window in windows]
    if bucket is Bucket.SLOWDOWN:
        return [_slow(window, trained.slow) for window in windows]
    if bucket not in (Bucket.LOST_WORK, Bucket.PRODUCTIVE):
        return []
    found = []
    for window in windows:
        lost = _share_above(window, trained.lost_above)
        worked = max(0.0, window.compute_s - _slow(window, trained.slow))
        found.append(worked * lost if bucket is Bucket.LOST_WORK else worked * (1 - lost) + window.eval_s)
    return found


def _gaps(windows: Sequence[Window], trained: Trained) -> list[float]:
    """Unexplained seconds of each window: the time between its steps, and what its longest step took beyond five times
    the window's mean step."""
    found, before = [], trained.start
    for window in windows:
        ended = trained.segment.window_end(window)
        end = max(before, ended) if ended is not None else before + window.step_s
        mean = window.step_s / window.n
        found.append(max(0.0, end - before - window.step_s) + max(0.0, window.max_s - 5 * mean))
        before = end
    return found


def _share_above(window: Window, step: int | None) -> float:
    if step is None or window.last_step <= step:
        return 0.0
    return min(1.0, (window.last_step - step) / window.n)


def _slow(window: Window, stretches: Sequence[SlowStretch]) -> float:
    first = window.last_step - window.n + 1
    return sum(
        one.per_step_s * max(0, min(window.last_step, one.last) - max(first, one.first) + 1) for one in stretches
    )
