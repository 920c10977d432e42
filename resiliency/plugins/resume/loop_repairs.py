"""Repairs what Lightning's loops lose at a restart, beyond random number generators and data loaders.

Each function says which loss it repairs. All run on the thread that trains, on every rank, during the first
``on_advance_start`` after a restart (loops restored, ``fit_loop.reset`` done) or at the end of the first epoch.
Written against the trainer object alone; names that a version of Lightning lacks make the repair a no-op.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["begin_epoch_after_last_batch", "count_saved_batch", "end_restart", "note_plateau", "settle_plateau"]


def begin_epoch_after_last_batch(fit_loop: Any) -> None:
    """After a save in ``on_train_batch_end`` of the last batch of an epoch: begin the next epoch as a new one.

    ``fit_loop`` counts the saved epoch as done, but continues as if in the middle of one: it leaves out
    ``on_train_epoch_start``, and for loaders without length the whole next epoch.
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
    """After a save in ``on_train_batch_end``: that batch is done and is not trained on again.

    Lightning before 2.5 trains on it again; later versions do when a step of an earlier epoch found no more batches
    (``training_step(dataloader_iter)`` without length).
    """
    epoch_loop = fit_loop.epoch_loop
    if getattr(epoch_loop, "restarted_on_train_batch_end", False) or not epoch_loop.restarting:
        return
    current = epoch_loop.batch_progress.current
    if current.ready == current.processed == current.completed + 1:
        epoch_loop.batch_progress.increment_completed()


def note_plateau(trainer: Any, state: dict[str, Any]) -> str | None:
    """Records what ``ReduceLROnPlateau`` will need: its metrics and which update is still due.

    Lightning updates these schedulers after the hooks in which checkpoints are saved, from metrics it does not save.
    Does nothing, and computes no metric, when there is no such scheduler.

    Returns:
        what will not be exact, in words; None when all will be.
    """
    monitors = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    if not monitors:
        return None
    metrics = trainer.callback_metrics
    state["metrics"] = {name: float(metrics[name]) for name in monitors if name in metrics}
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    before_validation = progress.completed == progress.processed - 1
    state["owes_step_update"] = before_validation  # a restart from within a validation does this update itself
    due = before_validation and trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    return (
        "saved right before a validation, which a restart leaves out, and ReduceLROnPlateau wants its result"
        if due
        else None
    )


def settle_plateau(trainer: Any, state: dict[str, Any]) -> None:
    """Puts the saved metrics back and makes the update of ``ReduceLROnPlateau`` that was due right after the save."""
    metrics = state.get("metrics")
    if not metrics:
        return
    trainer._logger_connector._callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    fit_loop = trainer.fit_loop
    if state["owes_step_update"] and _has_metrics(trainer):
        fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if getattr(fit_loop, "resumed_on_epoch_end", False) and _has_metrics(trainer):
        progress = fit_loop.epoch_progress.current
        progress.completed -= 1  # the restart counts it as done already; the update belongs to the previous epoch
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        progress.completed += 1


def end_restart(trainer: Any) -> None:
    """At the end of the restarted epoch: have the schedulers updated as at the end of any other.

    Otherwise Lightning skips the update of ``ReduceLROnPlateau``, as if its metrics were unknown, and before 2.5
    updates the other schedulers twice.
    """
    if _has_metrics(trainer):
        trainer.fit_loop._restarting = False


def _has_metrics(trainer: Any) -> bool:
    known = trainer._logger_connector._callback_metrics
    return all(config.monitor in known for config in trainer.lr_scheduler_configs if config.reduce_on_plateau)
