"""What is different in the processes of a chaos run. Python imports this file at the start of each agent.

A wall clock that can be set for all processes of a folder: the machine's stays as it is, the offset is a float in a
small file that every process maps. And agents run at the priority of the trainers, because on a busy machine a low one
makes their start take seconds, of which a run has many.
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
    os.nice = lambda increment: 0
