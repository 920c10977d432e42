"""Reads, in blocks, the local file that a tier must store. Its errors name the file, not the tier."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

from resiliency.regular_file import open_own
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers._os_errors import tier_error

__all__ = ["Source"]


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
            self._file = os.fdopen(open_own(path), "rb")
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Size of the file now."""
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, buffer: memoryview) -> int:
        """Fills the buffer with the next bytes. Returns their number, which is below the buffer's size only at the
        file's end.

        Raises:
            TierError: the file cannot be read.
        """
        try:
            return self._file.readinto(buffer)
        except OSError as error:
            raise self._error(error) from error

    def blocks(self, check: Callable[[bytes | memoryview], None] | None) -> Iterator[bytes]:
        """Blocks of ``BLOCK_BYTES`` in file order (the last may be shorter), each passed to ``check`` first.

        Raises:
            TierError: the file cannot be read. Exceptions of ``check`` are passed on unchanged.
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
