"""Drives the one :class:`StepObserver` of a trainer from Lightning's hooks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from resiliency.plugins._lightning import tell_fetches
from resiliency.runtime.heartbeat import Phase, beat, enter, pause, worked
from resiliency.settings import environment
from resiliency.telemetry.step_observer import StepObserver, StepSubscriber, StepTiming

if TYPE_CHECKING:
    from resiliency.callbacks.checkpointing.stock import StockCallback
else:
    StockCallback = object

__all__ = ["StepHooks", "step_observer", "wants_log"]

_observers: weakref.WeakKeyDictionary[Any, StepObserver] = weakref.WeakKeyDictionary()


def step_observer(trainer: Any) -> StepObserver:
    """The observer of a trainer's steps, one for all its fits. Subscribers must not hold a reference to the trainer.

    Thread: the training thread.
    """
    observer = _observers.get(trainer)
    if observer is None:
        observer = _observers[trainer] = StepObserver()
        observer.subscribe(_Beats())
    return observer


def wants_log(trainer: Any) -> bool:
    """True when a launcher started the job, or the user asked for events. The event log then contains the start of the
    process, and is kept after the job has ended."""
    return environment().wants_log or any(getattr(other, "reads_events", False) for other in trainer.callbacks)


class _Beats(StepSubscriber):
    """Turns steps into heartbeats, which supervisors read: progress from batch to batch, and the wait for the first
    batch of an epoch. It pauses the heartbeat at the end of an epoch and in a validation, because these, with the
    user's hooks, may take any time."""

    def __init__(self) -> None:
        self._step: int | None = None

    def training_started(self, step: int, world_size: int | None) -> None:
        self._step = step
        enter(Phase.TRAINING, step)

    def step_ended(self, timing: StepTiming) -> None:
        self._step = timing.step
        worked(timing.own_s, timing.count)

    def progressed(self) -> None:
        beat(self._step)

    def paused(self) -> None:
        pause()

    def training_ended(self, step: int) -> None:
        pause()

    def training_interrupted(self) -> None:
        pause()


class StepHooks(StockCallback):
    """The hooks that drive the step observer; all callbacks of this library derive from it.

    Lightning calls only the hooks of ``trainer.callbacks``. A separate callback for the observer would appear in that
    list and in checkpoints, and would need a place in the order of hooks. So all callbacks of this library that the
    user passed drive the observer: the first call for an event counts, and later calls for it change nothing. A user's
    subclass that leaves out ``super()`` in a hook, or a callback that forwards its hooks to one of these, does no harm
    as long as the hook of one of these callbacks is called.

    A step ends after the callback's own work in the hook, so that its saves count as part of the step.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        observer = step_observer(trainer)
        tell_fetches(trainer, observer.fetch_started, observer.fetch_ended)
        observer.training_started(trainer.global_step, trainer.world_size)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        step_observer(trainer).epoch_started()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        step_observer(trainer).batch_started()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        step_observer(trainer).backward_started()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        observer = step_observer(trainer)
        observer.batch_ended(trainer.global_step)
        if trainer.is_last_batch:
            observer.epoch_ends()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_start(trainer, pl_module)
        if not trainer.sanity_checking:
            step_observer(trainer).validation_started()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            step_observer(trainer).validation_ended()  # first, so that a save in the hook is not counted as validation
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        step_observer(trainer).training_ended(trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        step_observer(trainer).training_interrupted()
