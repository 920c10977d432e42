"""Reads and changes Lightning's count of an epoch's batches, for a job that restarts with another number of ranks.

Private attributes of Lightning used, reached from the trainer object: ``fit_loop`` (``epoch_loop``,
``epoch_progress``, ``_combined_loader``) and ``epoch_loop.batch_progress``. Everything here runs on the training
thread, on every rank, and is not collective.
"""

from __future__ import annotations

from typing import Any

from resiliency.plugins.resume.loop_repairs import begin_after_finished_epoch, has_stages
from resiliency.plugins.resume.rank_state import is_step_boundary

__all__ = ["begin_epoch", "data_parallel_ranks", "end_epoch", "move_to_batch", "place_in_epoch", "train_loaders"]


def data_parallel_ranks(trainer: Any) -> int:
    """Number of ranks that the data is divided among."""
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def train_loaders(trainer: Any) -> int:
    """Number of train loaders, in ``on_train_start``; 0 when there are none."""
    combined = trainer.fit_loop._combined_loader
    return 0 if combined is None else len(combined.flattened)


def place_in_epoch(trainer: Any) -> tuple[int, int] | None:
    """The epoch, and how many of its batches were trained on. Call it in the hooks at the end of a batch.

    None while gradients are accumulated, and in other hooks, because there Lightning's counts of epochs and of batches
    may belong to different epochs.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.processed != batches.completed + 1 or not is_step_boundary(trainer):
        return None
    return int(trainer.current_epoch), int(batches.processed)


def move_to_batch(trainer: Any, batch: int) -> None:
    """Sets Lightning's number of batches done to ``batch``, in a restored epoch that continues.

    Lightning's record of which hooks of the last batch have run stays as it was at the save. Call it before the loops
    start.
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    by = batch - current.processed
    for name in ("ready", "started", "processed", "completed"):  # completed may become -1; Lightning adds 1 later
        setattr(current, name, getattr(current, name) + by)
    if not has_stages(trainer.fit_loop.epoch_loop):
        current.completed = current.processed  # otherwise Lightning before 2.5 would train on the last batch again


def end_epoch(trainer: Any, batches: int) -> None:
    """Like :func:`move_to_batch`, after a save at the end of an epoch that has ``batches`` batches at this size."""
    move_to_batch(trainer, batches)
    begin_after_finished_epoch(trainer.fit_loop)


def begin_epoch(trainer: Any) -> None:
    """Makes Lightning count the epoch that begins as a new one. Call it in ``on_train_start``, after :func:`end_epoch`.

    After a save in ``on_train_batch_end`` of an epoch's last batch, Lightning takes the next epoch for the interrupted
    one. It would not count that epoch as begun, and after a restart within it would count its batches from 0.
    """
    fit_loop = trainer.fit_loop
    if has_stages(fit_loop.epoch_loop) and fit_loop.epoch_progress.current.ready == trainer.current_epoch:
        fit_loop.reset_restart_stage()
