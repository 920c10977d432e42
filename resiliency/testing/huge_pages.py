"""Moves the memory of a process that forks to huge pages."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["use_huge_pages"]

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25


def use_huge_pages() -> None:
    """Moves this process's own memory to huge pages, where the kernel can (Linux 6.1 and newer); new memory is not.

    A fork copies the page table entries of all memory, and its end removes them: with 260 MiB in small pages both take
    25 ms, in huge ones 7. Blocks: some 3 ms per MiB.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in where.split("-"))
            begin, end = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            if begin < end:
                madvise(begin, end - begin, _MADV_COLLAPSE)  # refused by older kernels, and where memory is short
