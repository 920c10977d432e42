"""Memory at an address, and the pages behind a mapped file.

What a store to a file's mapping costs after an fsync, which write-protects all pages, depends on how they were made.
Pages made by faults, or by small writes, cost one fault for every 4 KiB (ext4 of Linux 6.18, 512 MiB: 63 to 79 ms, and
430 to 550 ms when they were made by writes of 512 KiB). Made by writes of 2 MiB they are huge where the file system can
(ext4 since Linux 6.16, XFS), are mapped as such, and the same stores take 41 to 48 ms.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

__all__ = ["fill", "has_small_pages", "page_faults", "view"]

#: The largest page of x86-64 and of arm64 with 4 KiB base pages.
_HUGE = 2 * 1024 * 1024
_ZEROS = bytes(_HUGE)
#: A fault for fewer bytes than this, on average, and the pages are small.
_SMALL = 64 * 1024

# ctypes arrays would do, but a new array type for each length costs ten times the view.
_from_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


def view(address: int, nbytes: int) -> memoryview:
    """``nbytes`` bytes from ``address`` on, writable, not copied. They must stay mapped while the view is used."""
    made: Any = _from_memory(address, nbytes, _WRITABLE)
    return made  # type: ignore[no-any-return]


def fill(fd: int, start: int, end: int) -> None:
    """Writes zeros to bytes ``[start, end)`` of a file, ``start`` on a multiple of 2 MiB, so that its pages become
    huge.

    Blocks: about half a second per GiB the first time, which is what pages of memory cost.

    Raises:
        OSError: no room, or the disk failed.
    """
    at = start
    while at < end:
        at += os.pwrite(fd, memoryview(_ZEROS)[: min(_HUGE - at % _HUGE, end - at)], at)


def page_faults() -> int:
    """Page faults of the calling thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def has_small_pages(faults: int, nbytes: int) -> bool:
    """Whether so many faults for so many bytes mean small pages. False when nothing was touched."""
    return faults * _SMALL > nbytes
