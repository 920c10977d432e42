"""Moves the end of a file that several processes of a host have mapped.

A store behind the end of a file ends a process with SIGBUS. So a process that maps a file which others write too holds
a lock on its bytes, and only a process that gets the lock on all bytes behind the new end may cut the file there. Only
one process at a time makes a file longer: where the file system cannot allocate (some network and FUSE file systems),
the C library writes zeros, which must not overwrite what another process has stored.

The locks belong to the open file, not to the process: they end with its last descriptor and mapping. On a file system
without locks a file is never made shorter, because another process could have mapped it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["cut", "hold", "lengthen"]

logger = logging.getLogger(__name__)

#: An offset beyond the end of any file. The process that extends the file holds a lock on this byte.
_GROWING = 1 << 62
NO_LOCKS = (errno.ENOLCK, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
#: Seconds between two tries: the kernel cannot wait for a lock with a deadline.
_LOOK_S = 0.01


def _try_lock(fd: int, kind: int, start: int, length: int) -> bool | None:
    """Takes or releases a lock of the open file. Returns False when another process holds one there, and None when the
    file system has no locks."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def _lock(fd: int, kind: int, start: int, length: int, wait_s: float) -> bool | None:
    """As :func:`_try_lock`, but tries until the deadline."""
    deadline, pause = time.monotonic() + wait_s, threading.Event()
    while (got := _try_lock(fd, kind, start, length)) is False and time.monotonic() < deadline:
        pause.wait(_LOOK_S)
    return got


def hold(fd: int, nbytes: int, *, wait_s: float = 10.0) -> None:
    """Keeps others from cutting the first ``nbytes`` bytes as long as this open file or a mapping of it exists.

    Call it before you look at the length. Blocks: while another process cuts the file, up to ``wait_s``.

    Raises:
        OSError: another process took longer.
    """
    if _lock(fd, fcntl.F_RDLCK, 0, nbytes, wait_s) is False:
        raise OSError(errno.EBUSY, "another process of this host has been cutting the file for too long")


def cut(fd: int, nbytes: int, *, wait_s: float = 10.0) -> bool:
    """Cuts the file to ``nbytes`` bytes. Blocks: while others hold bytes behind that, up to ``wait_s``.

    Returns:
        False, and the file is unchanged, when others still hold bytes, or when the file system has no locks to tell.
    """
    if os.fstat(fd).st_size <= nbytes:
        os.ftruncate(fd, nbytes)
        return True
    if not _lock(fd, fcntl.F_WRLCK, nbytes, _GROWING - nbytes, wait_s):
        return False
    try:
        os.ftruncate(fd, nbytes)
    finally:
        _try_lock(fd, fcntl.F_UNLCK, nbytes, _GROWING - nbytes)
    return True


@contextmanager
def _growing(fd: int, wait_s: float) -> Iterator[None]:
    if _lock(fd, fcntl.F_WRLCK, _GROWING, 1, wait_s) is False:
        raise OSError(errno.EBUSY, "another process of this host has been making the file longer for too long")
    try:
        yield
    finally:
        _try_lock(fd, fcntl.F_UNLCK, _GROWING, 1)


def lengthen(fd: int, nbytes: int, *, alone: bool, wait_s: float = 60.0) -> None:
    """Makes the file at least ``nbytes`` bytes long, with disk blocks for all of them. Blocks: while another process
    makes it longer, up to ``wait_s``.

    Args:
        alone: no other process opens this file, so that no lock is needed.

    Raises:
        OSError: the disk is full or failed, or another process took longer.
    """
    if alone:
        _allocate(fd, nbytes)
    else:
        with _growing(fd, wait_s):
            _allocate(fd, nbytes)


def _allocate(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size >= nbytes:
        return
    try:
        os.posix_fallocate(fd, size, nbytes - size)
    except OSError as error:
        # Some network and FUSE file systems cannot allocate ahead; there the server reports a full disk.
        if error.errno not in _CANNOT_ALLOCATE:
            raise
        os.ftruncate(fd, nbytes)
