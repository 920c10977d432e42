"""Type declarations of the parts of Lightning's callback classes that this library uses; both packages have them.

For the type checker, the callbacks of this library derive from these classes. At run time they derive from ``object``,
and :class:`resiliency.plugins.namespaces.AdapterClass` adds the class of the user's package as a base. Never imported
at run time.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, ClassVar

__all__ = ["StockCallback", "StockModelCheckpoint"]


class StockCallback:
    """``lightning.pytorch.callbacks.Callback``."""

    #: The Lightning package the class is built for; added by ``AdapterClass``.
    namespace: ClassVar[str]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None: ...
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_batch_end(self, *arguments: Any) -> None: ...
    def on_test_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_test_batch_end(self, *arguments: Any) -> None: ...
    def on_predict_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_predict_batch_end(self, *arguments: Any) -> None: ...
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...


class StockModelCheckpoint(StockCallback):
    """``lightning.pytorch.callbacks.ModelCheckpoint``."""

    FILE_EXTENSION: str
    dirpath: str | os.PathLike[str] | None
    monitor: str | None
    save_top_k: int
    save_weights_only: bool
    best_k_models: Any  # paths -> scores
    _last_global_step_saved: int
    _train_time_interval: timedelta | None
    _last_checkpoint_saved: str

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def _generate_state_key(self, **kwargs: Any) -> str:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def _save_checkpoint(self, trainer: Any, filepath: str) -> None: ...
    def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
        raise NotImplementedError

    _link_checkpoint: Any  # a static method

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None: ...

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        raise NotImplementedError

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        raise NotImplementedError

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        raise NotImplementedError

    def _ModelCheckpoint__warn_if_dir_not_empty(self, dirpath: Any) -> None: ...

    def _ModelCheckpoint__resolve_ckpt_dir(self, trainer: Any) -> str | os.PathLike[str]:
        raise NotImplementedError
