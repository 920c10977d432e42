"""Which lines were read before, in a few bytes each. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

__all__ = ["SeenLines"]

_FIRST_SLOTS = 1 << 12
#: 4 MiB, for 350,000 lines that are no steps.
MOST_SLOTS = 1 << 19


class SeenLines:
    """A set of lines that keeps 64 bits of each.

    When it is full a second one is begun, and when that is full the first one is forgotten: 350,000 lines or more are
    known at any time. Thread: one.
    """

    def __init__(self, most_slots: int = MOST_SLOTS) -> None:
        self._most = most_slots
        self._before: array[int] | None = None
        self._begin(min(_FIRST_SLOTS, most_slots))

    def _begin(self, slots: int) -> None:
        self._slots = array("q", bytes(8 * slots))
        #: How many more lines it takes: two thirds of the slots are used.
        self._left = slots * 2 // 3

    def seen(self, line: Hashable) -> bool:
        """True when the line was here before; it has been here from now on."""
        key = hash(line) or 1
        if self._before is not None and self._before[_place(self._before, key)]:
            return True
        # As _place does, without the call: this is asked of every line that is no step.
        slots = self._slots
        last = len(slots) - 1
        place = key & last
        while held := slots[place]:
            if held == key:
                return True
            place = (place + 1) & last
        slots[place] = key
        self._left -= 1
        if self._left < 0:
            self._grow()
        return False

    def _grow(self) -> None:
        old = self._slots
        if len(old) >= self._most:
            self._before = old
            self._begin(_FIRST_SLOTS)
            return
        self._begin(2 * len(old))
        for key in filter(None, old):
            self._slots[_place(self._slots, key)] = key
            self._left -= 1


def _place(slots: array[int], key: int) -> int:
    """Where a line is, or the free slot for it."""
    last = len(slots) - 1
    place = key & last
    while (held := slots[place]) and held != key:
        place = (place + 1) & last
    return place
