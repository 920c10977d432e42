"""Files that several processes use: moves without loss, and the proof that no process has a file open.

A process that has opened a shard file reads the content that it opened, and a writer that was stopped and revived holds
a file that is its own or no step's: a file is used again only with the kernel's proof that no process has it open or
mapped, and if no process has read it, whose pages might still be in a pipe or a socket
(:mod:`resiliency.agent.reader_watch`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
from contextlib import suppress

from resiliency.regular_file import open_regular

__all__ = ["is_ours_alone", "move_without_replacing", "write_zeros"]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_F_SETLEASE = 1024  # Linux; not in the fcntl module of every Python we support


def move_without_replacing(source: str, target: str) -> bool:
    """Renames a file atomically, unless ``target`` exists.

    Returns:
        False when ``target`` exists, ``source`` is gone, or the file system cannot do this (some network and FUSE file
        systems).

    Raises:
        OSError: any other failure.
    """
    if not hasattr(_libc, "renameat2"):  # a libc other than glibc 2.28 or later
        return False
    if _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EEXIST, errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), target)


#: The largest page of x86-64 and of arm64 with 4 KiB base pages.
_HUGE = 2 * 1024 * 1024
_ZEROS = bytes(_HUGE)


def write_zeros(fd: int, start: int, end: int, *, in_memory: bool = False) -> None:
    """Fills bytes ``[start, end)`` of a file with zeros, so that its pages are in memory, huge ones where the file
    system has them. ``start`` must be a multiple of 2 MiB.

    Blocks: about half a second per GiB the first time, for allocating the memory.

    Args:
        in_memory: the file is on a ramdisk, whose kernel code makes the pages faster than writes do.

    Raises:
        OSError: the disk is full or failed.
    """
    if in_memory:
        os.posix_fallocate(fd, start, end - start)
        return
    at = start
    while at < end:
        at += os.pwrite(fd, memoryview(_ZEROS)[: min(_HUGE - at % _HUGE, end - at)], at)


def is_ours_alone(path: str) -> bool:
    """True when the file has one name and no process has it open or mapped; False when one has, or when unknown.

    The kernel grants a write lease only on such a file; it counts mappings whose descriptor was closed, and processes
    that were stopped. A process that opens the file later does so by this one name. The kernel does not count processes
    on other hosts, and FUSE file systems grant leases too (fs/locks.c, generic_setlease): call this only where
    :func:`~resiliency.storage.tiers.local.used_by_this_host_only` is True.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_nlink != 1:
            return False
        try:
            # When a process opens the file now, the kernel signals the holder of the lease, by default with a signal
            # that ends the process. SIGURG is ignored unless it has a handler.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False  # the file is open somewhere, it is another user's, or the file system has no leases
        with suppress(OSError):
            fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_UNLCK)
        return True
    finally:
        os.close(fd)
