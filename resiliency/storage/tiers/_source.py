"""The local file a tier is asked to store, read in blocks. Its errors name the file, not the tier."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO

from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers._os_errors import tier_error

__all__ = ["Source", "opened"]


def opened(path: str) -> BinaryIO:
    """The regular file at ``path`` for reading, left open.

    Blocks: not for a pipe, which would wait for a writer. Raises: OSError; IsADirectoryError, and FileNotFoundError for
    what is neither file nor folder (a pipe, a socket), which listings leave out too.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise FileNotFoundError(errno.ENOENT, "no regular file", path) from error
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise FileNotFoundError(errno.ENOENT, "no regular file", path)


class Source:
    """An open file. A context manager; thread: one at a time.

    Args:
        where: the tier, for messages.
        key: the key it is put under, for messages.

    Raises:
        TierError: the file cannot be opened.
    """

    def __init__(self, path: str, *, where: str, key: str) -> None:
        self._error = functools.partial(tier_error, where=where, action=f"read {path} to store", key=key, path=path)
        try:
            self._file = opened(path)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self, check: Callable[[bytes], None] | None) -> Iterator[bytes]:
        """Blocks of ``BLOCK_BYTES`` in file order (the last may be shorter), each passed to ``check`` first.

        Raises:
            TierError: the file cannot be read; what ``check`` raises is not changed.
        """
        while True:
            try:
                block = self._file.read(BLOCK_BYTES)
            except OSError as error:
                raise self._error(error) from error
            if not block:
                return
            if check is not None:
                check(block)
            yield block
            del block
