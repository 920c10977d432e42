"""Makes views of memory at an address, and tells small from huge pages of a mapped file.

An fsync write-protects all pages, so the next store to each page faults. The cost depends on how the pages were
created. Created by faults or by small writes, they cost one fault per 4 KiB (ext4 of Linux 6.18, 512 MiB: 63 to 79 ms,
and 430 to 550 ms after writes of 512 KiB). Created by writes of 2 MiB, they are huge pages where the file system
supports them (ext4 since Linux 6.16, XFS), and the same stores take 41 to 48 ms.
"""

from __future__ import annotations

import ctypes
import resource
from typing import Any

__all__ = ["has_small_pages", "page_faults", "view"]

#: Pages count as small when stores cause more than one fault per this many bytes.
_SMALL = 64 * 1024

# Not a ctypes array, because making an array type for each length takes ten times as long as making the view.
_from_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


def view(address: int, nbytes: int) -> memoryview:
    """A writable view of ``nbytes`` bytes at ``address``, without a copy. They must stay mapped while the view is
    used."""
    made: Any = _from_memory(address, nbytes, _WRITABLE)
    return made  # type: ignore[no-any-return]


def page_faults() -> int:
    """Number of page faults of the calling thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def has_small_pages(faults: int, nbytes: int) -> bool:
    """True when storing ``nbytes`` bytes with ``faults`` faults means that pages are small; False when nothing was
    stored."""
    return faults * _SMALL > nbytes
