"""``GoodputCallback``: writes the step events of a rank and shows running goodput in the progress bar and the logger.

``from resiliency.callbacks.goodput import GoodputCallback`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.
"""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from resiliency.events import EventSink, EventWriter, JsonlSink
from resiliency.plugins._namespace import default_namespace
from resiliency.settings import environment
from resiliency.telemetry.step_clock import StepClock, shared_clock

__all__ = ["GoodputCallback", "build"]  # noqa: F822 - GoodputCallback is built on first use

#: The figure in the progress bar changes at most this often.
SHOW_EVERY = timedelta(seconds=1)


class RunningGoodput:
    """Measures every step, writes events, and shows how much of this process's time was productive.

    The figure counts from when the fit was set up: start-up, restore, data wait and checkpoint stalls lower it. What
    earlier attempts lost is in ``resiliency goodput report``. Costs a few microseconds a step and never raises into
    training. With one of our checkpoint callbacks on the same Trainer, events go to its log, once; without, to a log of
    their own.

    Thread: the training thread. Collective: no.

    Args:
        events_dir: folder for a log of its own; None: ``RESILIENCY_EVENTS_DIR``, else below the Trainer's root folder.
        sinks: more places for events when the log is its own, see :mod:`resiliency.telemetry.sinks`.
        prog_bar: show ``goodput`` in the progress bar.
        log: send ``goodput`` to the Trainer's loggers.
    """

    def __init__(
        self,
        events_dir: str | os.PathLike[str] | None = None,
        *,
        sinks: tuple[EventSink, ...] = (),
        prog_bar: bool = True,
        log: bool = True,
    ) -> None:
        super().__init__()
        self._events_dir = events_dir
        self._sinks = sinks
        self._prog_bar = prog_bar
        self._log = log
        self._clock = StepClock(None)
        self._own: EventWriter | None = None
        self._shown = 0.0
        self._next_show = 0.0

    @property
    def goodput(self) -> float:
        """Productive share of this process's time so far, in [0, 1]."""
        elapsed = self._clock.elapsed_s
        return min(1.0, self._clock.productive_s / elapsed) if elapsed > 0 else 0.0

    def _open_log(self, trainer: Any) -> EventWriter:
        settings = environment()
        folder = self._events_dir or settings.events_dir
        if folder is None:
            folder = Path(trainer.default_root_dir) / ".resiliency" / settings.run / "events"
        sink = JsonlSink(Path(folder) / f"rank-{trainer.global_rank:05d}.jsonl")
        return EventWriter(
            run=settings.run,
            attempt=settings.restart,
            rank=trainer.global_rank,
            host=settings.node,
            sinks=(sink, *self._sinks),
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Not in setup: a checkpoint callback further down gives the clock its engine's log there, and that comes first.
        self._clock = shared_clock(trainer, lambda: StepClock(None))
        self._next_show = 0.0
        if self._clock.writer is None:
            self._own = self._clock.writer = self._open_log(trainer)
            self._clock.job_started(world_size=trainer.world_size, pid=os.getpid())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._clock.on_train_start(trainer.global_step, world_size=trainer.world_size)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._clock.on_train_batch_start()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._clock.on_before_backward()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._clock.on_train_batch_end(trainer.global_step)
        if not (self._prog_bar or self._log):
            return
        elapsed = self._clock.elapsed_s
        if elapsed >= self._next_show:
            self._next_show = elapsed + SHOW_EVERY.total_seconds()
            self._shown = self.goodput
        # Every time: Lightning forgets a step's value when the next step logs none.
        pl_module.log("goodput", self._shown, prog_bar=self._prog_bar, logger=self._log, batch_size=1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._clock.on_validation_start()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._clock.on_validation_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._clock.on_train_end(trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        asked = isinstance(exception, KeyboardInterrupt) or type(exception).__name__ == "SIGTERMException"
        self._finish("signal" if asked else "exception")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._finish("finished")

    def _finish(self, reason: str) -> None:
        if self._own is not None:
            self._clock.job_terminated(reason)
            self._clock.writer = None
            self._own.close()
            self._own = None


def build(namespace: str) -> type[Any]:
    """The class for ``lightning.pytorch`` or ``pytorch_lightning``; the same object each time."""
    found = _built.get(namespace)
    if found is None:
        stock = importlib.import_module(f"{namespace}.callbacks").Callback
        members = {"__module__": __name__, "__doc__": RunningGoodput.__doc__}
        found = type("GoodputCallback", (RunningGoodput, stock), members)
        _built[namespace] = found
    return found


_built: dict[str, type[Any]] = {}


def __getattr__(name: str) -> Any:
    if name == "GoodputCallback":
        return build(default_namespace())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
