"""What the monitor of a host wants of its launcher: that it takes a place in a job, takes none, or ends. Pure."""

from __future__ import annotations

import enum

from resiliency.runtime.messages.places import Place

__all__ = ["Orders", "Wish"]


class Wish(enum.Enum):
    """What the monitor's last message asked for."""

    UNKNOWN = enum.auto()  # no message yet
    PLACE = enum.auto()
    NO_PLACE = enum.auto()
    COMPLETED = enum.auto()


class Orders:
    """The monitor's newest request, and the place that this launcher has taken. Thread: one.

    Attributes:
        wish: the kind of the newest request.
        place: the newest place that was given; it stays when a later :attr:`wish` is for none.
        current: the place whose ranks were started last; None: none yet.
    """

    def __init__(self) -> None:
        self.wish = Wish.UNKNOWN
        self.place: Place | None = None
        self.current: Place | None = None

    @property
    def taken(self) -> int:
        """The generation whose ranks were started last; 0: none yet."""
        return self.current.generation if self.current is not None else 0

    @property
    def is_to_start(self) -> bool:
        """True when the newest place's ranks have not been started yet."""
        return self.wish is Wish.PLACE and self.place is not None and self.place.generation > self.taken

    @property
    def ends_ranks(self) -> bool:
        """True when running ranks must end: another place is to be taken, or none."""
        return self.is_to_start or self.wish in (Wish.NO_PLACE, Wish.COMPLETED)

    def give(self, place: Place) -> bool:
        """Takes a place from the monitor; returns False, and changes nothing, when its generation is older than the
        newest one."""
        newest = self.place.generation if self.place is not None else 0
        if place.generation < newest:
            return False
        if place.generation > newest:
            self.place = place
        elif self.place is not None and self.place.generation > self.taken and place.master:
            self.place = place  # the same generation, now with the address of its store
        self.wish = Wish.PLACE
        return True

    def withdraw(self) -> None:
        self.wish = Wish.NO_PLACE

    def complete(self) -> None:
        self.wish = Wish.COMPLETED

    def start(self) -> Place:
        """Records that the ranks of the newest place are started, and returns that place."""
        assert self.place is not None
        self.current = self.place
        return self.place
