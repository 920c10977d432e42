"""Reads a compressed log up to where it is cut, because a host that dies while it compresses one leaves a part."""

from __future__ import annotations

import gzip
import io
import os
import zlib

__all__ = ["PackedLog"]


class PackedLog(io.BufferedIOBase):
    """The bytes of a gzip file, up to its end or to where it is cut or damaged.

    Attributes:
        damage: what is wrong with the rest; "" while nothing is.

    Raises:
        OSError: it cannot be opened. The first read raises it when it is no gzip file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = gzip.open(path, "rb")
        self._read = 0
        self.damage = ""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = float("inf") if size is None or size < 0 else size
        found = bytearray()
        while len(found) < wanted and not self.damage:
            try:
                # Not read(), which would lose what it had unpacked before it came to the damage.
                part = self._file.read1(int(min(wanted - len(found), io.DEFAULT_BUFFER_SIZE)))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                if isinstance(error, gzip.BadGzipFile) and not self._read:
                    raise
                self.damage = str(error)
                break
            if not part:
                break
            found += part
            self._read += len(part)
        return bytes(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes back to the start, the only place that a reader of logs needs; raises ``UnsupportedOperation`` for
        others."""
        if (offset, whence) != (0, io.SEEK_SET):
            raise io.UnsupportedOperation("a packed log is read from its start")
        self.damage = ""
        self._read = 0
        return self._file.seek(0)

    def close(self) -> None:
        self._file.close()
        super().close()
