"""Remembers which step a file is, so that a process that knows need not open the file to find out. No torch.

A step's file that the user's programs have opened is not used again (:mod:`resiliency.agent.reader_watch`), and the
kernel does not tell who opened a file. So an agent does not open the files that it has committed itself.
"""

from __future__ import annotations

import os
import stat

from resiliency.storage.shard_file import Identity

__all__ = ["recall", "remember"]

#: Most files remembered by a process; the oldest ones are forgotten.
_MOST = 4096
#: (device, inode, size, time of the last write) -> identity. A file that somebody has written into is another one.
_known: dict[tuple[int, int, int, int], Identity] = {}


def remember(path: str, identity: Identity) -> None:
    """Remembers what a file is. Call it when nothing of ours will be written to the file any more, and before it has a
    name under which a user could write into it. Thread: any. Blocks: for one ``stat``; a file that is not there is left
    out."""
    key = _key(path)
    if key is not None:
        _known[key] = identity
        while len(_known) > _MOST:
            _known.pop(next(iter(_known)), None)


def recall(path: str) -> Identity | None:
    """The identity of a remembered file under any of its names; None when the file must be opened to find out. Thread:
    any. Blocks: for one ``stat``."""
    key = _key(path)
    return None if key is None else _known.get(key)


def _key(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
