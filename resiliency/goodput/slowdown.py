"""Finds steps that became slower for long, against the best stable step time of the rank or a given one. Pure.

The **best stable step time** of a rank at one size of the job: its steps are taken in stretches of 16 or more, each
with its mean computing time (without waits for data and saves, validation, the loop, and what the first steps take
longer). The means are smoothed as the median of three neighbours. The fastest tenth of the steps take the best stable
step time or less. So neither the fastest step nor a lucky stretch sets it, and one slow step, or one slow stretch, is
no slowdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from resiliency.telemetry.stepstats import StepStats

__all__ = ["NO_BEST", "Best", "SlowStretch", "best_stable", "slow_stretches"]

#: A stretch covers 16 step numbers or more. One with fewer than half of 16 steps in the log is merged into a neighbour.
STRETCH_SHIFT = 4
LEAST_STEPS = 1 << (STRETCH_SHIFT - 1)
#: With fewer steps than this there is no best stable step time.
ENOUGH_STEPS = 4 << STRETCH_SHIFT
#: This share of the steps was as fast as the best, or faster.
BEST_SHARE = 0.10
#: Stretches within a tenth of the best are as fast: what varies so much is no slowdown.
TOLERANCE = 0.10


@dataclass(frozen=True, kw_only=True)
class Best:
    """Seconds that a step should take (None: unknown), and the share by which it may be longer without being slow."""

    step_s: float | None
    tolerance: float = TOLERANCE


NO_BEST = Best(step_s=None)


@dataclass(frozen=True, kw_only=True)
class SlowStretch:
    """Steps ``first`` to ``last``, of which ``n`` are in the log; each took ``per_step_s`` longer than the best."""

    first: int
    last: int
    n: int
    per_step_s: float

    @property
    def excess_s(self) -> float:
        return self.n * self.per_step_s


@dataclass
class _Stretch:
    """Steps ``first`` to ``last``, of which ``n`` are in the log and took ``seconds`` of computing time together."""

    first: int
    last: int
    n: int
    seconds: float

    @property
    def mean_s(self) -> float:
        return max(0.0, self.seconds) / self.n


def _stretches(steps: StepStats, usual_s: float, in_flight_s: float = 0.0) -> list[_Stretch]:
    """Computing times over stretches of steps; [] when there are too few steps for one stretch.

    Args:
        usual_s: usual step time in seconds; what the first steps of an attempt take beyond it is left out.
        in_flight_s: seconds by which a save in flight makes a step longer; left out, too.
    """
    shift = max(STRETCH_SHIFT, steps.shift)
    warm: dict[int, float] = {}
    for head in steps.head:
        key = head.step >> shift
        warm[key] = warm.get(key, 0.0) + max(0.0, head.compute_s - head.n * usual_s)
    found: list[_Stretch] = []
    for key, (n, compute_s, flight_n) in sorted(_sums(steps, shift).items()):
        seconds = compute_s - warm.get(key, 0.0) - flight_n * in_flight_s
        last = ((key + 1) << shift) - 1
        if found and min(n, found[-1].n) < LEAST_STEPS:
            found[-1].last = last
            found[-1].n += n
            found[-1].seconds += seconds
        else:
            found.append(_Stretch(key << shift, last, n, seconds))
    return found if found and found[0].n >= LEAST_STEPS else []


def _sums(steps: StepStats, shift: int) -> dict[int, tuple[int, float, int]]:
    """(steps, computing seconds, steps with a save in flight) by step number shifted right by ``shift`` bits."""
    wider = shift - steps.shift
    found: dict[int, tuple[int, float, int]] = {}
    for key, window in steps.windows.items():
        if window.n:
            n, seconds, flight_n = found.get(key >> wider, (0, 0.0, 0))
            found[key >> wider] = (n + window.n, seconds + window.compute_s, flight_n + window.flight_n)
    return found


def _smooth(means: Sequence[float]) -> list[float]:
    """Replaces each mean by the median of it and its two neighbours; the first and last by the median of the three at
    their end. Of one or two means, each becomes the smallest."""
    if len(means) < 3:
        return [min(means)] * len(means)
    middle = [median(means[i - 1 : i + 2]) for i in range(1, len(means) - 1)]
    return [median(means[:3]), *middle, median(means[-3:])]


def best_stable(stats: Sequence[StepStats], usual_s: float | None) -> float | None:
    """The best stable step time of a rank in seconds, see the module; None with too few steps.

    Args:
        stats: the rank's steps in the attempts of one world size.
        usual_s: usual step time in seconds.
    """
    if not usual_s:
        return None
    found: list[tuple[float, int]] = []
    for one in stats:
        stretches = _stretches(one, usual_s)
        if stretches:
            smooth = _smooth([stretch.mean_s for stretch in stretches])
            found += [(mean, stretch.n) for mean, stretch in zip(smooth, stretches, strict=True)]
    whole = sum(n for _, n in found)
    if whole < ENOUGH_STEPS:
        return None
    seen = 0
    for mean, n in sorted(found):
        seen += n
        if seen >= BEST_SHARE * whole:
            return mean if mean > 0.0 else None
    return None


def slow_stretches(steps: StepStats, best: Best, usual_s: float, in_flight_s: float) -> list[SlowStretch]:
    """The sustained stretches whose steps took longer than the best by more than its tolerance.

    Args:
        usual_s: usual step time of the attempt in seconds.
        in_flight_s: seconds by which a save in flight makes a step longer; not counted, because interference is a
            cause of its own.
    """
    if best.step_s is None or steps.high < 0:
        return []
    stretches = _stretches(steps, usual_s, in_flight_s)
    if not stretches:
        return []
    smooth = _smooth([stretch.mean_s for stretch in stretches])
    found = []
    for mean, stretch in zip(smooth, stretches, strict=True):
        slow = min(mean, stretch.mean_s)
        if slow > best.step_s * (1 + best.tolerance):
            per_step = slow - best.step_s
            found.append(SlowStretch(first=stretch.first, last=stretch.last, n=stretch.n, per_step_s=per_step))
    return found
