"""A wall clock that can be set for all processes of a folder: Python imports this file at the start of each agent.

The machine's clock stays as it is. The offset is a float in a small file, which every process maps.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

_NBYTES = 8


def set_clock(path: str, offset_s: float) -> None:
    """Makes ``time.time()`` of all processes that use the file ``offset_s`` seconds larger."""
    with open(path, "r+b" if os.path.exists(path) else "wb") as file:
        file.write(struct.pack("<d", offset_s))


def use_clock(path: str) -> None:
    """Replaces ``time.time`` of this process."""
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), _NBYTES, access=mmap.ACCESS_READ)
    real = time.time
    time.time = lambda: real() + struct.unpack_from("<d", offset)[0]


if os.environ.get("CHAOS_CLOCK"):
    use_clock(os.environ["CHAOS_CLOCK"])
