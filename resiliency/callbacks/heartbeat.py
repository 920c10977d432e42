"""``HeartbeatCallback``: publishes step and phase of each rank for supervisors, at the cost of microseconds per step.

``from resiliency.callbacks.heartbeat import HeartbeatCallback`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from resiliency.errors import ConfigError
from resiliency.plugins import _lightning
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.rank_monitor import RankMonitor, section_of
from resiliency.plugins.step_hooks import StepHooks
from resiliency.runtime import heartbeat
from resiliency.runtime.heartbeat_page import Phase
from resiliency.settings import environment

__all__ = ["HeartbeatCallback", "build"]  # noqa: F822 - HeartbeatCallback is built on first use

logger = logging.getLogger(__name__)


class PublishesHeartbeat(StepHooks):
    """Publishes step, phase and attempt of this rank.

    Heartbeats go to up to three readers: to ``resiliency run``, if it started the rank; to a file in a folder, which
    ``resiliency heartbeat`` shows and :func:`~resiliency.runtime.heartbeat_files.read_heartbeats` reads; and, as
    heartbeats and sections, to the rank monitor of NVRx's ``ft_launcher``, if the environment names its socket and the
    Trainer has no fault tolerance callback of NVRx. The launcher and the readers of the folder use shared memory, so
    that they can read while the rank hangs, holds the GIL or is stopped.

    The phase is ``setup`` until the first step, ``loading`` while a checkpoint is read, ``training``, ``validation``,
    ``testing`` or ``prediction``, and at the end ``ended`` or ``failed``. It is ``saving`` from the moment the state of
    a save is collected until the hooks at the end of the batch are done (for a save outside these hooks: until the next
    batch).

    Thread: the training thread. Collective: no. Blocks: with a rank monitor, at most ten seconds at the start and at
    the end of a fit; a step costs some microseconds (``python -m benchmarks.heartbeat``).

    Args:
        directory: folder on a file system in memory, for example ``/dev/shm/heartbeats``; it is created if missing.
            None: ``RESILIENCY_HEARTBEAT_DIR``, or no folder when that is not set.

    Raises:
        ConfigError: at the start of a fit, the folder cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._directory = None if directory is None else os.fspath(directory)
        self._monitor: RankMonitor | None = None
        #: Whether a fit (or validation, test, prediction) runs, and whether its hooks at the end of a batch run.
        self._inside = self._in_batch_end = False
        self._undo: Callable[[], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in a fit is not connected to a rank monitor."""
        return {**vars(self), "_monitor": None, "_undo": _nothing}

    def _enter(self, phase: Phase, step: int | None = None) -> None:
        heartbeat.enter(phase, step)
        if self._monitor is not None:
            self._monitor.enter(section_of(phase))

    def _progressed(self) -> None:
        """Gives a sign of life after a batch of a validation, test or prediction, in which no beats are expected."""
        heartbeat.show()
        if self._monitor is not None:
            self._monitor.progressed()

    # -- beginning and end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "HeartbeatCallback", __name__)
        super().setup(trainer, pl_module, stage)
        if self._directory is not None:
            try:
                heartbeat.publish(self._directory)
            except OSError as error:
                raise ConfigError(f"directory={self._directory!r} cannot hold heartbeats: {error}") from error
        self._close_monitor(shutdown=False)  # left open by a fit that Lightning ended without its last hooks
        self._monitor = _rank_monitor(trainer)
        if self._monitor is None and not heartbeat.is_published() and trainer.is_global_zero:
            logger.warning(
                "nobody receives this job's heartbeats: pass HeartbeatCallback a directory, set"
                " RESILIENCY_HEARTBEAT_DIR, or start the job with resiliency run"
            )
        self._inside, self._in_batch_end = True, False
        self._enter(Phase.SETUP)
        self._undo()
        if stage == "fit":
            self._undo = _lightning.around_load(
                trainer, lambda: self._enter(Phase.LOADING), lambda: self._enter(Phase.SETUP)
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._end_of_loading()
        super().on_train_start(trainer, pl_module)

    def _end_of_loading(self) -> None:
        self._undo()
        self._undo = _nothing

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._end_of_loading()
        self._inside = False
        self._enter(Phase.ENDED)
        self._close_monitor(shutdown=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._end_of_loading()
        self._inside = False
        self._enter(Phase.FAILED)
        self._close_monitor(shutdown=False)  # no shutdown, so that the monitor still ends a process that hangs at exit

    def _close_monitor(self, *, shutdown: bool) -> None:
        if self._monitor is not None:
            self._monitor.close(shutdown=shutdown)
            self._monitor = None

    # -- training

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._in_batch_end = False
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._monitor is not None:
            self._monitor.enter(section_of(Phase.TRAINING))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._in_batch_end = True
        if self._monitor is not None:
            self._monitor.progressed()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if not self._inside:
            return  # the script calls trainer.save_checkpoint after the fit
        self._enter(Phase.SAVING, trainer.global_step)
        if self._in_batch_end:
            self._in_batch_end = False  # one action is enough for several saves in one hook
            _lightning.after_batch_end_hooks(trainer, lambda: self._enter(Phase.TRAINING))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._in_batch_end = False
        super().on_train_epoch_end(trainer, pl_module)
        if self._monitor is not None:
            self._monitor.enter(None)  # hooks at the end of an epoch may take any time

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if self._monitor is not None:
            self._monitor.enter(None)

    # -- validation, test and prediction

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._in_batch_end = False
        super().on_validation_start(trainer, pl_module)
        if not trainer.sanity_checking:
            self._enter(Phase.VALIDATION)

    def on_validation_batch_end(self, trainer: Any, *arguments: Any) -> None:
        super().on_validation_batch_end(trainer, *arguments)
        if not trainer.sanity_checking:  # the sanity check belongs to the setup, for which the first timeout holds
            self._progressed()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_test_start(trainer, pl_module)
        self._enter(Phase.TESTING)

    def on_test_batch_end(self, *arguments: Any) -> None:
        super().on_test_batch_end(*arguments)
        self._progressed()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_predict_start(trainer, pl_module)
        self._enter(Phase.PREDICTION)

    def on_predict_batch_end(self, *arguments: Any) -> None:
        super().on_predict_batch_end(*arguments)
        self._progressed()


def _rank_monitor(trainer: Any) -> RankMonitor | None:
    """Connects to NVRx's rank monitor of this rank; None when there is none, when it cannot be reached, or when a
    callback of NVRx reports to it."""
    if not environment().rank_monitor:
        return None
    theirs = [one for one in trainer.callbacks if type(one).__module__.startswith("nvidia_resiliency_ext.")]
    telling = next((type(one).__name__ for one in theirs if type(one).__name__.startswith("FaultTolerance")), None)
    if telling is not None:
        logger.info("%s tells NVRx's rank monitor of this rank, so HeartbeatCallback does not", telling)
        return None
    try:
        return RankMonitor()
    except ConfigError as error:
        logger.warning("HeartbeatCallback does not report to NVRx's rank monitor: %s", error)
        return None


def _nothing() -> None: ...


_adapter = AdapterClass(__name__, "HeartbeatCallback", PublishesHeartbeat, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)


def __dir__() -> list[str]:
    return __all__
