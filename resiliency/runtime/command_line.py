"""Changes the command line that ``ps`` shows for this process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["show_command_line"]

#: Indices of ``arg_start`` and ``arg_end`` among the fields of ``/proc/self/stat`` after the name; see proc(5).
_ARG_START, _ARG_END = 48 - 3, 49 - 3


def show_command_line(words: Sequence[str]) -> bool:
    """Overwrites the command line that this process was started with; a forked process has its parent's.

    Longer text is cut off at the end of the old one. Returns False, and changes nothing, when the kernel does not say
    where the command line lies in memory.
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
