"""Base class and log function of the callbacks that log steps on rank 0."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from resiliency.callbacks._log_directory import is_shown
from resiliency.callbacks._scalars import Scalars, open_scalars
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import require_trainer_of
from resiliency.plugins.step_hooks import StepHooks, step_observer
from resiliency.telemetry.step_observer import StepSubscriber

__all__ = ["LogsSteps", "say"]

logger = logging.getLogger(__name__)


def say(namespace: str, line: str) -> None:
    """Logs a line so that it is shown: with this library's logger, or with Lightning's if Python's logging is not set
    up to show this library's. Call it on rank 0."""
    if logger.isEnabledFor(logging.INFO) and is_shown(__name__):
        logger.info("%s", line)
    else:
        importlib.import_module(f"{namespace}.utilities.rank_zero").rank_zero_info(line)


class LogsSteps(StepHooks):
    """Base class: subscribes on rank 0 to the steps of a fit and opens the scalars for TensorBoard.

    Args:
        tb_dir: folder or address for TensorBoard; None: the Trainer's TensorBoardLogger if it has one.

    Raises:
        ConfigError: ``tb_dir`` is empty; at the start of a fit, it cannot be used.
    """

    def __init__(self, tb_dir: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._tb_dir = None if tb_dir is None else os.fspath(tb_dir)
        if self._tb_dir == "":  # refused, because the folder of a run would lie in the root of the file system
            raise ConfigError("tb_dir='': pass a folder or an address such as gs://bucket/tb, or None")
        self._scalars: Scalars | None = None
        self._subscriber: StepSubscriber | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_scalars": None, "_subscriber": None}

    def _make_subscriber(self, trainer: Any, scalars: Scalars | None) -> StepSubscriber | None:
        """Returns the subscriber for a fit, on rank 0; None: nothing to log. It must not hold the trainer."""
        raise NotImplementedError

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, type(self).__name__, f"{__package__}.logging")
        super().setup(trainer, pl_module, stage)
        self._finish(trainer)  # a fit that Lightning ended without its last hooks may have left something open

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        self._scalars = open_scalars(trainer, self._tb_dir)
        self._subscriber = self._make_subscriber(trainer, self._scalars)
        if self._subscriber is not None:
            step_observer(trainer).subscribe(self._subscriber)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._finish(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        if self._subscriber is not None:
            step_observer(trainer).unsubscribe(self._subscriber)
            self._subscriber = None
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None
