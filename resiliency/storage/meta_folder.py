"""Keeps git away from the engine's folder ``.resiliency``, and removes the folder when nothing else is in it. No torch.

As caches of other tools do, the folder holds a ``.gitignore`` that leaves out everything, so ``git add checkpoints/``
takes the files under the users' names and not the same bytes once more.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

__all__ = ["ignore_in_git", "remove_meta_folder"]

logger = logging.getLogger(__name__)

_GIT_IGNORE = ".gitignore"


def ignore_in_git(meta: str) -> None:
    """Writes ``.gitignore`` into the folder unless it is there. Blocks: for one small file; never raises OSError,
    because nothing depends on it."""
    try:
        with suppress(FileExistsError), open(os.path.join(meta, _GIT_IGNORE), "x", encoding="ascii") as file:
            file.write("*\n")
    except OSError as error:
        logger.debug("%s is not left out of git: %s", meta, error)


def remove_meta_folder(meta: str) -> None:
    """Removes the folder if it holds nothing but ``.gitignore``; a job may begin in it meanwhile. Raises nothing for a
    folder that is gone or that must stay."""
    removed = False
    try:
        if os.listdir(meta) == [_GIT_IGNORE]:
            os.unlink(os.path.join(meta, _GIT_IGNORE))
            removed = True
        os.rmdir(meta)
    except OSError:  # it is gone, or holds more
        if removed and os.path.isdir(meta):
            ignore_in_git(meta)  # a job has begun in it after the look
