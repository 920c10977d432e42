"""Checks folders that ranks and agents write to: that they have room, and that a write reaches the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

from resiliency.monitor.watchdogs.base import Finding, Watchdog

__all__ = ["DiskWatchdog"]

_PROBE_BYTES = 4096
#: Errors that mean a lack of room.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskWatchdog(Watchdog):
    """Writes and syncs a small file in each folder, and reads its free bytes. A disk that hangs makes the look late,
    which a check of the host reports.

    Args:
        folders: must exist and be writable.
        min_free_bytes: that this user must have free in each.
    """

    name = "disk"
    interval_s = 30.0
    deadline_s = 10.0
    cooldown_s = 600.0

    def __init__(self, folders: Sequence[str], *, min_free_bytes: int = 1 << 30) -> None:
        self._folders, self._min_free = tuple(folders), min_free_bytes

    def look(self) -> list[Finding]:
        return [finding for folder in self._folders for finding in self._look(folder)]

    def _look(self, folder: str) -> list[Finding]:
        try:
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if free < self._min_free:
                detail = f"{folder} has {free / 2**30:.2f} GB free, and {self._min_free / 2**30:.2f} are needed"
                return [Finding(code=f"full {folder}", detail=detail)]
            self._probe(folder)
        except OSError as error:
            code = "full" if error.errno in _FULL else "unwritable"
            return [Finding(code=f"{code} {folder}", detail=f"{folder} cannot be written: {error.strerror}")]
        return []

    @staticmethod
    def _probe(folder: str) -> None:
        path = os.path.join(folder, f".resiliency-probe-{os.getpid()}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"\0" * _PROBE_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(path)
