"""Implements the guide's arguments of ``ModelCheckpoint``, see :mod:`resiliency.callbacks._guide_arguments`.

The callback calls these functions in its hooks, on every rank; only the rank that handles files writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from resiliency.callbacks._context import remove_context, write_context
from resiliency.callbacks._run_files import note_start
from resiliency.callbacks._unfinished import UnfinishedMarkers
from resiliency.plugins import _lightning
from resiliency.plugins._ckpt_utils import get_is_checkpoint_file_handler

__all__ = [
    "NO_OPTIMIZER",
    "checkpoint_removed",
    "checkpoint_saved",
    "fit_begins",
    "leaves_step_to_another",
    "training_ended",
    "warn_of_missing_optimizer",
    "without_optimizer",
]

logger = logging.getLogger(__name__)

#: Key in a checkpoint without optimizer state, so that a resume from it can warn.
NO_OPTIMIZER = "saved_without_optimizer"


def fit_begins(callback: Any, trainer: Any) -> None:
    """Orders callbacks by priority, writes the run's files and deletes unfinished checkpoints, as far as the arguments
    ask for it. Blocks: while it writes and deletes."""
    _order_by_priority(trainer)
    if callback.preprocess_files and trainer.is_global_zero:
        note_start(str(trainer.default_root_dir))
    if callback.delete_unfinished_ckpt_on_start and "://" not in str(callback.dirpath):
        handler = get_is_checkpoint_file_handler(bool(callback.use_in_cluster_local_ckpts))
        UnfinishedMarkers._remove_unfinished_checkpoints(callback.dirpath, handler)


def leaves_step_to_another(callback: Any, trainer: Any) -> bool:
    """True when a callback of higher priority has saved this step."""
    return any(
        other is not callback
        and getattr(other, "priority", 0) > callback.priority
        and other._last_global_step_saved == trainer.global_step > 0
        for other in trainer.checkpoint_callbacks
    )


def checkpoint_saved(callback: Any, trainer: Any, path: str) -> None:
    """Writes the context of a checkpoint, if wanted. Called after a save was requested."""
    if callback.always_save_context and trainer.is_global_zero:
        write_context(path, trainer)


def checkpoint_removed(callback: Any, trainer: Any, path: str) -> None:
    """Removes the context of a checkpoint, if one may exist. Called when a removal is requested."""
    if (callback.always_save_context or callback.save_context_on_train_end) and trainer.is_global_zero:
        remove_context(path)


def training_ended(callback: Any, trainer: Any) -> None:
    """Writes the context of the last checkpoint, if wanted. Called at the end of training, when that is committed."""
    path = callback._last_checkpoint_saved
    if callback.save_context_on_train_end and path and trainer.is_global_zero:
        write_context(path, trainer)


def without_optimizer(callback: Any, trainer: Any, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state without that of optimizers, for the checkpoint at the end of training; None when it must be kept.

    Only when training has reached ``max_steps`` or ``max_epochs``, because a job that is stopped earlier will continue.
    """
    if callback.save_optim_on_train_end is not False or not state.get("optimizer_states"):
        return None
    if not _lightning.reached_its_end(trainer):
        return None
    # An empty list, not a missing key, so that a job that is restarted after its end can load the checkpoint; it then
    # finds nothing to do.
    return {**state, "optimizer_states": [], NO_OPTIMIZER: True}


def warn_of_missing_optimizer(checkpoint: Mapping[str, Any], trainer: Any) -> None:
    """Warns that optimizers start anew if the checkpoint was saved without their state. On rank 0, in a fit."""
    if checkpoint.get(NO_OPTIMIZER) and trainer.state.fn == "fit" and trainer.is_global_zero:
        logger.warning(
            "the checkpoint of step %s was saved without optimizer state (save_optim_on_train_end=False): if"
            " training goes"
            " on from it, optimizers start anew",
            checkpoint.get("global_step"),
        )


def _order_by_priority(trainer: Any) -> None:
    """Sorts the checkpoint callbacks by priority, highest first, without moving any other callback."""
    callbacks = list(trainer.callbacks)
    places = [number for number, callback in enumerate(callbacks) if callback in trainer.checkpoint_callbacks]
    ordered = sorted((callbacks[number] for number in places), key=lambda one: -getattr(one, "priority", 0))
    if ordered == [callbacks[number] for number in places]:
        return
    for number, callback in zip(places, ordered, strict=True):
        callbacks[number] = callback
    trainer.callbacks = callbacks  # a new list, because Lightning is iterating over the old one
