"""Makes and removes the library's own folder of a local tier, :data:`META_DIR` in the tier's folder. No torch.

It has a ``.gitignore`` that leaves out everything, as caches of other tools do, so ``git add checkpoints/`` takes the
files under the users' names and not the same bytes once more.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from resiliency.storage.manifest import META_DIR

__all__ = ["make_state_dir", "remove_state_dir"]

logger = logging.getLogger(__name__)

_GIT_IGNORE = ".gitignore"


def make_state_dir(directory: str) -> str:
    """Makes the library's own folder in a local tier's folder, if there is none, and returns it.

    Raises:
        OSError: it cannot be made.
    """
    path = os.path.join(directory, META_DIR)
    os.makedirs(path, exist_ok=True)
    _write_once(os.path.join(path, _GIT_IGNORE), "*\n")
    return path


def remove_state_dir(path: str) -> None:
    """Removes the folder if it holds no run; a job may begin in it meanwhile. Raises nothing for a folder that is gone
    or that must stay."""
    git_ignore, text = os.path.join(path, _GIT_IGNORE), None
    try:
        if os.listdir(path) == [_GIT_IGNORE]:
            with open(git_ignore, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
            os.unlink(git_ignore)
        os.rmdir(path)
    except OSError:  # it is gone, or holds more
        if text is not None and os.path.isdir(path):
            _write_once(git_ignore, text)  # a job has begun in it after the listing


def _write_once(path: str, text: str) -> None:
    """Nothing depends on the file, so an error is not raised."""
    try:
        with suppress(FileExistsError), open(path, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
