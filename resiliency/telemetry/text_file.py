"""Writes a text file that no reader ever sees a part of."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["replace_text"]


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a temp file beside ``path`` and renames it. Blocks: for the write.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    draft = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
