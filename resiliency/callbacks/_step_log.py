"""``StepLoggingCallback``: logs a line with its time for each step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from resiliency.callbacks._scalars import Scalars
from resiliency.callbacks._step_lines import LogsSteps, say
from resiliency.callbacks._tensorboard import StepScalars
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass
from resiliency.plugins.step_hooks import step_observer
from resiliency.telemetry.step_observer import StepSubscriber, StepTiming

__all__ = ["StepLoggingCallback", "build"]  # noqa: F822 - StepLoggingCallback is built on first use

#: Seconds; a shorter time between two steps gets no line.
_BETWEEN_S = 0.010
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class StepLines(StepSubscriber):
    """Logs the lines. Do not change their wording, because log scrapers depend on it."""

    def __init__(self, namespace: str, scalars: StepScalars | None) -> None:
        self._namespace, self._scalars = namespace, scalars
        self._first = True

    def training_started(self, step: int, world_size: int | None) -> None:
        self._first = True
        say(self._namespace, "Training starts.")
        if self._scalars is not None:
            self._scalars.training_started(step, world_size)

    def step_ended(self, timing: StepTiming) -> None:
        first, self._first = self._first, False
        if not first and timing.between_s > _BETWEEN_S:
            say(self._namespace, f"Time between last step end and this step start: {timing.between_s:.3f}s")
        say(self._namespace, f"Step {timing.step} time: {timing.active_s:.3f}s")
        if self._scalars is not None:
            self._scalars.step_ended(timing)


class LogsStepTimes(LogsSteps):
    """Logs a line with its time for each step, on rank 0::

        Training starts.
        Step 1 time: 0.412s
        Time between last step end and this step start: 0.034s
        Step 2 time: 0.203s

    The time between steps gets a line if it is more than 10 ms. Steps and times are defined as in TensorboardCallback;
    this callback writes the same scalars.

    Thread: the training thread. Collective: no. Costs: one or two log lines per step.

    Args:
        tb_dir: as in TensorboardCallback, except None: the Trainer's TensorBoardLogger if it has one, else no scalars.
        timer_kwargs: ``{"sync_cuda": True}`` takes times after the GPU has done its work, which slows training down
            somewhat.

    Raises:
        ConfigError: ``timer_kwargs`` has another key; at the start of a fit, ``tb_dir`` cannot be used.
    """

    def __init__(
        self, tb_dir: str | os.PathLike[str] | None = None, timer_kwargs: Mapping[str, Any] = _NO_SETTINGS
    ) -> None:
        super().__init__(tb_dir)
        unknown = set(timer_kwargs) - {"sync_cuda"}
        if unknown:
            raise ConfigError(f"timer_kwargs has no {', '.join(sorted(unknown))}; it has sync_cuda")
        self._sync_cuda = bool(timer_kwargs.get("sync_cuda", False))

    def _make_subscriber(self, trainer: Any, scalars: Scalars | None) -> StepSubscriber | None:
        written = None if scalars is None else StepScalars(scalars, ranks=trainer.world_size)
        return StepLines(self.namespace, written)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._sync_cuda and torch.cuda.is_available():  # on all ranks: they wait for one another anyway
            step_observer(trainer).synchronize = torch.cuda.synchronize

    def _finish(self, trainer: Any) -> None:
        super()._finish(trainer)
        if self._sync_cuda:
            step_observer(trainer).synchronize = None


_adapter = AdapterClass(__name__, "StepLoggingCallback", LogsStepTimes, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
