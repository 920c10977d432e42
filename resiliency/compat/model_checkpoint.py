"""The older library's arguments of ``ModelCheckpoint``: they are checked here, and what they ask for is done here.

The callback calls the functions in its hooks, on every rank; only the rank that handles files writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from resiliency.compat.latest import get_is_checkpoint_file_handler
from resiliency.compat.markers import UnfinishedMarkers
from resiliency.compat.training_notes import note_start, remove_context, write_context
from resiliency.errors import ConfigError
from resiliency.plugins import _lightning

__all__ = [
    "NO_OPTIMIZER",
    "OlderArguments",
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


@dataclass(frozen=True, kw_only=True)
class OlderArguments:
    """Arguments as passed to ``ModelCheckpoint``, which describes them. None: what the stock class does.

    Raises:
        TypeError: a value of a wrong type.
        ConfigError: a value that cannot work.
    """

    save_optim_on_train_end: bool | None = None
    #: As the example of the older library spells it.
    save_optim_on_train_ends: bool | None = None
    always_save_context: bool | None = None
    save_context_on_train_end: bool | None = None
    preprocess_files: bool | None = None
    use_in_cluster_local_ckpts: bool | None = None
    is_persistent_storage: bool | None = None
    enable_high_scale_ckpt: bool | None = None
    delete_unfinished_ckpt_on_start: bool | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "priority" and not isinstance(value, bool | None):
                raise TypeError(f"{field.name}={value!r} is a {type(value).__name__}; pass True, False or None")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int | None):
            raise TypeError(f"priority={self.priority!r} is a {type(self.priority).__name__}; pass a whole number")
        right, misspelt = self.save_optim_on_train_end, self.save_optim_on_train_ends
        if None not in (right, misspelt) and right != misspelt:
            raise ConfigError(
                f"save_optim_on_train_end={right} and save_optim_on_train_ends={misspelt} are one argument; pass the"
                " first"
            )
        if self.enable_high_scale_ckpt:
            raise ConfigError(
                "enable_high_scale_ckpt=True needs what talks to the GKE replicator (replicator.yaml and *.restore"
                " files in /local), which this version does not have; without it, pass local_dir='/local/<job>' and a"
                " dirpath= that all hosts see: saves go to the ramdisk first, and are uploaded"
            )

    def attributes(self) -> dict[str, Any]:
        """The callback's attributes of these names."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        misspelt = found.pop("save_optim_on_train_ends")
        if self.save_optim_on_train_end is None:
            found["save_optim_on_train_end"] = misspelt
        return {**found, "priority": self.priority or 0}

    @property
    def wants_local_tier(self) -> bool:
        """True when the callback must save to a local folder first and upload from there to ``dirpath``."""
        return bool(self.use_in_cluster_local_ckpts) and self.is_persistent_storage is None

    @property
    def is_local_tier(self) -> bool:
        """True when ``dirpath`` is a folder of the local tier."""
        return bool(self.use_in_cluster_local_ckpts) and self.is_persistent_storage is False


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
            "the checkpoint of step %s was saved without optimizer state (save_optim_on_train_end=False): if training"
            " goes on from it, optimizers start anew",
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
