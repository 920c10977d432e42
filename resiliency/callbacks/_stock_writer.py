"""Writes the checkpoints that the engine cannot store as the stock class writes all of its own."""

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
    """Takes over the saves of a state that the engine refuses, for one callback in one fit.

    A state may hold anything. What the engine cannot store ``torch.save`` often can, and what neither can must not end
    the training: the save is given up. The engine has written the event of its refusal by then.

    Threads: training thread.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told: set[str] = set()
        self._lost: list[int] = []
        self._why = ""

    def write(self, state: dict[str, Any], paths: Sequence[str], refusal: Exception) -> bool:
        """Writes a state under these paths, on rank 0. Collective: no.

        Blocks: until the files are written, on a disk fsynced, as what they replace may go then.

        Args:
            refusal: why the engine cannot store the state.

        Returns:
            False when it cannot be written so either; that is said, and training goes on.
        """
        step = self._trainer.global_step
        if isinstance(refusal, WithoutMemory):
            self._give_up(step, str(refusal), refusal)  # torch.load would refuse what torch.save makes of it
            return False
        if not self._trainer.is_global_zero:
            logger.info(
                "rank %d has no part in the checkpoint of step %d: %s", self._trainer.global_rank, step, refusal
            )
            return True  # rank 0 refuses it too and writes it, or is told, and says that there is none
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
        # Beside the target and then in its place: where a name is one of our steps, its file must not be written to,
        # which a move from another file system would do.
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
        """Warns once of each reason, with a traceback unless the engine's words say what to do."""
        level = logging.DEBUG if kind in self._told else logging.WARNING
        logger.log(level, "%s", text, exc_info=None if isinstance(error, ConfigError) else error)
        self._told.add(kind)

    def summarise(self) -> None:
        """Says at the end how many saves were given up."""
        if len(self._lost) > 1:
            text = "%d saves, the last of step %d, were given up: %s"
            logger.warning(text, len(self._lost), self._lost[-1], self._why)
