"""``GoodputCallback``: writes the step events of a rank and shows running goodput in the progress bar and the logger.

``from resiliency.callbacks.goodput import GoodputCallback`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from resiliency.events import EventSink, EventWriter, JsonlSink
from resiliency.plugins.namespaces import AdapterClass
from resiliency.plugins.step_hooks import StepHooks, step_observer
from resiliency.runtime.job_log import tell_launcher
from resiliency.runtime.process_end import tell_end
from resiliency.runtime.start_times import callback_made, start_fields
from resiliency.settings import environment
from resiliency.telemetry.custom_spans import spans_go_to
from resiliency.telemetry.step_events import StepEvents, log_steps
from resiliency.telemetry.step_totals import StepTotals

__all__ = ["GoodputCallback", "build"]  # noqa: F822 - GoodputCallback is built on first use

#: Shortest time between two changes of the figure in the progress bar.
SHOW_EVERY = timedelta(seconds=1)


class ShowsGoodput(StepHooks):
    """Writes the events of every step to the event log and shows the productive share of this process's time.

    The share counts from the setup of the fit: start-up, restore, data wait and checkpoint stalls lower it. It does not
    contain time that earlier attempts lost; ``resiliency goodput report`` does. Costs a few microseconds per step and
    never raises into training. If the Trainer also has a checkpoint callback of this library, events go to that
    callback's log; otherwise to a log that this callback opens.

    Thread: the training thread. Collective: no.

    Attributes:
        reads_events: tells a checkpoint callback of the same trainer to open its log at the start of the fit.

    Args:
        events_dir: folder for this callback's own log; None: ``RESILIENCY_EVENTS_DIR``, or when that is not set a
            folder below the Trainer's root folder.
        sinks: further places for events, see :mod:`resiliency.telemetry.sinks`. They are also used when a checkpoint
            callback opens the log.
        prog_bar: show ``goodput`` in the progress bar.
        log: send ``goodput`` to the Trainer's loggers.
    """

    reads_events = True

    def __init__(
        self,
        events_dir: str | os.PathLike[str] | None = None,
        *,
        sinks: tuple[EventSink, ...] = (),
        prog_bar: bool = True,
        log: bool = True,
    ) -> None:
        super().__init__()
        callback_made()
        self._events_dir = events_dir
        self._sinks = sinks
        self._prog_bar = prog_bar
        self._log = log
        self._totals = StepTotals()
        self._own_log: StepEvents | None = None
        self._shown = 0.0
        self._next_show = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in a fit has no log and writes no events of that fit."""
        return {**vars(self), "_own_log": None}

    @property
    def event_sinks(self) -> tuple[EventSink, ...]:
        """Where the events go besides the log."""
        return self._sinks

    @property
    def goodput(self) -> float:
        """Productive share of this process's time since the setup of the fit, from 0 to 1."""
        return self._totals.goodput

    def _open_writer(self, trainer: Any) -> EventWriter:
        settings = environment()
        folder = self._events_dir or settings.events_dir
        if folder is None:
            folder = Path(trainer.default_root_dir) / ".resiliency" / settings.run / "events"
        tell_launcher(os.fspath(folder), run=settings.run, attempt=settings.restart)
        sink = JsonlSink(Path(folder) / f"rank-{trainer.global_rank:05d}.jsonl")
        writer = EventWriter(
            run=settings.run,
            attempt=settings.restart,
            rank=trainer.global_rank,
            host=settings.node,
            sinks=(sink, *self._sinks),
        )
        tell_end(sink.path, writer)
        spans_go_to(sink.path, writer)
        return writer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._subscribe_totals(trainer)

    def _subscribe_totals(self, trainer: Any) -> None:
        """Counts this trainer's steps from now on. A later fit of the same trainer adds to the totals."""
        observer = step_observer(trainer)
        if self._totals not in observer.subscribers:
            self._totals = StepTotals()
            observer.subscribe(self._totals)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Not in setup, because there a checkpoint callback, which may come later in the list, opens its engine's log,
        # and that log has priority.
        super().on_fit_start(trainer, pl_module)
        self._subscribe_totals(trainer)  # again, because a subclass may override setup
        self._next_show = 0.0
        self._own_log = log_steps(step_observer(trainer), lambda: self._open_writer(trainer))
        if self._own_log is not None:
            device = trainer.strategy.root_device.type
            self._own_log.job_started(world_size=trainer.world_size, pid=os.getpid(), device=device, **start_fields())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not (self._prog_bar or self._log):
            return
        elapsed = self._totals.elapsed_s
        if elapsed >= self._next_show:
            self._next_show = elapsed + SHOW_EVERY.total_seconds()
            self._shown = self.goodput
        # At every step, because Lightning drops the value when the next step logs none.
        pl_module.log("goodput", self._shown, prog_bar=self._prog_bar, logger=self._log, batch_size=1)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        asked = isinstance(exception, KeyboardInterrupt) or type(exception).__name__ == "SIGTERMException"
        self._finish("signal" if asked else "exception", trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            self._finish("finished", trainer)

    def _finish(self, reason: str, trainer: Any) -> None:
        if self._own_log is None:
            return
        events, self._own_log = self._own_log, None
        events.job_terminated(reason)
        step_observer(trainer).unsubscribe(events)
        events.writer.close()


_adapter = AdapterClass(__name__, "GoodputCallback", ShowsGoodput, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
