"""Writes checkpoints that the engine cannot store, in the way of the stock class: with ``torch.save``."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from typing import Any

from resiliency.errors import ConfigError
from resiliency.plugins import _lightning
from resiliency.state.structure import WithoutMemory
from resiliency.storage.tiers._keys import partial_name
from resiliency.storage.tiers.local import fsync_dir, fsync_file

__all__ = ["StockWriter"]

logger = logging.getLogger(__name__)


class StockWriter:
    """Saves states that the engine refuses, for one callback in one fit.

    A state may hold any object. ``torch.save`` can often store what the engine cannot. When it cannot either, the save
    is given up, because training must not end for it. The engine has already written the event of its refusal.

    Threads: training thread.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told: set[str] = set()
        self._lost: list[int] = []
        self._why = ""

    def write(self, state: dict[str, Any], paths: Sequence[str], refusal: Exception) -> bool:
        """Writes a state to these paths, on rank 0. Collective: no.

        Blocks: until the files are written, and in a folder fsynced, because files that they replace may be removed
        then.

        Args:
            refusal: the engine's exception.

        Returns:
            False when the state cannot be written; a warning says why. On ranks other than 0 mostly True, because rank
            0 writes.
        """
        step = self._trainer.global_step
        if isinstance(refusal, WithoutMemory):
            self._give_up(step, str(refusal), refusal)  # torch.load would refuse what torch.save writes
            return False
        if not self._trainer.is_global_zero:
            logger.info(
                "rank %d writes nothing for the checkpoint of step %d; rank 0 writes it with torch.save, because: %s",
                self._trainer.global_rank,
                step,
                refusal,
            )
            return True  # rank 0's engine refuses the state, too; rank 0 writes it, or warns
        try:
            self._write(state, paths)
        except Exception as failure:  # Boundary: a state may hold anything, and training outlives a save of it.
            self._give_up(step, f"{refusal}. torch.save cannot either: {type(failure).__name__}: {failure}", failure)
            return False
        self._tell(
            str(refusal),
            f"the checkpoint engine cannot store the state at step {step}: {refusal}. torch.save has written"
            f" {paths[0]}, as with the stock class: training waits for such saves, and they are not verified",
            refusal,
        )
        return True

    def _write(self, state: dict[str, Any], paths: Sequence[str]) -> None:
        first, *others = paths
        if "://" in first:
            for path in paths:
                _lightning.save_as_stock(self._trainer, state, path)
            return
        # Write beside the target and rename. If the name belongs to a step of the engine, that step's file must not be
        # written to, which a move from another file system would do.
        partial = os.path.join(os.path.dirname(first), partial_name())
        try:
            _lightning.save_as_stock(self._trainer, state, partial)
            fsync_file(partial)
            for path in others:
                copy = os.path.join(os.path.dirname(path), partial_name())
                os.makedirs(os.path.dirname(path), exist_ok=True)
                shutil.copyfile(partial, copy)
                fsync_file(copy)
                os.replace(copy, path)
                fsync_dir(os.path.dirname(path))
            os.replace(partial, first)
            fsync_dir(os.path.dirname(first))
        finally:
            if os.path.lexists(partial):
                os.unlink(partial)

    def _give_up(self, step: int, why: str, error: Exception) -> None:
        self._lost.append(step)
        self._why = why
        self._tell(why, f"no checkpoint at step {step}: {why}. Training goes on, the next save tries again", error)

    def _tell(self, kind: str, text: str, error: Exception) -> None:
        """Warns once for each reason, with a traceback unless it is a ConfigError, whose message says what to do."""
        level = logging.DEBUG if kind in self._told else logging.WARNING
        logger.log(level, "%s", text, exc_info=None if isinstance(error, ConfigError) else error)
        self._told.add(kind)

    def summarise(self) -> None:
        """Warns how many saves were given up, if more than one. Called at the end of the fit."""
        if len(self._lost) > 1:
            text = "%d saves, the last of step %d, were given up: %s"
            logger.warning(text, len(self._lost), self._lost[-1], self._why)
