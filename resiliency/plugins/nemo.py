"""NeMo's checkpoints through the checkpoint engine: one callback more.

::

    trainer = nl.Trainer(strategy=nl.MegatronStrategy(...), callbacks=[CheckpointEngine()])

NeMo's own ``ModelCheckpoint`` and ``AutoResume`` stay in charge: when checkpoints are saved, how they are named, which
are kept and which one a run resumes. The strategy's ``ckpt_*`` arguments apply as without the callback.

Needs NeMo 2.3 to 2.7. NeMo 3 has no ``MegatronStrategy``; there, give
:class:`~resiliency.plugins.megatron.MegatronSaveStrategy` to Megatron-Bridge. Importing this module imports NeMo, and
raises ConfigError, with what to install or to use instead, where that does not work.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from resiliency.checkpoint.dcp import check_folder
from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.checkpoint.ticket import LOCAL
from resiliency.errors import ConfigError
from resiliency.events import EventKind
from resiliency.plugins._missing import no_nemo
from resiliency.plugins.step_hooks import StepHooks, step_observer, wants_log
from resiliency.telemetry.step_events import StepEvents, log_steps
from resiliency.telemetry.step_observer import StepObserver

try:
    import lightning.pytorch as pl
    import nemo.collections.llm  # noqa: F401 - before all other parts of NeMo, which import each other in circles
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.parallel_state import get_data_parallel_group
    from nemo.lightning.io.pl import MegatronCheckpointIO
    from nemo.lightning.pytorch.strategies import MegatronStrategy
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

    from resiliency.plugins.megatron import CommitQueue, MegatronSaveStrategy
except ImportError as error:
    raise no_nemo(error) from error

__all__ = ["CheckpointEngine"]

logger = logging.getLogger(__name__)


class CheckpointEngine(StepHooks, pl.Callback):
    """Makes the trainer's ``MegatronStrategy`` save and load through the checkpoint engine.

    Tensors are copied while the next step's forward and backward run, before the optimizer changes them; with
    ``overlap_param_gather``, which changes parameters earlier, before the save returns.

    With a launcher, a ``GoodputCallback`` or ``RESILIENCY_EVENTS_DIR``, the engine's event log has the run's steps, its
    restore, and for how long each save held training up.

    Args:
        run, options, remotes: as for :class:`~resiliency.Checkpointer`.
    """

    def __init__(
        self,
        *,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        remotes: Sequence[RemoteTierOptions] = (),
    ) -> None:
        self._run, self._options, self._remotes = run, options, tuple(remotes)
        self._saves: MegatronSaveStrategy | None = None
        self._steps: StepEvents | None = None
        self._saving = _Saving()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """
        Raises:
            ConfigError: the trainer has another strategy, or one that writes another format.
        """
        super().setup(trainer, pl_module, stage)
        strategy: Any = trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ConfigError(
                f"CheckpointEngine serves nl.MegatronStrategy, and this trainer has {type(strategy).__name__}; with"
                " other strategies use resiliency.ModelCheckpoint"
            )
        if strategy.save_ckpt_format != "torch_dist":
            raise ConfigError(
                f"CheckpointEngine writes save_ckpt_format='torch_dist', and the strategy has"
                f" {strategy.save_ckpt_format!r}; change that argument or take the callback out"
            )
        if self._saves is None:
            self._saves = MegatronSaveStrategy(run=self._run, options=self._options, remotes=self._remotes)
            self._saves.sinks = tuple(sink for other in trainer.callbacks for sink in getattr(other, "event_sinks", ()))
        self._saving = _Saving(step_observer(trainer))
        io = _CheckpointIO(strategy, self._saves, self._saving)
        strategy.checkpoint_io = _AsynchronousIO(io) if strategy.async_save else io
        directory = str(getattr(trainer.checkpoint_callback, "dirpath", None) or "")
        if stage == "fit" and directory and "://" not in directory and wants_log(trainer):
            self._log_steps(trainer, self._saves, directory)

    def _log_steps(self, trainer: pl.Trainer, saves: MegatronSaveStrategy, directory: str) -> None:
        engine, observer = saves.open(os.path.abspath(directory)), step_observer(trainer)
        engine.before_step = lambda *_: observer.stall(engine.fence())
        self._steps = log_steps(observer, lambda: engine.session.events)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self._saving.began()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self._saves is not None:
            self._saves.end.reason = "exception"

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Waits until the saves are durable, and closes the engine."""
        super().teardown(trainer, pl_module, stage)
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.flush()
            step_observer(trainer).unsubscribe(steps)
        if self._saves is not None:
            self._saves.close()


class _Saving:
    """Counts the time that training waits for a save, from before NeMo collects the state."""

    def __init__(self, observer: StepObserver | None = None) -> None:
        self._observer = observer
        self._began_s: float | None = None

    def began(self) -> None:
        self._began_s = time.monotonic()

    def ended(self) -> None:
        if self._began_s is not None and self._observer is not None:
            self._observer.stall(time.monotonic() - self._began_s)
        self._began_s = None


class _CheckpointIO(MegatronCheckpointIO):
    """NeMo's own IO, with the strategy's arguments, over the engine."""

    def __init__(self, strategy: MegatronStrategy, saves: MegatronSaveStrategy, saving: _Saving) -> None:
        super().__init__(
            save_ckpt_format=strategy.save_ckpt_format,
            load_directly_on_device=strategy.load_directly_on_device,
            async_save=strategy.async_save,
            assume_constant_structure=strategy.assume_constant_structure,
            parallel_save=strategy.parallel_save,
            parallel_save_within_dp=strategy.parallel_save_within_dp,
            parallel_load=strategy.parallel_load,
        )
        self._strategy, self._saves, self._saving = strategy, saves, saving

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> Any:
        self._saves.step = int(checkpoint["global_step"])
        overlaps = bool(getattr(self._strategy.ddp_config, "overlap_param_gather", False))
        if overlaps and self._saves.lazy and not self._saves.calls:
            logger.info(
                "overlap_param_gather changes parameters before the optimizer's step: tensors are copied before a save"
                " returns, and not beside the next step"
            )
        self._saves.lazy = not overlaps
        try:
            return super().save_checkpoint(checkpoint, path, storage_options)
        finally:
            self._saving.ended()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            CorruptShard: bytes are damaged or missing, on all ranks; names the file.
        """
        began, events = time.monotonic(), self._saves.events
        if events is not None:
            events.emit(EventKind.RESTORE_STARTED)
        check_folder(self._preprocess_checkpoint_load_path(path))
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        if events is not None:
            step, seconds = int(checkpoint.get("global_step", -1)), round(time.monotonic() - began, 6)
            events.emit(EventKind.CHECKPOINT_LOADED, step=step, duration_s=seconds, source=LOCAL)
        return checkpoint

    def _determine_dist_ckpt_save_strategy(self) -> Any:
        if not self.parallel_save:
            return self._saves
        group = get_data_parallel_group(with_context_parallel=True) if self.parallel_save_within_dp else None
        return FullyParallelSaveStrategyWrapper(self._saves, group, self.assume_constant_structure)


class _AsynchronousIO(AsyncFinalizableCheckpointIO):
    def __init__(self, io: _CheckpointIO) -> None:
        super().__init__(io)
        self.async_calls_queue = CommitQueue()
