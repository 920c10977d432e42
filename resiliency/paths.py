"""Paths as users write them: on a command line, in a settings file, in a variable."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["absolute_path"]


def absolute_path(text: str, folder: str = "") -> str:
    """Makes a path that a user has written absolute, so that it means the same in every process that it is passed to.

    ``~`` is expanded, too, because a shell leaves it alone in ``--flag=~/x``. ``..`` stays, because behind a symbolic
    link it does not lead back. "" and addresses (``gs://bucket``) are returned as they are.

    Args:
        folder: that a relative path starts from; "": the working directory.
    """
    if not text or "://" in text:
        return text
    return str(Path(folder, os.path.expanduser(text)).absolute())
