"""Repairs what Lightning's loops lose at a restart, apart from random generators and data loaders.

Each function says which loss it repairs. All run on the training thread, on every rank: in the first
``on_advance_start`` after a restart (loops restored, ``fit_loop.reset`` done) or at the end of the first epoch. They
use attributes of the trainer object only; where a version of Lightning lacks one, the repair does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["begin_epoch_after_last_batch", "count_saved_batch", "end_restart", "note_plateau", "settle_plateau"]


def begin_epoch_after_last_batch(fit_loop: Any) -> None:
    """After a save in ``on_train_batch_end`` of the last batch of an epoch: starts the next epoch as a new one.

    ``fit_loop`` counts the saved epoch as done but continues as if in the middle of one: it skips
    ``on_train_epoch_start`` and, when the loaders have no length, the whole next epoch.
    """
    epoch_loop = fit_loop.epoch_loop
    if not (getattr(epoch_loop, "restarted_on_train_batch_end", False) and epoch_loop.batch_progress.is_last_batch):
        return
    epoch_loop._batches_that_stepped += 1
    epoch_loop.batch_progress.increment_completed()
    epoch_loop.restarting = False
    epoch_loop.reset_restart_stage()
    fit_loop.reset_restart_stage()


def count_saved_batch(fit_loop: Any) -> None:
    """After a save in ``on_train_batch_end``: counts that batch as done, so that it is not trained on again.

    Lightning before 2.5 does not count it. Later versions do not when a step of an earlier epoch found no more batches
    (``training_step(dataloader_iter)`` without length).
    """
    epoch_loop = fit_loop.epoch_loop
    if getattr(epoch_loop, "restarted_on_train_batch_end", False) or not epoch_loop.restarting:
        return
    current = epoch_loop.batch_progress.current
    if current.ready == current.processed == current.completed + 1:
        epoch_loop.batch_progress.increment_completed()


def note_plateau(trainer: Any, state: dict[str, Any]) -> str | None:
    """Adds to ``state`` what ``ReduceLROnPlateau`` needs after a restart: its metrics and whether an update is due.

    Lightning updates these schedulers after the hooks in which checkpoints are saved, from metrics it does not save.
    Without such a scheduler nothing is added and no metric is computed.

    Returns:
        why the resume will not be exact, None when it will be.
    """
    monitors = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    if not monitors:
        return None
    metrics = trainer.callback_metrics
    state["metrics"] = {name: float(metrics[name]) for name in monitors if name in metrics}
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    before_validation = progress.completed == progress.processed - 1
    state["owes_step_update"] = before_validation  # a restart within a validation does it itself
    due = before_validation and trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    return (
        "saved right before a validation, which a restart leaves out although ReduceLROnPlateau needs its result"
        if due
        else None
    )


def settle_plateau(trainer: Any, state: dict[str, Any]) -> None:
    """Restores the saved metrics and does the ``ReduceLROnPlateau`` update that was due right after the save."""
    metrics = state.get("metrics")
    if not metrics:
        return
    trainer._logger_connector._callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    fit_loop = trainer.fit_loop
    if state["owes_step_update"] and _has_metrics(trainer):
        fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if getattr(fit_loop, "resumed_on_epoch_end", False) and _has_metrics(trainer):
        progress = fit_loop.epoch_progress.current
        progress.completed -= 1  # the restart already counts the epoch as done; the update belongs to it
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        progress.completed += 1


def end_restart(trainer: Any) -> None:
    """At the end of the restarted epoch: makes Lightning update the epoch's schedulers as in any other epoch.

    Otherwise it skips the update of ``ReduceLROnPlateau``, as if the metrics were unknown, and before 2.5 updates the
    other schedulers twice.
    """
    if _has_metrics(trainer):
        trainer.fit_loop._restarting = False


def _has_metrics(trainer: Any) -> bool:
    known = trainer._logger_connector._callback_metrics
    return all(config.monitor in known for config in trainer.lr_scheduler_configs if config.reduce_on_plateau)
