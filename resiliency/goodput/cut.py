"""Cuts off the steps that a rank of an old attempt ran after the next attempt had begun. Pure."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from resiliency.goodput.attempts import Attempt
from resiliency.telemetry.facts import Segment
from resiliency.telemetry.stepstats import Histogram, StepStats, Window

__all__ = ["cut_attempts", "steps_until"]


def cut_attempts(attempts: Sequence[Attempt]) -> None:
    """Ends each attempt's steps where the next attempt begins. A segment that is cut is replaced by a shorter copy; the
    original is not changed."""
    for attempt, following in zip(attempts, attempts[1:], strict=False):
        end = following.start
        for pieces in attempt.lanes.values():
            for place, segment in enumerate(pieces):
                last = segment.last_step_time()
                if last is None or last <= end:
                    continue
                pieces[place] = shorter = copy.copy(segment)
                shorter.steps = steps_until(segment, end)
                shorter.last = end if shorter.last is None else min(shorter.last, end)


def steps_until(segment: Segment, time: float) -> StepStats:
    """The steps that had ended by ``time`` (UTC seconds). The steps of one window are taken as equally long."""
    steps, kept = segment.steps, StepStats()
    kept.shift = steps.shift
    start = segment.first_step_start()
    before = time if start is None else start
    for key, window in sorted(steps.windows.items()):
        end = segment.window_end(window)
        if end is None or end <= time:
            part = window
        else:
            share = (time - before) / (end - before) if before < time else 0.0
            part = _share(window, int(window.n * share))
            part.last_stamp = time - segment.moved_s
            part.last_mono = None if segment.offset is None else time - segment.offset
        before = end if end is not None else before
        if part.n:
            kept.windows[key] = part
            kept.high, kept.last_stamp, kept.last_mono = part.last_step, part.last_stamp, part.last_mono
    if kept.high < 0:
        return StepStats()
    kept.low, kept.first_step = steps.low, steps.first_step
    kept.gaps = [gap for gap in steps.gaps if gap[0] <= kept.high]
    kept.head = [head for head in steps.head if head.step <= kept.high]
    whole = steps.total().compute_s - sum(head.compute_s for head in steps.head)
    left = kept.total().compute_s - sum(head.compute_s for head in kept.head)
    share = min(1.0, max(0.0, left / whole)) if whole > 0.0 else 0.0
    kept.clean, kept.flight = _scaled(steps.clean, share), _scaled(steps.flight, share)
    return kept


def _share(window: Window, n: int) -> Window:
    """The first ``n`` steps of a window, with its sums scaled down."""
    part = copy.copy(window)
    if not n:
        part.n = 0
        return part
    share = n / window.n
    for name in ("step_s", "data_s", "stall_s", "eval_s", "loop_s", "busy_s"):
        setattr(part, name, getattr(window, name) * share)
    part.n, part.busy_n, part.flight_n = n, round(window.busy_n * share), round(window.flight_n * share)
    part.last_step = window.last_step - (window.n - n)
    return part


def _scaled(cells: Histogram, share: float) -> Histogram:
    return {cell: [n * share, seconds * share] for cell, (n, seconds) in cells.items()} if share > 0.0 else {}
