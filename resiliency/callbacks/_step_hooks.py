"""Drives the one :class:`StepObserver` of a trainer from Lightning's hooks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from resiliency.telemetry.step_observer import StepObserver

if TYPE_CHECKING:
    from resiliency.callbacks._stock import StockCallback
else:
    StockCallback = object

__all__ = ["StepHooks", "step_observer"]

_observers: weakref.WeakKeyDictionary[Any, StepObserver] = weakref.WeakKeyDictionary()


def step_observer(trainer: Any) -> StepObserver:
    """The observer of a trainer's steps, the same for all its fits; subscribers must not hold the trainer.

    Thread: the training thread.
    """
    observer = _observers.get(trainer)
    if observer is None:
        observer = _observers[trainer] = StepObserver()
    return observer


class StepHooks(StockCallback):
    """The hooks that drive the step observer; all callbacks of this library derive from it.

    Lightning calls only the hooks of ``trainer.callbacks``; loops and strategies have no hook at the end of a batch. An
    additional callback there would be visible to users and in checkpoints (which store callback states by class name),
    and would need a place in the order of hooks. So a callback the user passed drives the observer: the first one in
    ``trainer.callbacks`` that derives from this class; the others do nothing.

    Steps end after the driving callback's own work in the hook, so that time it spends saving belongs to the step.
    """

    def _driven(self, trainer: Any) -> StepObserver | None:
        """The trainer's observer when this is the callback that drives it."""
        first = next((callback for callback in trainer.callbacks if isinstance(callback, StepHooks)), None)
        return step_observer(trainer) if first is self else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if observer := self._driven(trainer):
            observer.training_started(trainer.global_step, trainer.world_size)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if observer := self._driven(trainer):
            observer.batch_started()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        if observer := self._driven(trainer):
            observer.backward_started()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if observer := self._driven(trainer):
            observer.batch_ended(trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_start(trainer, pl_module)
        if not trainer.sanity_checking and (observer := self._driven(trainer)):
            observer.validation_started()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and (observer := self._driven(trainer)):
            observer.validation_ended()  # first, so that a save in the hook is not counted as validation
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if observer := self._driven(trainer):
            observer.training_ended(trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if observer := self._driven(trainer):
            observer.training_interrupted()
