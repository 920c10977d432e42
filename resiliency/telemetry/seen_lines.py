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
        self._slots = _empty(min(_FIRST_SLOTS, most_slots))
        self._count = 0
        self._before: array[int] | None = None

    def seen(self, line: Hashable) -> bool:
        """True when the line was here before; it has been here from now on."""
        key = hash(line) & 0xFFFF_FFFF_FFFF_FFFF or 1
        if self._before is not None and _find(self._before, key) < 0:
            return True
        place = _find(self._slots, key)
        if place < 0:
            return True
        self._slots[place] = key
        self._count += 1
        if self._count * 3 > len(self._slots) * 2:
            self._grow()
        return False

    def _grow(self) -> None:
        if len(self._slots) >= self._most:
            self._before, self._slots, self._count = self._slots, _empty(_FIRST_SLOTS), 0
            return
        slots = _empty(2 * len(self._slots))
        for key in self._slots:
            if key:
                slots[_find(slots, key)] = key
        self._slots = slots


def _empty(slots: int) -> array[int]:
    return array("Q", bytes(8 * slots))


def _find(slots: array[int], key: int) -> int:
    """The free slot for a line, or -1 when the line is there."""
    last = len(slots) - 1
    place = key & last
    while held := slots[place]:
        if held == key:
            return -1
        place = (place + 1) & last
    return place
