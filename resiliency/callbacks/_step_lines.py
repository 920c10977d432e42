"""What the callbacks have in common that log steps on rank 0."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from resiliency.callbacks._log_directory import is_shown
from resiliency.callbacks._scalars import Scalars, open_scalars
from resiliency.callbacks._step_hooks import StepHooks, step_observer
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import require_trainer_of
from resiliency.telemetry.step_observer import StepSubscriber

__all__ = ["LogsSteps", "say"]

logger = logging.getLogger(__name__)


def say(namespace: str, line: str) -> None:
    """Logs a line for whoever reads this job's log: with this library's logger, or, where logging was not set up to
    show that, with Lightning's, which is shown. Rank 0."""
    if logger.isEnabledFor(logging.INFO) and is_shown(__name__):
        logger.info("%s", line)
    else:
        importlib.import_module(f"{namespace}.utilities.rank_zero").rank_zero_info(line)


class LogsSteps(StepHooks):
    """Subscribes to the steps of a fit on rank 0, with scalars for TensorBoard.

    Args:
        tb_dir: see the callbacks.

    Raises:
        ConfigError: ``tb_dir`` is empty.
    """

    def __init__(self, tb_dir: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._tb_dir = None if tb_dir is None else os.fspath(tb_dir)
        if self._tb_dir == "":  # a run in it would be a folder of the file system's root
            raise ConfigError("tb_dir='': pass a folder or an address such as gs://bucket/tb, or None")
        self._scalars: Scalars | None = None
        self._subscriber: StepSubscriber | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_scalars": None, "_subscriber": None}

    def _make_subscriber(self, trainer: Any, scalars: Scalars | None) -> StepSubscriber | None:
        """Of a fit on rank 0. Must not hold the trainer."""
        raise NotImplementedError

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, type(self).__name__, f"{__package__}.logging")
        super().setup(trainer, pl_module, stage)
        self._finish(trainer)  # of a fit that Lightning left without its last hooks

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
