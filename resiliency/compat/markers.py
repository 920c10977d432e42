"""The older library's markers: an empty file ``step=5-unfinished`` beside a checkpoint that a script writes or deletes.

The engine needs none, because its checkpoints get their names only when they are committed.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from resiliency.storage.stock import is_stock

__all__ = ["CONTEXT_SUFFIX", "UNFINISHED_CHECKPOINT_SUFFIX", "UnfinishedMarkers", "unfinished_marker_path"]

logger = logging.getLogger(__name__)

UNFINISHED_CHECKPOINT_SUFFIX = "-unfinished"
#: Suffix of the folder beside a checkpoint that describes the training.
CONTEXT_SUFFIX = "-context"


def unfinished_marker_path(checkpoint: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint's marker: ``a/step=5-unfinished`` for ``a/step=5.ckpt`` and for ``a/step=5``."""
    path = Path(checkpoint)
    name = path.name.removesuffix(".ckpt").removesuffix("-EMA")
    return path.with_name(name + UNFINISHED_CHECKPOINT_SUFFIX)


class UnfinishedMarkers:
    """Static methods of ``ModelCheckpoint`` that handle markers. With a barrier they are collective if a process group
    exists, and block up to the group's timeout."""

    UNFINISHED_CHECKPOINT_SUFFIX = UNFINISHED_CHECKPOINT_SUFFIX

    @staticmethod
    def format_checkpoint_unfinished_marker_path(checkpoint_path: str | os.PathLike[str]) -> Path:
        """The marker's path: ``a/step=5-unfinished`` for ``a/step=5.ckpt``, ``a/step=5`` and ``a/step=5-EMA.ckpt``."""
        return unfinished_marker_path(checkpoint_path)

    @staticmethod
    def is_checkpoint_unfinished(checkpoint_path: str | os.PathLike[str]) -> bool:
        """True when the checkpoint has a marker."""
        return unfinished_marker_path(checkpoint_path).exists()

    @staticmethod
    def set_checkpoint_unfinished_marker(
        checkpoint_path: str | os.PathLike[str], barrier_after: bool = False, is_checkpoint_file_handler: bool = True
    ) -> None:
        """Creates the marker if ``is_checkpoint_file_handler``; it is on the disk when this returns.

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
        """Removes the marker, if it exists and ``is_checkpoint_file_handler``.

        Collective: with ``barrier_before``. Raises: OSError; RuntimeError when a rank is missing at the barrier (the
        marker is then left).
        """
        if barrier_before:
            _barrier()
        if is_checkpoint_file_handler:
            unfinished_marker_path(checkpoint_path).unlink(missing_ok=True)

    @staticmethod
    def _remove_unfinished_checkpoints(
        checkpoint_dir: str | os.PathLike[str], is_checkpoint_file_handler: bool = True
    ) -> None:
        """Deletes the checkpoints directly in a folder that have a marker, then the markers.

        Checkpoints of this library are kept, because a marker says nothing about them. Other ranks may delete the same
        files at the same time.
        """
        folder = Path(checkpoint_dir)
        if not is_checkpoint_file_handler or not folder.is_dir():
            return
        markers = sorted(folder.glob("*" + UNFINISHED_CHECKPOINT_SUFFIX))
        marked = {marker: [path for path in folder.iterdir() if _is_of(path, marker)] for marker in markers}
        for marker, paths in marked.items():
            for path in paths:
                if not is_stock(str(path)):
                    logger.warning(
                        "%s is kept despite the marker %s: this library wrote it, and its manifest is what counts",
                        path,
                        marker,
                    )
                    continue
                logger.warning("%s is deleted, because %s says that it is unfinished", path, marker)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)  # another host may delete it at this moment, too
                else:
                    path.unlink(missing_ok=True)
                if os.path.lexists(path):
                    logger.warning("%s could not be deleted whole; %s stays", path, marker)
                    break
            else:
                marker.unlink(missing_ok=True)  # last, so that a checkpoint deleted in part counts as unfinished


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
