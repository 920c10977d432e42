"""Cuts off the steps that a rank of an old attempt ran after the next attempt had begun. Pure."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from resiliency.goodput.attempts import Attempt, Offsets
from resiliency.telemetry.facts import parse_stamp
from resiliency.telemetry.stepstats import Histogram, StepStats, Window

__all__ = ["cut_attempts", "steps_until"]


def cut_attempts(attempts: Sequence[Attempt], offsets: Offsets) -> None:
    """Ends each attempt's steps where the next attempt begins. A segment that is cut is replaced by a shorter copy; the
    original is not changed."""
    for attempt, following in zip(attempts, attempts[1:], strict=False):
        end = following.start(offsets)
        for pieces in attempt.lanes.values():
            for place, segment in enumerate(pieces):
                last, offset = segment.last_step_time(), offsets.of(segment)
                if last is None or last - offset <= end:
                    continue
                pieces[place] = shorter = copy.copy(segment)
                shorter.steps = steps_until(segment.steps, end + offset)
                shorter.last = end + offset if shorter.last is None else min(shorter.last, end + offset)
                offsets.same(segment, shorter)


def steps_until(steps: StepStats, time: float) -> StepStats:
    """The steps that had ended by ``time`` (UTC seconds by the host's clock). The steps of one window are taken as
    equally long."""
    kept = StepStats()
    kept.shift = steps.shift
    first = steps.first_step
    start = None if first is None else parse_stamp(first[0])
    before = time if start is None or first is None else start - first[2]
    for key, window in sorted(steps.windows.items()):
        stamp = parse_stamp(window.last_stamp)
        if stamp is None or stamp <= time:
            part = window
        else:
            share = (time - before) / (stamp - before) if before < time else 0.0
            part = _share(window, int(window.n * share), time)
        before = stamp if stamp is not None else before
        if part.n:
            kept.windows[key] = part
            kept.high, kept.last_stamp = part.last_step, part.last_stamp
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


def _share(window: Window, n: int, time: float) -> Window:
    """The first ``n`` steps of a window, with its sums scaled down; the last of them ended at ``time``."""
    part = copy.copy(window)
    if not n:
        part.n = 0
        return part
    share = n / window.n
    for name in ("step_s", "data_s", "stall_s", "eval_s", "loop_s", "busy_s"):
        setattr(part, name, getattr(window, name) * share)
    part.n, part.busy_n, part.flight_n = n, round(window.busy_n * share), round(window.flight_n * share)
    part.last_step, part.last_stamp = window.last_step - (window.n - n), time
    return part


def _scaled(cells: Histogram, share: float) -> Histogram:
    return {cell: [n * share, seconds * share] for cell, (n, seconds) in cells.items()} if share > 0.0 else {}
