"""Remembers which lines were read before, in a few bytes per line. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

__all__ = ["SeenLines"]

_FIRST_SLOTS = 1 << 12
#: Largest number of slots in one table: 4 MiB, room for 350,000 lines. Step lines are not remembered here.
MOST_SLOTS = 1 << 19


class SeenLines:
    """A set of lines that keeps 64 bits of each.

    When its table is full a second one is begun; when that is full, too, the first one is forgotten. So the last
    350,000 lines or more are known at any time. Thread: one.
    """

    def __init__(self, most_slots: int = MOST_SLOTS) -> None:
        self._most = most_slots
        self._before: array[int] | None = None
        self._begin(min(_FIRST_SLOTS, most_slots))

    def _begin(self, slots: int) -> None:
        self._slots = array("q", bytes(8 * slots))
        #: How many more lines fit: at most two thirds of the slots are used.
        self._left = slots * 2 // 3

    def seen(self, line: Hashable) -> bool:
        """Returns True when ``line`` was passed before; otherwise remembers it and returns False."""
        key = hash(line) or 1
        if self._before is not None and self._before[_place(self._before, key)]:
            return True
        # The loop of _place, inlined: this runs for every line that is not a step line.
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
    """Index of the slot that holds ``key``, or of the free slot for it."""
    last = len(slots) - 1
    place = key & last
    while (held := slots[place]) and held != key:
        place = (place + 1) & last
    return place
