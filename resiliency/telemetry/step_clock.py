"""Times steps in the trainer and writes them as events: a few microseconds a call, no torch, never raises.

Callbacks call it from their hooks; several callbacks may share one clock, the second call for the same moment changes
nothing. Very short steps are put together so that a rank writes about twenty lines a second at most; the first steps
are always written one by one, because warm-up is judged on them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from resiliency.events import EventKind, EventWriter

__all__ = ["StepClock", "shared_clock"]

#: Steps written one by one after the start of training.
SINGLE_STEPS = 10


class StepClock:
    """Measures steps of one rank.

    A step lasts from the end of the step before it (or from the start of training) to its own end. Within it, the time
    before the batch arrives is data wait, time inside :meth:`stall` is checkpoint stall, time between
    :meth:`on_validation_start` and :meth:`on_validation_end` is validation.

    Thread: the training thread; :attr:`save_in_flight` may be set from any.
    Safe after a call returns: everything that was flushed survives SIGKILL; at most ``line_every`` of steps is pending.
    """

    def __init__(
        self,
        writer: EventWriter | None,
        *,
        job_events: bool = True,
        line_every: timedelta = timedelta(milliseconds=50),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``writer`` None: measure only. ``job_events`` False: somebody else writes the start and end of the process.
        ``clock`` gives seconds (tests)."""
        self.writer = writer
        #: Set while a save of this rank is being copied, committed or sent.
        self.save_in_flight = False
        self._line_every = line_every.total_seconds()
        self._clock = clock
        self._born = clock()
        self._started = not job_events
        self._training = False
        self._ended = not job_events
        self._inside = False
        self._validating = 0.0
        self._step = -1
        self._last_end = 0.0
        self._last_line = 0.0
        self._written = 0
        # The step that is running.
        self._data = self._stall = self._eval = self._busy = 0.0
        self._between_from = self._between_off = 0.0
        self._batch_from = self._inside_off = 0.0
        self._worked = False
        # Steps that wait for their line.
        self._n = 0
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]  # step, data, stall, busy, eval
        self._max = 0.0
        self._flag = False
        # The whole attempt, for a progress bar.
        self.steps = 0
        self.step_s = self.data_wait_s = self.stall_s = self.eval_s = 0.0

    # -- the life of the process ---------------------------------------------------------------------------------

    def job_started(self, **fields: Any) -> None:
        """The trainer begins its work; once per process, later calls change nothing."""
        if not self._started:
            self._started = True
            self._emit(EventKind.JOB_STARTED, **fields)

    def job_terminated(self, reason: str, **fields: Any) -> None:
        """The trainer ends: "finished", "exception" or "signal". Writes what is pending; once per process."""
        self.flush()
        self._training = False
        if not self._ended:
            self._ended = True
            self._emit(EventKind.JOB_TERMINATED, reason=reason, **fields)

    # -- training ------------------------------------------------------------------------------------------------

    def on_train_start(self, step: int, **fields: Any) -> None:
        """The first batch is about to be fetched; ``step`` optimizer steps are already done."""
        if self._training:
            return
        self._training = True
        self._inside = False
        self._step = step
        now = self._clock()
        self._last_end = self._last_line = self._between_from = now
        self._between_off = 0.0
        self._written = 0
        self._emit(EventKind.TRAIN_STARTED, step=step, **fields)

    def on_train_batch_start(self) -> None:
        """The batch has arrived."""
        if not self._training or self._inside:
            return
        now = self._clock()
        self._data += max(0.0, now - self._between_from - self._between_off)
        self._inside = True
        self._batch_from = now
        self._inside_off = 0.0
        self._worked = False

    def on_before_backward(self) -> None:
        """This rank's own work before ranks first wait for one another is done."""
        if self._inside and not self._worked:
            self._worked = True
            self._busy += max(0.0, self._clock() - self._batch_from - self._inside_off)

    def on_train_batch_end(self, step: int) -> None:
        """A batch is done; ``step`` optimizer steps are done by now (the same number again: gradients accumulate)."""
        if not self._inside:
            return
        now = self._clock()
        self._inside = False
        self._between_from = now
        self._between_off = 0.0
        if step == self._step:
            return
        self._close(step, now)

    def _close(self, step: int, now: float) -> None:
        count = step - self._step
        if count < 0 or count > 64:
            # The loop went back or jumped: what is pending belongs to other numbers.
            self.flush()
            count = 1
        took = now - self._last_end
        if self._n and self.save_in_flight != self._flag:
            self.flush()
        self._flag = self.save_in_flight
        self._n += count
        self._step = step
        sums = self._sums
        sums[0] += took
        sums[1] += self._data
        sums[2] += self._stall
        sums[3] += self._busy
        sums[4] += self._eval
        self._max = max(self._max, took / count)
        self.steps += count
        self.step_s += took
        self.data_wait_s += self._data
        self.stall_s += self._stall
        self.eval_s += self._eval
        self._data = self._stall = self._busy = self._eval = 0.0
        self._last_end = now
        if self._written < SINGLE_STEPS or now - self._last_line >= self._line_every:
            self.flush()

    def stall(self, seconds: float) -> None:
        """Training stood still this long for a checkpoint; call it when the wait is over, inside a step or between
        two."""
        self._stall += seconds
        if self._inside:
            self._inside_off += seconds
        else:
            self._between_off += seconds

    def on_validation_start(self) -> None:
        self._validating = self._clock()

    def on_validation_end(self) -> None:
        if self._validating:
            took = self._clock() - self._validating
            self._validating = 0.0
            if self._training:
                self._eval += took
                if self._inside:
                    self._inside_off += took
                else:
                    self._between_off += took

    def on_train_end(self, step: int, **fields: Any) -> None:
        """The last batch is done. Writes what is pending."""
        if not self._training:
            return
        self.flush()
        self._training = False
        self._emit(EventKind.TRAIN_ENDED, step=step, **fields)

    def flush(self) -> None:
        """Writes the line of the steps that are pending, if any."""
        if not self._n:
            return
        step_s, data, stall, busy, evals = self._sums
        # The order of the keys is what the reader's fast path expects.
        fields: dict[str, Any] = {
            "step_s": round(step_s, 6),
            "data_wait_s": round(data, 6),
            "stall_s": round(stall, 6),
            "save_in_flight": self._flag,
        }
        if busy:
            fields["busy_s"] = round(busy, 6)
        if evals:
            fields["eval_s"] = round(evals, 6)
        if self._n > 1:
            fields["count"] = self._n
            fields["step_max_s"] = round(self._max, 6)
        self._emit(EventKind.STEP, step=self._step, **fields)
        self._written += 1
        self._n = 0
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]
        self._max = 0.0
        self._last_line = self._last_end

    def _emit(self, kind: str, step: int | None = None, **fields: Any) -> None:
        if self.writer is not None:
            self.writer.emit(kind, step=step, **fields)

    # -- for people ----------------------------------------------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        """Seconds since this clock was made."""
        return self._clock() - self._born

    @property
    def productive_s(self) -> float:
        """Seconds this process spent computing steps or validating."""
        return max(0.0, self.step_s - self.data_wait_s - self.stall_s)


_shared: weakref.WeakKeyDictionary[object, StepClock] = weakref.WeakKeyDictionary()


def shared_clock(owner: object, make: Callable[[], StepClock]) -> StepClock:
    """The clock of ``owner`` (a Trainer), made by ``make`` for whoever asks first. Thread: the training thread."""
    clock = _shared.get(owner)
    if clock is None:
        clock = _shared[owner] = make()
    return clock
