"""Writes the steps of an observer as events, several short steps in one line, and the start and end of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resiliency.events import EventKind, EventWriter, boot_id
from resiliency.telemetry.step_observer import StepObserver, StepSubscriber, StepTiming

__all__ = ["StepEvents", "log_steps"]

#: Steps that are written one by one after the start of training; the warm-up is measured from them.
SINGLE_STEPS = 10
#: Shorter steps are summed until they took so many seconds.
LINE_S = 0.05


class StepEvents(StepSubscriber):
    """Writes ``train_started``, ``step`` and ``train_ended``.

    Very short steps are summed into one line, so that a rank writes about twenty lines a second at most.

    Thread: the training thread.
    What is written when a call returns survives SIGKILL; steps of at most 50 ms are not written yet.
    """

    def __init__(self, writer: EventWriter) -> None:
        self.writer = writer
        self._started = self._terminated = False
        self._lines = 0  # since the start of training
        # Steps that were not written yet.
        self._step = -1
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._duration = self._data = self._stall = self._busy = self._eval = self._loop = self._longest = 0.0
        self._save_in_flight = False

    # -- the process ---------------------------------------------------------------------------------------------

    def job_started(self, **fields: Any) -> None:
        """Writes the start of the trainer process, at the first call only. Not to be called when another component
        writes this event to the same log."""
        if not self._started:
            self._started = True
            self.writer.emit(EventKind.JOB_STARTED, **{"boot": boot_id(), **fields})

    def job_terminated(self, reason: str, **fields: Any) -> None:
        """Writes pending steps and the end of the trainer process ("finished", "exception" or "signal"), at the first
        call only; see :meth:`job_started`."""
        self.flush()
        if not self._terminated:
            self._terminated = True
            self.writer.emit(EventKind.JOB_TERMINATED, reason=reason, **fields)

    # -- steps ---------------------------------------------------------------------------------------------------

    def training_started(self, step: int, world_size: int | None) -> None:
        self.flush()
        self._lines = 0
        fields = {} if world_size is None else {"world_size": world_size}
        self.writer.emit(EventKind.TRAIN_STARTED, step=step, **fields)

    def step_ended(self, timing: StepTiming) -> None:
        if not timing.follows or timing.save_in_flight != self._save_in_flight:
            # Pending steps get a line of their own when this step does not follow them or differs in
            # ``save_in_flight``.
            self.flush()
        self._step = timing.step
        self._count += timing.count
        self._duration += timing.duration_s
        self._data += timing.data_wait_s
        self._stall += timing.stall_s
        self._busy += timing.busy_s
        self._eval += timing.eval_s
        self._loop += timing.loop_s
        self._longest = max(self._longest, timing.duration_s / timing.count)
        self._save_in_flight = timing.save_in_flight
        if self._lines < SINGLE_STEPS or self._duration >= LINE_S:
            self.flush()

    def training_ended(self, step: int) -> None:
        self.flush()
        self.writer.emit(EventKind.TRAIN_ENDED, step=step)

    def training_interrupted(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Writes the line of the pending steps, if any."""
        if not self._count:
            return
        # The reader's fast path expects the keys in this order.
        fields: dict[str, Any] = {
            "step_s": round(self._duration, 6),
            "data_wait_s": round(self._data, 6),
            "stall_s": round(self._stall, 6),
            "save_in_flight": self._save_in_flight,
        }
        if self._busy:
            fields["busy_s"] = round(self._busy, 6)
        if self._eval:
            fields["eval_s"] = round(self._eval, 6)
        if self._loop >= 1e-6:
            fields["loop_s"] = round(self._loop, 6)
        if self._count > 1:
            fields["count"] = self._count
            fields["step_max_s"] = round(self._longest, 6)
        self.writer.emit(EventKind.STEP, step=self._step, **fields)
        self._lines += 1
        self._clear()


def log_steps(observer: StepObserver, open_writer: Callable[[], EventWriter]) -> StepEvents | None:
    """Subscribes to ``observer`` and writes its steps to the writer that ``open_writer`` returns. Returns None, and
    opens no writer, when the steps are already written to a log, because each step is written once."""
    if any(isinstance(subscriber, StepEvents) for subscriber in observer.subscribers):
        return None
    events = StepEvents(open_writer())
    observer.subscribe(events)
    return events
