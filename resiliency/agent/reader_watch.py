"""Notices which files somebody has opened for reading, also those that were closed again.

A program that sends a file with ``sendfile`` or ``splice`` puts the file's own pages into a socket or a pipe, and may
close the file before they are read there. Whoever then writes into the file changes what arrives. The kernel does not
tell where pages are, but it reports each close of a file that was open for reading only (inotify, IN_CLOSE_NOWRITE),
and does so before a lease could show that nobody has the file open. So a file that was watched from before it had a
name, of which no such close was reported and on which there is a lease, was never open in a reader.

Programs of this library open step files for writing too where they can, or do not open them at all
(:mod:`resiliency.storage.known_files`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import threading

__all__ = ["ReaderWatch"]

logger = logging.getLogger(__name__)

_IN_CLOSE_NOWRITE, _IN_Q_OVERFLOW, _IN_IGNORED = 0x10, 0x4000, 0x8000
_IN_DONT_FOLLOW = 0x02000000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_libc = ctypes.CDLL(None, use_errno=True)


class ReaderWatch:
    """Watches files. Thread: any. Where the kernel refuses a watch, each file counts as read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._watches: dict[tuple[int, int], int] = {}  # (device, inode) -> watch
        self._read: set[int] = set()

    def watch(self, path: str) -> None:
        """Begins to watch a file; what happened before does not count. Call it before the file has a name that users
        see."""
        with self._lock:
            try:
                if self._fd < 0:
                    self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), path)
                self._take_events()
                number = _checked(
                    _libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_CLOSE_NOWRITE | _IN_DONT_FOLLOW), path
                )
                found = os.lstat(path)
            except OSError as error:  # a limit of the user (fs.inotify), or a sandbox
                logger.debug("readers of %s are not noticed: %s", path, error)
                return
            self._watches[found.st_dev, found.st_ino] = number
            self._read.discard(number)

    def was_read(self, path: str) -> bool:
        """True when a reader has closed the file since :meth:`watch`, or when that is unknown.

        Raises:
            OSError: there is no such file.
        """
        found = os.lstat(path)
        with self._lock:
            self._take_events()
            number = self._watches.get((found.st_dev, found.st_ino))
            return number is None or number in self._read

    def close(self) -> None:
        """Ends all watches. Idempotent."""
        with self._lock:
            self._watches.clear()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _take_events(self) -> None:
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & _IN_Q_OVERFLOW:
                    self._read.update(self._watches.values())
                elif mask & _IN_IGNORED:  # the file was deleted; its numbers may become another file's
                    self._watches = {file: other for file, other in self._watches.items() if other != number}
                    self._read.discard(number)
                else:
                    self._read.add(number)


def _checked(result: int, path: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code or errno.EIO), path)
    return result
