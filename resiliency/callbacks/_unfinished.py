"""Markers of the guide's library: an empty file ``step=5-unfinished`` beside a checkpoint that is being written.

The engine needs none, because a step of its own exists once it is committed. Scripts that write or delete checkpoints
by themselves use them, and :func:`resiliency.plugins._ckpt_utils.find_latest_checkpoint_path` minds them.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from resiliency.callbacks._names import is_stock
from resiliency.plugins._ckpt_utils import UNFINISHED_CHECKPOINT_SUFFIX, unfinished_marker_path

__all__ = ["UnfinishedMarkers"]

logger = logging.getLogger(__name__)


class UnfinishedMarkers:
    """The static methods of ``ModelCheckpoint``. With a barrier they are collective, where there is a process group;
    it ends after the group's timeout."""

    UNFINISHED_CHECKPOINT_SUFFIX = UNFINISHED_CHECKPOINT_SUFFIX

    @staticmethod
    def format_checkpoint_unfinished_marker_path(checkpoint_path: str | os.PathLike[str]) -> Path:
        """The marker's path: ``a/step=5-unfinished`` for ``a/step=5.ckpt``, ``a/step=5`` and ``a/step=5-EMA.ckpt``."""
        return unfinished_marker_path(checkpoint_path)

    @staticmethod
    def is_checkpoint_unfinished(checkpoint_path: str | os.PathLike[str]) -> bool:
        """True when the marker is there."""
        return unfinished_marker_path(checkpoint_path).exists()

    @staticmethod
    def set_checkpoint_unfinished_marker(
        checkpoint_path: str | os.PathLike[str], barrier_after: bool = False, is_checkpoint_file_handler: bool = True
    ) -> None:
        """Makes the marker, on ranks that handle files; it is on the disk when this returns.

        Collective: with ``barrier_after``. Raises: OSError.
        """
        if is_checkpoint_file_handler:
            marker = unfinished_marker_path(checkpoint_path)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
            _flush(marker.parent)
        if barrier_after:
            _barrier()

    @staticmethod
    def remove_checkpoint_unfinished_marker(
        checkpoint_path: str | os.PathLike[str], barrier_before: bool = False, is_checkpoint_file_handler: bool = True
    ) -> None:
        """Removes the marker, on ranks that handle files; nothing happens when there is none.

        Collective: with ``barrier_before``. Raises: OSError; RuntimeError, with the marker left, when a rank is missing
        at the barrier.
        """
        if barrier_before:
            _barrier()
        if is_checkpoint_file_handler:
            unfinished_marker_path(checkpoint_path).unlink(missing_ok=True)

    @staticmethod
    def _remove_unfinished_checkpoints(
        checkpoint_dir: str | os.PathLike[str], is_checkpoint_file_handler: bool = True
    ) -> None:
        """Deletes the checkpoints with a marker that lie directly in a folder, then their markers.

        Checkpoints of this library are left: whether they are whole does not depend on a marker. What other ranks
        delete at the same time is not missed.
        """
        folder = Path(checkpoint_dir)
        if not is_checkpoint_file_handler or not folder.is_dir():
            return
        markers = sorted(folder.glob("*" + UNFINISHED_CHECKPOINT_SUFFIX))
        marked = {marker: [path for path in folder.iterdir() if _is_of(path, marker)] for marker in markers}
        for marker, paths in marked.items():
            for path in paths:
                if not is_stock(str(path)):
                    logger.warning("%s is kept though %s is there: the engine says itself what is whole", path, marker)
                    continue
                logger.warning("%s is deleted, because %s says that it is unfinished", path, marker)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)  # also by another host at this moment
                else:
                    path.unlink(missing_ok=True)
                if os.path.lexists(path):
                    logger.warning("%s could not be deleted whole; %s stays", path, marker)
                    break
            else:
                marker.unlink(missing_ok=True)  # last: until then what is left counts as unfinished


def _is_of(path: Path, marker: Path) -> bool:
    return path != marker and not path.name.startswith(".") and unfinished_marker_path(path) == marker


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _flush(folder: Path) -> None:
    """Makes a new name in a folder survive a power loss."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
