"""Repairs what Lightning's loops lose at a restart, apart from random generators and data loaders.

Each function says which loss it repairs and where it is called. All run on the training thread, on every rank. They use
only attributes of the trainer object; when a version of Lightning lacks one, the repair does nothing. Versions before
2.5 do not know at which hook of a step a checkpoint was saved, and run the last validation again; a save warns of what
cannot be repaired with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from resiliency.plugins._lightning import module_overrides

__all__ = [
    "begin_after_finished_epoch",
    "continue_epoch",
    "count_saved_batch",
    "end_restart",
    "finish_saved_batch",
    "has_stages",
    "is_between_batches",
    "is_within_validation",
    "keep_epoch_open",
    "leaves_out_after_save",
    "note_plateau",
    "repeats_validation",
    "settle_plateau",
    "validates_at_restart",
]


def has_stages(epoch_loop: Any) -> bool:
    """True when Lightning (since 2.5) knows at which hook of a step a checkpoint was saved."""
    return hasattr(epoch_loop, "restarted_on_train_batch_end")


def _saved_at_batch_end(epoch_loop: Any) -> bool:
    current = epoch_loop.batch_progress.current
    return bool(current.ready == current.processed == current.completed + 1)


def is_between_batches(trainer: Any) -> bool:
    """True in ``on_exception`` when the last batch was finished, including its validation and its schedulers."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    epoch = trainer.fit_loop.epoch_progress.current
    return bool(
        trainer.state.status == "interrupted"
        and trainer.training
        and progress.ready == progress.completed > 0
        and epoch.ready > epoch.processed
    )


def is_within_validation(trainer: Any) -> bool:
    """True in ``on_exception`` when a validation within training has begun but not ended."""
    return bool(trainer.validating and trainer._logger_connector._first_loop_iter is not None)


def repeats_validation(trainer: Any) -> bool:
    """True when a restart from this save will run the last validation again: with Lightning before 2.5, at a save in
    ``on_validation_end`` or at the end of the epoch."""
    epoch = trainer.fit_loop.epoch_progress.current
    over = trainer.validating or epoch.processed > epoch.completed
    return bool(over and not has_stages(trainer.fit_loop.epoch_loop) and not is_within_validation(trainer))


def validates_at_restart(trainer: Any) -> bool:
    """True when the validation that starts may be one that Lightning before 2.5 runs because of a restart.

    Also makes that version run all batches of it; it would run only those that its restored counters leave. Called
    right before a validation.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if has_stages(epoch_loop) or trainer.sanity_checking:
        return False
    epoch_loop.val_loop.restarting = False
    return True


def leaves_out_after_save(trainer: Any) -> str | None:
    """A sentence that says what a restart from a save at this moment leaves out or repeats; None when nothing.

    An exception in an ``on_train_batch_end`` prevents the remaining hooks of that name, and a restart continues after
    them. The module's ``on_validation_end`` runs after that of the callbacks, so after the save. With ``max_steps``
    Lightning before 2.5 does not know at a restart that an epoch was over.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if is_within_validation(trainer):
        begun = [
            hook for hook in ("on_validation_start", "on_validation_epoch_start") if module_overrides(trainer, hook)
        ]
        if begun:
            return f"saved in the middle of a validation: a restart runs all of it, so the module's {begun[0]} again"
        return None
    if trainer.validating and module_overrides(trainer, "on_validation_end"):
        return "saved before the module's own on_validation_end, which a restart does not run"
    if _saved_at_batch_end(epoch_loop) and trainer.state.status == "interrupted":
        return "saved after an exception in on_train_batch_end, whose remaining hooks a restart does not run"
    epoch = trainer.fit_loop.epoch_progress.current
    over = epoch.processed > epoch.completed
    if over and not has_stages(epoch_loop) and trainer.fit_loop._iteration_based_training():
        return "saved at the end of an epoch of a training by steps, which Lightning before 2.5 runs and logs again"
    return None


def begin_after_finished_epoch(fit_loop: Any) -> None:
    """After a save in ``on_train_epoch_end``, makes Lightning begin a new epoch. Called before ``fit_loop.reset``.

    Otherwise Lightning with ``max_steps`` goes through the end of the saved epoch once more. Its hooks run twice, so
    that ``EarlyStopping`` counts the epoch twice.
    """
    if not (has_stages(fit_loop.epoch_loop) and fit_loop.restarting):
        return
    total = fit_loop.epoch_progress.total
    if total.ready == total.started == total.processed == total.completed + 1:
        fit_loop._restarting = False
        fit_loop.epoch_loop.restarting = False


def keep_epoch_open(fit_loop: Any, reset: Callable[[], None]) -> None:
    """Calls ``reset``, Lightning's ``fit_loop.reset``, and keeps the epoch unfinished after a save in
    ``on_train_batch_end`` of the epoch's last batch.

    Otherwise Lightning counts that epoch as done and leaves out its end: validation, ``on_train_epoch_end``, metrics.
    """
    epoch_loop, progress = fit_loop.epoch_loop, fit_loop.epoch_progress
    unfinished = has_stages(epoch_loop) and epoch_loop.restarting and _saved_at_batch_end(epoch_loop)
    before = copy.deepcopy(progress.state_dict()) if unfinished else None
    reset()
    if before is not None:
        progress.load_state_dict(before)


def finish_saved_batch(trainer: Any, data_fetcher: Any, *, between_batches: bool, within_validation: bool) -> bool:
    """Finishes the batch of the save: does what Lightning leaves out, repeats or does only in part at a restart.

    - After a save in ``on_train_batch_end``, Lightning leaves out what follows that hook, such as a validation that was
      due. It is done here.
    - After a save between two batches nothing is left to do. Lightning would repeat the update of
      ``ReduceLROnPlateau`` that follows a validation; this is prevented.
    - When an exception ended a validation, all of it is run here. Lightning would run only the rest of it, or nothing,
      and its metrics would miss the batches before.

    Call it right before the epoch continues. Afterwards either the epoch is over (``epoch_loop.done``), or call
    :func:`continue_epoch` at the loop's ``on_run_start``.

    Returns:
        True when the save was one of these.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    inside = _saved_at_batch_end(epoch_loop)
    if not (has_stages(epoch_loop) and epoch_loop.restarting and (inside or between_batches or within_validation)):
        return False
    epoch_loop.restarting = False
    epoch_loop.reset_restart_stage()
    epoch_loop.val_loop.reset_restart_stage()
    if inside:
        epoch_loop.batch_progress.increment_completed()
    if inside or within_validation:
        epoch_loop.on_advance_end(data_fetcher)
        epoch_loop.on_iteration_done()
    if not epoch_loop.done:
        # The loop's reset at a restart within an epoch counts this batch's step for the loggers once more.
        epoch_loop._restarting = True
        if not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1
    return True


def continue_epoch(epoch_loop: Any) -> None:
    """Tells the loop that the restart is over. Called after :func:`finish_saved_batch`, when the loop was reset."""
    epoch_loop.restarting = False


def count_saved_batch(fit_loop: Any) -> None:
    """After a save in ``on_train_batch_end``, counts that batch as done, so that it is not trained on again.

    Needed only for Lightning before 2.5; for later versions :func:`finish_saved_batch` does it.
    """
    epoch_loop = fit_loop.epoch_loop
    if not has_stages(epoch_loop) and epoch_loop.restarting and _saved_at_batch_end(epoch_loop):
        epoch_loop.batch_progress.increment_completed()
        validates = epoch_loop._should_check_val_fx(fit_loop._data_fetcher)  # if so, Lightning counts the step itself
        if not validates and not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped += 1  # the step number that loggers get


def note_plateau(trainer: Any, state: dict[str, Any]) -> None:
    """Adds to ``state`` whether ``ReduceLROnPlateau`` schedulers, by step and by epoch, must still be updated for the
    batch and the epoch of the save."""
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        state["owes_step_update"] = _saved_at_batch_end(trainer.fit_loop.epoch_loop)
        epoch = trainer.fit_loop.epoch_progress.current
        state["owes_epoch_update"] = bool(epoch.processed > epoch.completed)


def settle_plateau(trainer: Any, state: dict[str, Any]) -> None:
    """Does the ``ReduceLROnPlateau`` update that was due right after the save. Call it after metrics are restored."""
    if "owes_step_update" not in state or not _has_metrics(trainer):
        return
    fit_loop = trainer.fit_loop
    if state["owes_step_update"] and not has_stages(fit_loop.epoch_loop):
        fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    # Before 2.5, a restart goes through the end of the epoch once more with max_steps, but not with max_epochs.
    old = not has_stages(fit_loop.epoch_loop) and not fit_loop._iteration_based_training()
    if getattr(fit_loop, "resumed_on_epoch_end", False) or (old and state.get("owes_epoch_update")):
        progress = fit_loop.epoch_progress.current
        progress.completed -= 1  # the restart already counts the epoch as done; the update belongs to it
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        progress.completed += 1


def end_restart(trainer: Any, *, metrics_restored: bool) -> None:
    """Makes Lightning update the epoch's schedulers as in any other epoch. Called at the end of the restarted epoch.

    Otherwise Lightning skips the update of ``ReduceLROnPlateau``, as if the metrics were unknown, and before 2.5
    updates the other schedulers twice. Does nothing when a monitored metric is really unknown, because then the update
    would end training.
    """
    if metrics_restored or _has_metrics(trainer):
        trainer.fit_loop._restarting = False


def _has_metrics(trainer: Any) -> bool:
    known = trainer._logger_connector._callback_metrics
    return all(config.monitor in known for config in trainer.lr_scheduler_configs if config.reduce_on_plateau)
