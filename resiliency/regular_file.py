"""Opens regular files only: opening a fifo in place of a file would hang, and reading a device would never end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

__all__ = ["NotAFile", "open_own", "open_regular", "opened"]

_KINDS = {
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "folder",
}


class NotAFile(OSError):
    """Something other than a regular file is where a file belongs."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"a {kind} stands where a file belongs", path)


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Like ``os.open``, for regular files only. Never blocks on anything that is not a regular file.

    Raises:
        IsADirectoryError: the path is a folder.
        NotAFile: the path is a fifo, a socket or a device.
        OSError: as ``open(2)``.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a fifo that nobody reads
            raise NotAFile(path, "fifo or a socket") from error
        raise
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(kind):
            raise NotAFile(path, _KINDS.get(stat.S_IFMT(kind), "special file"))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own(path: str) -> int:
    """Opens a file of this library's to read it, for writing too where that is allowed: a program that has only read a
    file is taken for one of the user's (:mod:`resiliency.agent.reader_watch`).

    Raises:
        OSError: as :func:`open_regular`.
    """
    try:
        return open_regular(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY):
            raise
        return open_regular(path)


def opened(path: str) -> BufferedReader:
    """Opens ``path`` for reading; the caller closes it.

    Raises:
        OSError: as :func:`open_regular`.
    """
    return os.fdopen(open_regular(path), "rb")
