"""Times the steps of one rank and notifies subscribers: a few microseconds a call, no torch.

One observer per trainer measures; its subscribers are the event log
(:class:`resiliency.telemetry.step_events.StepEvents`), the running totals behind the goodput figure
(:class:`resiliency.telemetry.step_totals.StepTotals`), and others. Time lost to checkpoints is reported to the observer
(:meth:`StepObserver.stall`) and reaches subscribers as part of the step that lost it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["StepObserver", "StepSubscriber", "StepTiming"]

#: If the step number grows by more than this at once, the steps between were not run.
_MAX_STEPS_AT_ONCE = 64


@dataclass(frozen=True)
class StepTiming:
    """Times of one step of the training loop. Durations in seconds, measured on this rank.

    Attributes:
        step: optimizer steps done by now.
        count: optimizer steps this covers, 1 unless a batch made several.
        follows: False when the step number went back or jumped.
        duration_s: from the end of the step before (or from the start of training) to the end of this one.
        data_wait_s: part of it spent waiting for batches.
        loop_s: part of it between two batches that was neither a wait for data nor anything else named here: callbacks,
            loggers, the move of the batch to its device. 0 when the loop does not report its fetches.
        stall_s: part of it lost to checkpoints.
        busy_s: this rank's own work before ranks first wait for one another; 0 when the loop does not report it.
        eval_s: part of it spent in validation.
        save_in_flight: a save was being copied, committed or uploaded when the step ended.
        between_s: part of ``duration_s`` before the first batch of the step arrived.
        active_s: from the arrival of that batch to the end of the step, without validation.
        own_s: ``busy_s`` plus the wait for the first batch. The wait for a later batch, while gradients accumulate,
            does not count as the rank's own work, because Lightning makes ranks wait for one another between any two
            batches.
    """

    step: int
    count: int
    follows: bool
    duration_s: float
    data_wait_s: float
    stall_s: float
    busy_s: float
    eval_s: float
    save_in_flight: bool
    between_s: float = 0.0
    active_s: float = 0.0
    own_s: float = 0.0
    loop_s: float = 0.0


class StepSubscriber:
    """Is notified of training and its steps; override the methods you need. They must return within microseconds and
    must not raise.

    Thread: the training thread.
    """

    def training_started(self, step: int, world_size: int | None) -> None:
        """The first batch is about to be fetched; ``step`` optimizer steps are already done."""

    def step_ended(self, timing: StepTiming) -> None:
        """One step has ended."""

    def progressed(self) -> None:
        """A batch has arrived or has ended (with or without an optimizer step), or the first batch of another epoch is
        about to be fetched."""

    def paused(self) -> None:
        """No training batch comes next: validation begins, or the epoch has had its last batch."""

    def training_ended(self, step: int) -> None:
        """The last batch has ended."""

    def training_interrupted(self) -> None:
        """Training ended with an exception, perhaps in the middle of a step."""


class StepObserver:
    """Measures the steps of one rank, driven by one caller: the training loop.

    Within a step, time between :meth:`fetch_started` and :meth:`fetch_ended` is data wait, and the rest of the time
    before the batch starts is overhead of the loop; of a loop that reports no fetches, all of that time is data wait.
    Time passed to :meth:`stall` is checkpoint stall, time between :meth:`validation_started` and
    :meth:`validation_ended` is validation.

    Thread: the training thread; :attr:`save_in_flight` may be set from any.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds; tests replace it."""
        #: Set while a save of this rank is being copied, committed or uploaded.
        self.save_in_flight = False
        #: If set, called before the arrival, the backward and the end of a batch are timed. It waits for the device, so
        #: that the times include the device's work.
        self.synchronize: Callable[[], None] | None = None
        self._clock = clock
        self._subscribers: tuple[StepSubscriber, ...] = ()
        self._training = False
        self._step = -1
        self._world_size: int | None = None
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._last_end = now
        self._inside = self._seen_batch = False
        self._validating_from: float | None = None
        # Parts of the current step.
        self._data = self._stall = self._eval = self._busy = self._loop = 0.0
        # Seconds from the end of the last step to the arrival of this step's first batch (None until it has arrived),
        # validation since then, and the wait for that batch.
        self._between: float | None = None
        self._eval_inside = self._first_wait = 0.0
        # When the current wait for a batch began, and how much of it was stall or validation; below, of the batch.
        self._between_from, self._between_off = now, 0.0
        # When the current fetch began, and seconds of fetches since the last batch; None when no fetch was reported.
        self._fetch_from: float | None = None
        self._fetched: float | None = None
        self._batch_from, self._inside_off = now, 0.0
        self._backward = False

    # -- subscribers ---------------------------------------------------------------------------------------------

    @property
    def subscribers(self) -> tuple[StepSubscriber, ...]:
        """Subscribers, in the order they subscribed."""
        return self._subscribers

    def subscribe(self, subscriber: StepSubscriber) -> None:
        """Notifies ``subscriber`` of every step from now on; when training is under way, also of its start, at once.
        Does nothing when it is subscribed already."""
        if any(known is subscriber for known in self._subscribers):
            return
        self._subscribers += (subscriber,)
        if self._training:
            subscriber.training_started(self._step, self._world_size)

    def unsubscribe(self, subscriber: StepSubscriber) -> None:
        """Stops notifying ``subscriber``; does nothing when it is not subscribed."""
        self._subscribers = tuple(known for known in self._subscribers if known is not subscriber)

    # -- the training loop ---------------------------------------------------------------------------------------

    def training_started(self, step: int, world_size: int | None = None) -> None:
        """The first batch is about to be fetched; ``step`` optimizer steps are already done. Only the first call before
        a batch counts."""
        if self._training and not self._seen_batch:
            return
        self._training = True
        self._step, self._world_size = step, world_size
        self._reset(self._clock())
        for subscriber in self._subscribers:
            subscriber.training_started(step, world_size)

    def _now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return self._clock()

    def batch_started(self) -> None:
        """The batch has arrived. Does nothing when the last batch has not ended."""
        if not self._training or self._inside:
            return
        now = self._now()
        waited = max(0.0, now - self._between_from - self._between_off)
        fetched = waited if self._fetched is None else min(waited, self._fetched)
        self._data += fetched
        self._loop += waited - fetched
        self._fetched = None
        if self._between is None:
            self._between = now - self._last_end
            self._first_wait = waited
        self._inside = self._seen_batch = True
        self._batch_from = now
        self._inside_off = 0.0
        self._backward = False
        for subscriber in self._subscribers:
            subscriber.progressed()

    def fetch_started(self) -> None:
        """The loop asks its data loader for a batch. Call it before the batch, or within it when the step fetches for
        itself."""
        if self._training:
            self._fetch_from = self._clock()

    def fetch_ended(self) -> None:
        """The data loader has returned. Does nothing when no fetch has started."""
        if self._fetch_from is None:
            return
        took, self._fetch_from = max(0.0, self._clock() - self._fetch_from), None
        if self._inside:
            self._data += took
            self._inside_off += took
        else:
            self._fetched = (self._fetched or 0.0) + took

    def backward_started(self) -> None:
        """The forward is done; in the backward ranks wait for one another. Only the first call in a batch counts."""
        if self._inside and not self._backward:
            self._backward = True
            self._busy += max(0.0, self._now() - self._batch_from - self._inside_off)

    def batch_ended(self, step: int) -> None:
        """A batch is done; ``step`` optimizer steps are done by now (unchanged while gradients accumulate)."""
        if not self._inside:
            return
        now = self._now()
        self._inside = False
        self._between_from = now
        self._between_off = 0.0
        if step != self._step:
            self._end_step(step, now)
        for subscriber in self._subscribers:
            subscriber.progressed()

    def epoch_started(self) -> None:
        """The first batch of another epoch is about to be fetched. Does nothing before the very first batch of
        training, because nobody knows how long that one takes: a stream may have to be read up to where it was."""
        if self._training and self._seen_batch and not self._inside:
            for subscriber in self._subscribers:
                subscriber.progressed()

    def epoch_ends(self) -> None:
        """The last batch of the epoch has ended."""
        for subscriber in self._subscribers:
            subscriber.paused()

    def _end_step(self, step: int, now: float) -> None:
        count = step - self._step
        follows = 0 < count <= _MAX_STEPS_AT_ONCE
        duration, between = now - self._last_end, self._between or 0.0
        timing = StepTiming(
            step=step,
            count=count if follows else 1,
            follows=follows,
            duration_s=duration,
            data_wait_s=self._data,
            stall_s=self._stall,
            busy_s=self._busy,
            eval_s=self._eval,
            save_in_flight=self.save_in_flight,
            between_s=between,
            active_s=max(0.0, duration - between - self._eval_inside),
            own_s=self._first_wait + self._busy,
            loop_s=self._loop,
        )
        self._step = step
        self._last_end = now
        self._data = self._stall = self._busy = self._eval = self._eval_inside = self._loop = 0.0
        self._between = None
        for subscriber in self._subscribers:
            subscriber.step_ended(timing)

    def stall(self, seconds: float) -> None:
        """Training waited this long for a checkpoint. Call it after the wait, inside a batch or between two."""
        self._stall += seconds
        self._exclude(seconds)

    def validation_started(self) -> None:
        """Does nothing when validation has started already."""
        if self._validating_from is None:
            self._validating_from = self._clock()
            for subscriber in self._subscribers:
                subscriber.paused()

    def validation_ended(self) -> None:
        if self._validating_from is None:
            return
        took = self._clock() - self._validating_from
        self._validating_from = None
        self._eval += took
        if self._between is not None:  # gradients accumulate
            self._eval_inside += took
        self._exclude(took)

    def _exclude(self, seconds: float) -> None:
        """Keeps ``seconds`` of stall or validation out of the data wait and the rank's own work."""
        if self._inside:
            self._inside_off += seconds
        else:
            self._between_off += seconds

    def training_ended(self, step: int) -> None:
        """The last batch is done."""
        if not self._training:
            return
        self._training = False
        for subscriber in self._subscribers:
            subscriber.training_ended(step)

    def training_interrupted(self) -> None:
        """An exception ended training, if it had started."""
        if not self._training:
            return
        self._training = False
        for subscriber in self._subscribers:
            subscriber.training_interrupted()
