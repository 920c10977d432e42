"""Sums over the steps of a process, for a running goodput figure."""

from __future__ import annotations

import time
from collections.abc import Callable

from resiliency.telemetry.step_observer import StepSubscriber, StepTiming

__all__ = ["StepTotals"]


class StepTotals(StepSubscriber):
    """Sums since construction, in seconds on this rank; start-up and restore count as not productive.

    Thread: the training thread.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds; tests replace it."""
        self._clock = clock
        self._born = clock()
        self.steps = 0
        self.duration_s = self.data_wait_s = self.stall_s = self.eval_s = self.loop_s = 0.0

    def step_ended(self, timing: StepTiming) -> None:
        self.steps += timing.count
        self.duration_s += timing.duration_s
        self.data_wait_s += timing.data_wait_s
        self.stall_s += timing.stall_s
        self.eval_s += timing.eval_s
        self.loop_s += timing.loop_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return self._clock() - self._born

    @property
    def productive_s(self) -> float:
        """Seconds spent computing steps or validating."""
        return max(0.0, self.duration_s - self.data_wait_s - self.stall_s - self.loop_s)

    @property
    def goodput(self) -> float:
        """Productive share of the time so far, in [0, 1]."""
        elapsed = self.elapsed_s
        return min(1.0, self.productive_s / elapsed) if elapsed > 0 else 0.0
