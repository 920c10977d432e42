"""``TensorboardCallback``: writes step times for TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from resiliency.callbacks._scalars import Scalars, tensorboard_logger
from resiliency.callbacks._step_lines import LogsSteps
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass
from resiliency.telemetry.step_observer import StepSubscriber, StepTiming

__all__ = ["StepScalars", "TensorboardCallback", "build"]  # noqa: F822 - TensorboardCallback is built on first use


class StepScalars(StepSubscriber):
    """Writes ``train/step_time`` and ``train/between_steps`` (seconds) and ``train/num_gpus`` (ranks) at each step.

    The first step of a fit has no ``train/between_steps``, because no step was before it.
    """

    def __init__(self, scalars: Scalars, *, ranks: int) -> None:
        self._scalars, self._ranks = scalars, ranks
        self._first = True

    def training_started(self, step: int, world_size: int | None) -> None:
        self._first = True

    def step_ended(self, timing: StepTiming) -> None:
        first, self._first = self._first, False
        self._scalars.write("train/step_time", timing.active_s, timing.step)
        if not first:
            self._scalars.write("train/between_steps", timing.between_s, timing.step)
        self._scalars.write("train/num_gpus", self._ranks, timing.step)


class WritesScalars(LogsSteps):
    """Writes step time, time between steps and the number of ranks to TensorBoard, on rank 0.

    A step is an optimizer step; with gradient accumulation it has several batches. Its time runs from the arrival of
    its first batch to the end of its last batch, without validations. The time between steps runs from there to the
    arrival of the next step's first batch.

    Thread: the training thread. Collective: no.

    Args:
        tb_dir: folder or address in which each fit gets a folder ``run-<UTC time>``. An address such as gs://bucket/tb
            is written to in the background every 30 s. None: the Trainer's own TensorBoardLogger.

    Raises:
        ConfigError: at the start of a fit, no TensorBoard package is installed, ``tb_dir`` cannot be used, or it is
            None and the Trainer has no TensorBoardLogger.
    """

    def __init__(self, tb_dir: str | os.PathLike[str] | None) -> None:
        super().__init__(tb_dir)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # On all ranks, because when only one rank raises, the others wait for it.
        if stage == "fit" and self._tb_dir is None and not trainer.fast_dev_run and tensorboard_logger(trainer) is None:
            raise ConfigError(
                "TensorboardCallback(None) writes to the Trainer's TensorBoardLogger, and there is none: pass a folder"
                " as tb_dir, or Trainer(logger=TensorBoardLogger(...))"
            )

    def _make_subscriber(self, trainer: Any, scalars: Scalars | None) -> StepSubscriber | None:
        return None if scalars is None else StepScalars(scalars, ranks=trainer.world_size)


_adapter = AdapterClass(__name__, "TensorboardCallback", WritesScalars, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
