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
from collections.abc import Sequence
from typing import Any

from resiliency.checkpoint.dcp import check_folder
from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.errors import ConfigError
from resiliency.plugins._missing import no_nemo

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


class CheckpointEngine(pl.Callback):
    """Makes the trainer's ``MegatronStrategy`` save and load through the checkpoint engine.

    Tensors are copied while the next step's forward and backward run, before the optimizer changes them; with
    ``overlap_param_gather``, which changes parameters earlier, before the save returns.

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

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """
        Raises:
            ConfigError: the trainer has another strategy, or one that writes another format.
        """
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
        io = _CheckpointIO(strategy, self._saves)
        strategy.checkpoint_io = _AsynchronousIO(io) if strategy.async_save else io

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Waits until the saves are durable, and closes the engine."""
        if self._saves is not None:
            self._saves.close()


class _CheckpointIO(MegatronCheckpointIO):
    """NeMo's own IO, with the strategy's arguments, over the engine."""

    def __init__(self, strategy: MegatronStrategy, saves: MegatronSaveStrategy) -> None:
        super().__init__(
            save_ckpt_format=strategy.save_ckpt_format,
            load_directly_on_device=strategy.load_directly_on_device,
            async_save=strategy.async_save,
            assume_constant_structure=strategy.assume_constant_structure,
            parallel_save=strategy.parallel_save,
            parallel_save_within_dp=strategy.parallel_save_within_dp,
            parallel_load=strategy.parallel_load,
        )
        self._strategy, self._saves = strategy, saves

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
        return super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            CorruptShard: bytes are damaged or missing, on all ranks; names the file.
        """
        check_folder(self._preprocess_checkpoint_load_path(path))
        return super().load_checkpoint(path, *args, **kwargs)

    def _determine_dist_ckpt_save_strategy(self) -> Any:
        if not self.parallel_save:
            return self._saves
        group = get_data_parallel_group(with_context_parallel=True) if self.parallel_save_within_dp else None
        return FullyParallelSaveStrategyWrapper(self._saves, group, self.assume_constant_structure)


class _AsynchronousIO(AsyncFinalizableCheckpointIO):
    def __init__(self, io: _CheckpointIO) -> None:
        super().__init__(io)
        self.async_calls_queue = CommitQueue()
