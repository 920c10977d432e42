"""Statistics over one rank's steps of one attempt, in memory that does not grow with their number. Pure.

Steps are folded into at most 128 windows of consecutive step numbers (their width doubles when there are more) and into
a histogram of step times with 2 % wide cells whose sums are kept, so a mean over any part of it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

__all__ = ["HEAD_STEPS", "Head", "StepLine", "StepStats", "Window", "middle", "typical"]

#: The first lines of an attempt are kept one by one, to measure the warm-up.
HEAD_STEPS = 10
MAX_WINDOWS = 128
MAX_GAPS = 1024
_CELLS_PER_E = 50.0

#: A histogram: cell number -> [steps, seconds].
Histogram = dict[int, list[float]]


class Head(NamedTuple):
    """One of the first lines of an attempt: ``n`` steps up to ``step`` that computed ``compute_s`` in all."""

    step: int
    n: int
    compute_s: float
    in_flight: bool


#: Fields of a window that are sums over its steps.
_SUMS = ("n", "step_s", "data_s", "stall_s", "eval_s", "loop_s", "busy_s", "busy_n", "flight_n")


@dataclass(slots=True, eq=False)
class Window:
    """Sums over steps whose number shares ``step >> shift``. Seconds; the hot loop writes the slots directly."""

    n: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    stall_s: float = 0.0
    eval_s: float = 0.0
    loop_s: float = 0.0
    busy_s: float = 0.0
    busy_n: int = 0
    flight_n: int = 0
    max_s: float = 0.0
    last_step: int = -1
    #: UTC stamp and monotonic seconds of ``last_step``, as written in the log (bytes) or as a number.
    last_stamp: bytes | float = 0.0
    last_mono: bytes | float | None = None

    @property
    def compute_s(self) -> float:
        """Step time without waiting for data, saves, validation and the loop."""
        return max(0.0, self.step_s - self.data_s - self.stall_s - self.eval_s - self.loop_s)

    def absorb(self, other: Window) -> None:
        """Adds ``other``, which may be before or after this one."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_s = max(self.max_s, other.max_s)
        if other.last_step > self.last_step:
            self.last_step = other.last_step
            self.last_stamp = other.last_stamp
            self.last_mono = other.last_mono


#: The arguments of :meth:`StepStats.add`.
StepLine = tuple[int, int, float, float, float, float, float, bool, float, bytes | float, bytes | float | None, float]


@dataclass(slots=True, eq=False)
class StepStats:
    """All steps of one rank in one attempt. Thread: one."""

    clean: Histogram = field(default_factory=dict)
    flight: Histogram = field(default_factory=dict)
    head: list[Head] = field(default_factory=list)
    windows: dict[int, Window] = field(default_factory=dict)
    shift: int = 0
    #: Lowest step number seen minus its count: the steps done before the attempt's first known step.
    low: int = -1
    #: Highest step number seen.
    high: int = -1
    #: First step line: stamp, monotonic seconds or None, and how long its steps took in all.
    first_step: tuple[bytes | float, bytes | float | None, float] | None = None
    last_stamp: bytes | float = 0.0
    #: Monotonic seconds of the last step, as written in the log (bytes) or as a number.
    last_mono: bytes | float | None = None
    #: Step numbers below ``high`` that have not been seen, as (first, last).
    gaps: list[tuple[int, int]] = field(default_factory=list)
    #: The highest step number that a reader may add without asking the collector: -1 before the first step, and after
    #: the end of the process.
    most: int = -1
    _current: Window | None = None
    _current_key: int = -1

    def missing(self, step: int) -> bool:
        """True when ``step`` is below the highest one and was never seen: a late line, not a duplicate."""
        return any(first <= step <= last for first, last in self.gaps) or step <= self.low

    def add(
        self,
        step: int,
        count: int,
        step_s: float,
        data_s: float,
        stall_s: float,
        eval_s: float,
        busy_s: float,
        in_flight: bool,
        max_s: float,
        stamp: bytes | float,
        mono: bytes | float | None,
        loop_s: float = 0.0,
    ) -> None:
        """Adds one line of ``count`` steps, the last of them ``step``. Seconds are sums over the line, all >= 0."""
        high = self.high
        if step > high:
            before = step - count
            if high < 0:
                self.low = before
                self.first_step = (stamp, mono, step_s)
            elif before > high and len(self.gaps) < MAX_GAPS:
                self.gaps.append((high + 1, before))
            self.high = step
            self.last_stamp = stamp
            self.last_mono = mono
        else:
            self._fill(step, count, stamp, mono, step_s)

        compute = step_s - data_s - stall_s - eval_s - loop_s
        if compute < 0.0:
            # The parts cannot be longer than the whole step.
            compute = 0.0
            share = step_s / (data_s + stall_s + eval_s + loop_s)
            data_s, stall_s, eval_s, loop_s = data_s * share, stall_s * share, eval_s * share, loop_s * share
        if len(self.head) < HEAD_STEPS:
            self.head.append(Head(step, count, compute, in_flight))
        else:
            mean = compute / count
            cell = int(log(mean) * _CELLS_PER_E) if mean > 1e-9 else -1036
            cells = self.flight if in_flight else self.clean
            sums = cells.get(cell)
            if sums is None:
                cells[cell] = [count, compute]
            else:
                sums[0] += count
                sums[1] += compute

        key = step >> self.shift
        window = self._current
        if window is None or key != self._current_key:
            window = self._window(key)
        window.n += count
        window.step_s += step_s
        window.data_s += data_s
        # Most steps have none of these, and a test costs less than an addition.
        if stall_s:
            window.stall_s += stall_s
        if eval_s:
            window.eval_s += eval_s
        if loop_s:
            window.loop_s += loop_s
        if busy_s > 0.0:
            window.busy_s += busy_s if busy_s < step_s else step_s
            window.busy_n += count
        if in_flight:
            window.flight_n += count
        if max_s > window.max_s and max_s <= step_s:
            window.max_s = max_s
        if step > window.last_step:
            window.last_step = step
            window.last_stamp = stamp
            window.last_mono = mono

    def _fill(self, step: int, count: int, stamp: bytes | float, mono: bytes | float | None, step_s: float) -> None:
        """Adds a late line: removes its step numbers from the gaps."""
        lowest = step - count + 1
        gaps: list[tuple[int, int]] = []
        for first, last in self.gaps:
            if last < lowest or first > step:
                gaps.append((first, last))
                continue
            if first < lowest:
                gaps.append((first, lowest - 1))
            if last > step:
                gaps.append((step + 1, last))
        if step <= self.low:
            if step < self.low:
                gaps.insert(0, (step + 1, self.low))
            self.low = lowest - 1
            self.first_step = (stamp, mono, step_s)
        self.gaps = gaps[-MAX_GAPS:]

    def _window(self, key: int) -> Window:
        window = self.windows.get(key)
        if window is None:
            window = self.windows[key] = Window()
            while len(self.windows) > MAX_WINDOWS:
                self._widen()
                key >>= 1
            window = self.windows[key]
        self._current_key = key
        self._current = window
        return window

    def at_shift(self, shift: int) -> dict[int, Window]:
        """Copies of the windows, merged until each spans ``1 << shift`` step numbers; never narrower than they are."""
        steps = max(0, shift - self.shift)
        merged: dict[int, Window] = {}
        for key, window in self.windows.items():
            kept = merged.get(key >> steps)
            if kept is None:
                kept = merged[key >> steps] = Window()
            kept.absorb(window)
        return merged

    def _widen(self) -> None:
        """Doubles the width of the windows."""
        self.windows = self.at_shift(self.shift + 1)
        self.shift += 1
        self._current = None
        self._current_key = -1

    @property
    def n(self) -> int:
        return sum(window.n for window in self.windows.values())

    def total(self) -> Window:
        """Sums over every step."""
        total = Window()
        for window in self.windows.values():
            total.absorb(window)
        return total

    def share_after(self, step: int) -> float:
        """Share in [0, 1] of this attempt's computing time that went into steps above ``step``."""
        whole = part = 0.0
        for key, window in self.windows.items():
            seconds = window.compute_s
            whole += seconds
            first, last = key << self.shift, ((key + 1) << self.shift) - 1
            first, last = max(first, self.low + 1), min(last, window.last_step)
            if first > step:
                part += seconds
            elif last > step:
                part += seconds * (last - step) / (last - first + 1)
        return part / whole if whole > 0.0 else 0.0


def middle(cells: Histogram) -> float | None:
    """Mean step time in seconds of the middle half of all steps: the time of an undisturbed step. None without
    steps."""
    n = sum(count for count, _ in cells.values())
    if n <= 0:
        return None
    low, high = n * 0.25, n * 0.75
    seen = kept_n = kept_s = 0.0
    for cell in sorted(cells):
        count, seconds = cells[cell]
        inside = min(seen + count, high) - max(seen, low)
        if inside > 0:
            kept_n += inside
            kept_s += inside * seconds / count
        seen += count
    return kept_s / kept_n if kept_n > 0 else None


def typical(cells: Histogram) -> float | None:
    """Mean step time in seconds without outliers: of the steps of at most twice :func:`middle`. None without steps."""
    center = middle(cells)
    if center is None:
        return None
    kept_n = kept_s = 0.0
    for count, seconds in cells.values():
        if seconds / count <= 2 * center:
            kept_n += count
            kept_s += seconds
    return kept_s / kept_n if kept_n else center
