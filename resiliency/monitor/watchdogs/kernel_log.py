"""Reads each line of the kernel's log once: from the kernel's own ring, from a file, or from the journal.

Each source has a cursor, a text with which another process continues where this one has stopped.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from typing import Any, Protocol

from resiliency.monitor.state import boot_id

__all__ = ["FileLog", "Journal", "KernelLog", "Ring", "has_kernels_pids", "open_kernel_log"]

logger = logging.getLogger(__name__)

RING = "/dev/kmsg"
#: A record of the ring is at most this long, see the kernel's Documentation/ABI/testing/dev-kmsg.
_RECORD_BYTES = 8192
_CHUNK_BYTES = 1 << 20
#: The first pid namespace, PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h.
_FIRST_PIDS = f"pid:[{0xEFFFFFFC}]"
_MOST_RECORDS = 100_000
_JOURNAL_TIMEOUT_S = 8.0
_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
_CURSOR = re.compile(rb'"__CURSOR"\s*:\s*"([^"\\]+)"')


class KernelLog(Protocol):
    """A source of lines. Thread: one."""

    def resume(self, cursor: str) -> None:
        """Continues after the cursor; "": with lines that come from now on."""

    def lines(self) -> Iterator[str]:
        """The lines that have come since. Blocks: no."""

    def cursor(self) -> str:
        """The position after the last line that was returned."""

    def close(self) -> None: ...


def open_kernel_log(source: str = "") -> KernelLog:
    """Opens the log at a path, for tests and containers; "": the ring, or the journal where the ring may not be read.

    Raises:
        OSError: no log can be read.
    """
    if source and source != RING:
        return FileLog(source)
    try:
        return Ring(source or RING)
    except PermissionError:
        if not shutil.which("journalctl"):
            raise
        return Journal()


def has_kernels_pids() -> bool:
    """Whether numbers of processes in the kernel's log are those that this process sees: not within a container."""
    return os.readlink("/proc/self/ns/pid") == _FIRST_PIDS


class Ring:
    """``/dev/kmsg``: each read returns one record, whose number is unique until the next boot."""

    def __init__(self, path: str = RING) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._boot = boot_id()
        self._last = -1
        self._from_start = False

    def resume(self, cursor: str) -> None:
        boot, _, number = cursor.partition(":")
        if cursor and boot == self._boot and number.isdecimal():
            self._last = int(number)
            os.lseek(self._fd, 0, os.SEEK_SET)
        elif cursor:
            self._last = -1  # everything since this boot is new
            os.lseek(self._fd, 0, os.SEEK_SET)
        else:
            for _ in self.lines():  # only the last record tells where the end is
                pass

    def lines(self) -> Iterator[str]:
        for _ in range(_MOST_RECORDS):
            try:
                record = self._read()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                continue  # the next records were overwritten: the next read returns the oldest that is left
            if not record:
                return
            number, text = _parsed(record)
            if number is None or number <= self._last:
                continue
            if 0 <= self._last < number - 1:
                logger.warning(
                    "%d lines of the kernel were overwritten before they were read; faults in them are not known",
                    number - 1 - self._last,
                )
            self._last = number
            yield text

    def _read(self) -> bytes:
        return os.read(self._fd, _RECORD_BYTES)

    def cursor(self) -> str:
        return f"{self._boot}:{self._last}" if self._last >= 0 else ""

    def close(self) -> None:
        os.close(self._fd)


def _parsed(record: bytes) -> tuple[int | None, str]:
    """Splits "priority,number,microseconds,flags[,...];text", whose further lines begin with a space, into number and
    text. The number is None when the record is not of that form. In the text a byte that is not printable is written as
    "\\x0a": a line feed within a message, or a letter of a process's name."""
    head, found, rest = record.partition(b";")
    fields = head.split(b",")
    if not found or len(fields) < 3 or not fields[1].isdigit():
        return None, ""
    text = _ESCAPED.sub(lambda escaped: bytes([int(escaped[1], 16)]), rest.split(b"\n", 1)[0])
    return int(fields[1]), text.decode(errors="replace")


class FileLog:
    """A file that grows by one line for each message. A file that was replaced or truncated is read from its start."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file, self._offset = -1, 0
        self._rest = b""

    def resume(self, cursor: str) -> None:
        self._open()
        inode, _, offset = cursor.partition(":")
        if self._file < 0:
            return
        status = os.fstat(self._file)
        if not cursor:
            self._offset = status.st_size
        elif inode == str(status.st_ino) and offset.isdecimal() and int(offset) <= status.st_size:
            self._offset = int(offset)

    def _open(self) -> None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", self._path)
        self._file, self._offset, self._rest = fd, 0, b""

    def lines(self) -> Iterator[str]:
        if self._file < 0:
            self._open()
        if self._file < 0:
            return
        yield from self._read()
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return
        before = os.fstat(self._file)
        if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
            yield from self._read()  # what was written before the file was replaced
            self.close()
            self._open()
            yield from self._read()
        elif now.st_size < self._offset:
            self._offset, self._rest = 0, b""
            yield from self._read()

    def _read(self) -> Iterator[str]:
        while self._file >= 0 and (data := os.pread(self._file, _CHUNK_BYTES, self._offset + len(self._rest))):
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                self._offset += len(line) + 1
                text = line.decode(errors="replace")
                number, message = _parsed(line)
                yield text if number is None else message

    def cursor(self) -> str:
        return f"{os.fstat(self._file).st_ino}:{self._offset}" if self._file >= 0 else "0:0"

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Journal:
    """``journalctl -k``, run each time for what comes after its cursor."""

    def __init__(self, program: str = "journalctl") -> None:
        self._program = program
        self._cursor = ""
        self._unreadable = b""

    def resume(self, cursor: str) -> None:
        self._cursor = cursor
        if not cursor:
            for _ in self._ask("--lines=1"):
                pass

    def lines(self) -> Iterator[str]:
        yield from self._ask(f"--after-cursor={self._cursor}" if self._cursor else "--boot")

    def _ask(self, which: str) -> Iterator[str]:
        command = [self._program, "--dmesg", "--output=json", "--all", "--no-pager", "--quiet", which]
        found = subprocess.run(command, capture_output=True, timeout=_JOURNAL_TIMEOUT_S, check=True)
        unreadable = 0
        for record in found.stdout.splitlines():
            if cursor := _CURSOR.search(record):
                self._cursor = cursor[1].decode()
            try:
                yield from _values(json.loads(record).get("MESSAGE", []))
            except (ValueError, TypeError, AttributeError):
                # One without a cursor is read again until another one follows it.
                unreadable += record != self._unreadable
                self._unreadable = record
        if unreadable:
            logger.warning(
                "%d records of the journal cannot be read; faults in them are not known. The last one: %r",
                unreadable,
                self._unreadable[:300],
            )

    def cursor(self) -> str:
        return self._cursor

    def close(self) -> None:
        """Nothing to close."""


def _values(field: Any) -> Iterator[str]:
    """The values of a field of a record, in each form that systemd's "Journal JSON Format" has: a text, the bytes of
    one that is no UTF-8 or not printable, and a list of those when the field occurs more than once.

    Raises:
        ValueError, TypeError: it is none of these; null stands for a value that was too long.
    """
    if isinstance(field, str):
        yield field
    elif field and isinstance(field[0], int):
        yield bytes(field).decode(errors="replace")
    else:
        for value in field:
            yield from _values(value)
