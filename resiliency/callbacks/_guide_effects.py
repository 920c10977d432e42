"""What the guide's arguments of ``ModelCheckpoint`` do, see :mod:`resiliency.callbacks._guide_arguments`.

Called by the callback in its hooks, on every rank; files are written by the rank that handles them.
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

#: In a checkpoint without optimizer state, so that a resume from it can say so.
NO_OPTIMIZER = "saved_without_optimizer"


def fit_begins(callback: Any, trainer: Any) -> None:
    """Orders callbacks by priority, and does what is to be done with files before training. Blocks: for these."""
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
    """After the request of a save."""
    if callback.always_save_context and trainer.is_global_zero:
        write_context(path, trainer)


def checkpoint_removed(callback: Any, trainer: Any, path: str) -> None:
    """After the request of a removal."""
    if (callback.always_save_context or callback.save_context_on_train_end) and trainer.is_global_zero:
        remove_context(path)


def training_ended(callback: Any, trainer: Any) -> None:
    """At the end of training, once the last save is committed."""
    path = callback._last_checkpoint_saved
    if callback.save_context_on_train_end and path and trainer.is_global_zero:
        write_context(path, trainer)


def without_optimizer(callback: Any, trainer: Any, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the checkpoint at the end of training without that of optimizers; None where it is to be kept.

    Only where training has reached its ``max_steps`` or ``max_epochs``: a job that is stopped earlier goes on.
    """
    if callback.save_optim_on_train_end is not False or not state.get("optimizer_states"):
        return None
    if not _lightning.reached_its_end(trainer):
        return None
    # An empty list, not none: a job that is restarted after its end can load the checkpoint, and finds nothing to do.
    return {**state, "optimizer_states": [], NO_OPTIMIZER: True}


def warn_of_missing_optimizer(checkpoint: Mapping[str, Any], trainer: Any) -> None:
    """Says that optimizers start anew, where the checkpoint was saved without their state."""
    if checkpoint.get(NO_OPTIMIZER) and trainer.state.fn == "fit" and trainer.is_global_zero:
        logger.warning(
            "the checkpoint of step %s was saved without optimizer state (save_optim_on_train_end=False): if"
            " training goes"
            " on from it, optimizers start anew",
            checkpoint.get("global_step"),
        )


def _order_by_priority(trainer: Any) -> None:
    """Puts callbacks with a higher priority first, among the places that checkpoint callbacks have."""
    callbacks = list(trainer.callbacks)
    places = [number for number, callback in enumerate(callbacks) if callback in trainer.checkpoint_callbacks]
    ordered = sorted((callbacks[number] for number in places), key=lambda one: -getattr(one, "priority", 0))
    if ordered == [callbacks[number] for number in places]:
        return
    for number, callback in zip(places, ordered, strict=True):
        callbacks[number] = callback
    trainer.callbacks = callbacks  # a new list: Lightning goes through the old one at the moment
