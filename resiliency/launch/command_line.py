"""The command line that ``ps`` shows of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["show_command_line"]

#: Of ``/proc/self/stat`` behind the name: where the kernel reads the command line from, see proc(5).
_ARG_START, _ARG_END = 48 - 3, 49 - 3


def show_command_line(words: Sequence[str]) -> bool:
    """Writes another command line over the one that the process was started with; a fork has its parent's.

    What is longer than that one is cut off at the end. False, and nothing is changed, where the kernel does not say
    where it is.
    """
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 0 < start < end:
        return False
    room = end - start
    text = b"\0".join(word.encode(errors="surrogateescape") for word in words)
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
    return True
