"""Divides the training time of one rank in one attempt by cause. Pure; all times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median, median_low

from resiliency.goodput.slowdown import NO_BEST, Best, SlowStretch, slow_stretches
from resiliency.telemetry.facts import Segment
from resiliency.telemetry.stepstats import Histogram, StepStats, middle, typical

__all__ = ["Stragglers", "TrainingSplit", "deviation", "merged_typical", "split_training", "stragglers"]

#: A step this many times the usual one is an outlier: its excess is not productive.
SLOW_STEP = 5.0
#: Ranks within 5 % of each other are not stragglers, and steps within 10 % are warm.
STRAGGLER_SHARE = 0.05
WARM_SHARE = 0.10
INTERFERENCE_SHARE = 0.005
#: Step times that differ by less across ranks were made equal by a collective.
SYNCHRONOUS_SHARE = 0.02
#: Ranks are compared over 8 steps or more, so that jitter averages out.
MIN_SHIFT = 3
#: A histogram with fewer steps is not used for the usual step time if a larger one exists.
ENOUGH_STEPS = 5


@dataclass
class TrainingSplit:
    """Seconds of one rank's training interval by cause; ``slow_s`` is the part of slow steps that no event explains."""

    productive_s: float = 0.0
    data_wait_s: float = 0.0
    loop_s: float = 0.0
    stall_s: float = 0.0
    interference_s: float = 0.0
    warm_up_s: float = 0.0
    straggler_s: float = 0.0
    slow_s: float = 0.0
    #: Seconds that sustained stretches took longer than the best stable step time, and those stretches.
    slowdown_s: float = 0.0
    slow: list[SlowStretch] = field(default_factory=list)
    eval_s: float = 0.0
    #: Time spent between steps, not inside them, waiting for slower ranks.
    straggler_gap_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0


@dataclass
class Stragglers:
    """What slower ranks cost in one attempt.

    Attributes:
        waits: seconds of straggler excess inside steps, by lane.
        gaps: the same between steps.
        base: seconds a step of the lane computes without waiting for other ranks (median over windows).
        blamed: GPU-seconds each lane cost the job.
        blamed_steps: steps in which it was the slowest.
    """

    waits: dict[int, float] = field(default_factory=dict)
    gaps: dict[int, float] = field(default_factory=dict)
    base: dict[int, float] = field(default_factory=dict)
    blamed: dict[int, float] = field(default_factory=dict)
    blamed_steps: dict[int, int] = field(default_factory=dict)
    blamed_data: dict[int, float] = field(default_factory=dict)


def merged_typical(stats: list[StepStats]) -> float | None:
    """Usual step time over several ranks or attempts; the first lines of an attempt are used only if there are no
    others."""
    cells: Histogram = {}
    for one in stats:
        for cell, (n, seconds) in one.clean.items():
            kept = cells.setdefault(cell, [0, 0.0])
            kept[0] += n
            kept[1] += seconds
    found = middle(cells)
    if found is not None:
        return found
    for one in stats:
        for cell, (n, seconds) in one.flight.items():
            kept = cells.setdefault(cell, [0, 0.0])
            kept[0] += n
            kept[1] += seconds
    found = middle(cells)
    if found is not None:
        return found
    heads = [head.compute_s / head.n for one in stats for head in one.head]
    return median(heads) if heads else None


def deviation(stats: Sequence[StepStats]) -> float | None:
    """Standard deviation of the computing time of steps in seconds, without outliers (more than five times the usual)
    and the first steps of an attempt; None with fewer than two steps."""
    usual = merged_typical(list(stats))
    if not usual:
        return None
    known = [cell for one in stats for cells in (one.clean, one.flight) for cell in cells.values()]
    cells = [(n, seconds) for n, seconds in known if n > 0 and seconds <= SLOW_STEP * usual * n]
    count = sum(n for n, _ in cells)
    if count < 2:
        return None
    mean = sum(seconds for _, seconds in cells) / count
    return sqrt(sum(n * (seconds / n - mean) ** 2 for n, seconds in cells) / count)


def split_training(
    segment: Segment, usual_s: float | None, late: Stragglers, pieces: int = 1, best: Best = NO_BEST
) -> TrainingSplit:
    """Divides the steps of one segment.

    Args:
        segment: the segment with the steps.
        usual_s: usual step time of the attempt in seconds, for ranks with too few steps of their own.
        late: stragglers of the attempt.
        pieces: number of segments of this lane in the attempt, which share its straggler time equally.
        best: what a step of this rank should take.
    """
    stats = segment.steps
    total = stats.total()
    part = TrainingSplit(
        steps=total.n, step_s=total.step_s, data_wait_s=total.data_s, eval_s=total.eval_s, loop_s=total.loop_s
    )
    after = segment.last_step_time()
    tail = sum(seconds for time, seconds in segment.stalls if after is not None and time > after)
    part.stall_s = max(total.stall_s, segment.stall_s - tail)
    # Stalls in checkpoint events but not in step events are contained in the steps' loop, data wait and compute time.
    hidden = part.stall_s - total.stall_s
    between = min(hidden, max(0.0, segment.stall_between_s - total.stall_s))
    in_loop = min(part.loop_s, between)
    in_waits = min(part.data_wait_s, between - in_loop)
    part.loop_s -= in_loop
    part.data_wait_s -= in_waits
    hidden -= in_loop + in_waits

    clean_n = sum(n for n, _ in stats.clean.values())
    usual = middle(stats.clean) if clean_n >= ENOUGH_STEPS else None
    if usual is None:
        usual = usual_s if usual_s is not None else merged_typical([stats])
    compute = sum(s for _, s in stats.clean.values()) + sum(s for _, s in stats.flight.values())
    compute = max(0.0, compute + sum(head.compute_s for head in stats.head) - hidden)
    if usual is None or usual <= 0.0:
        part.productive_s = compute
        return part

    clean = [(n, seconds) for n, seconds in stats.clean.values()]
    flight = [(n, seconds) for n, seconds in stats.flight.values()]
    warming = True
    for head in sorted(stats.head, key=lambda head: head.step):
        excess = head.compute_s - head.n * usual
        if warming and excess > WARM_SHARE * usual * head.n:
            part.warm_up_s += excess
            continue
        warming = False
        (flight if head.in_flight else clean).append((head.n, head.compute_s))

    part.slow_s = sum(seconds - n * usual for n, seconds in clean if seconds > SLOW_STEP * usual * n)
    flight_n = sum(n for n, _ in flight)
    flight_s = sum(seconds for _, seconds in flight)
    # Compared with the mean, not the median: step times are skewed to the long side with and without saves.
    without = (typical(stats.clean) if clean_n >= ENOUGH_STEPS else None) or usual
    if clean and flight_s - flight_n * without > INTERFERENCE_SHARE * without * flight_n:
        part.interference_s = flight_s - flight_n * without

    left = max(0.0, compute - part.warm_up_s - part.slow_s - part.interference_s)
    lane = segment.lane
    # At most the time beyond that of steps without waiting, because warm-up and slow steps are already counted.
    base = max(0.0, late.base.get(lane, usual) - part.interference_s / max(1, total.n))
    part.straggler_s = min(late.waits.get(lane, 0.0) / pieces, max(0.0, left - total.n * base))
    part.straggler_gap_s = late.gaps.get(lane, 0.0) / pieces
    in_flight = part.interference_s / flight_n if flight_n else 0.0
    part.slow = slow_stretches(stats, best, usual, in_flight)
    # Straggler excess and stalls within the steps are taken out, because the compared times contain them.
    slower = sum(stretch.excess_s for stretch in part.slow) - part.straggler_s - hidden
    part.slowdown_s = max(0.0, min(slower, left - part.straggler_s))
    part.productive_s = left - part.straggler_s - part.slowdown_s
    return part


@dataclass
class _WindowRow:
    """One lane in one window, per step."""

    lane: int
    n: int
    step: float
    compute: float
    wait: float  # data and saves
    data: float
    busy: float | None


def stragglers(lanes: Mapping[int, StepStats]) -> Stragglers:
    """Compares ranks window by window.

    There are three kinds of logs: ranks that log how long they worked before they first waited for others
    (``busy_s``), ranks whose step times differ (they do not wait inside the step), and ranks whose step times are equal
    because a collective makes the fast ones wait. In the last kind, only waits for data and saves tell who is slow.
    """
    found = Stragglers()
    if len(lanes) < 2:
        return found
    shift = max(MIN_SHIFT, *(stats.shift for stats in lanes.values()))
    windows = {lane: stats.at_shift(shift) for lane, stats in lanes.items()}
    keys = sorted({key for by_key in windows.values() for key in by_key})
    plain: dict[int, list[float]] = {lane: [] for lane in lanes}
    for key in keys:
        rows = []
        for lane, by_key in windows.items():
            window = by_key.get(key)
            if window is None or window.n == 0:
                continue
            n = window.n
            busy = window.busy_s / window.busy_n if window.busy_n else None
            wait = (window.data_s + window.stall_s) / n
            rows.append(_WindowRow(lane, n, window.step_s / n, window.compute_s / n, wait, window.data_s / n, busy))
        if len(rows) >= 2:
            _compare(rows, found, plain)
    found.base = {lane: median(values) for lane, values in plain.items() if values}
    return found


def _compare(rows: list[_WindowRow], found: Stragglers, plain: dict[int, list[float]]) -> None:
    """Adds one window to ``found``: which lane was slowest, and how long each lane waited for it."""
    steps = [row.step for row in rows]
    synchronous = max(steps) - min(steps) <= SYNCHRONOUS_SHARE * max(steps)
    floor = min(row.compute for row in rows)
    own: dict[int, float] = {}
    inside = True
    for row in rows:
        if row.busy is not None:
            own[row.lane] = row.busy + row.wait
        elif synchronous:
            own[row.lane] = floor + row.wait
        else:
            own[row.lane] = row.compute + row.wait
            inside = False
    slowest = max(own, key=lambda lane: own[lane])
    most, usual = own[slowest], median_low(own.values())
    usual_wait = median_low(row.wait for row in rows)
    excess = most - usual
    if excess <= STRAGGLER_SHARE * max(usual, median_low(row.compute for row in rows) if inside else usual):
        for row in rows:
            plain[row.lane].append(row.compute)
        return
    cost = 0.0
    for row in rows:
        waited = most - max(own[row.lane], usual)
        slower = max(0.0, own[row.lane] - usual - max(0.0, row.wait - usual_wait))
        in_step = (waited if inside else 0.0) + slower
        found.waits[row.lane] = found.waits.get(row.lane, 0.0) + in_step * row.n
        if not inside:
            found.gaps[row.lane] = found.gaps.get(row.lane, 0.0) + waited * row.n
        plain[row.lane].append(row.compute - in_step)
        cost += (waited + max(0.0, own[row.lane] - usual)) * row.n
    slow = next(row for row in rows if row.lane == slowest)
    found.blamed[slowest] = found.blamed.get(slowest, 0.0) + cost
    found.blamed_steps[slowest] = found.blamed_steps.get(slowest, 0) + slow.n
    if slow.wait - usual_wait > 0.5 * excess:
        found.blamed_data[slowest] = found.blamed_data.get(slowest, 0.0) + cost
