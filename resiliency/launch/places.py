"""What the monitor of a host wants of its launcher: a place in a job, none, or the end. Pure.

Level-triggered, as everything that a supervisor says: being told twice, or late, changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["REPORT_S", "Orders", "Place", "Wish"]

#: Seconds between two reports of a launcher of how far its ranks are; its monitor passes on the newest one.
REPORT_S = 0.25

_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this host stands in an epoch of a workload.

    Attributes:
        epoch: from 1; ranks of an earlier one are superseded.
        node_rank: of this host, below ``nodes``.
        master: "address:port" of the epoch's store; "": node rank 0 has not said it yet.
        replicas, replicas_before: of data parallelism, in this epoch and in the one before; 0: not said, or none.
        replace: global ranks, of the epoch before, that are killed and not told to leave: they hang.
    """

    epoch: int
    node_rank: int
    nodes: int
    workload: str
    master: str = ""
    replicas: int = 0
    replicas_before: int = 0
    replace: tuple[int, ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Place:
        """Raises: ValueError: a field is missing or makes no sense; the error names it."""
        place = cls(
            epoch=_whole(message, "epoch", 1),
            node_rank=_whole(message, "node_rank", 0),
            nodes=_whole(message, "nodes", 1),
            workload=_text(message, "workload"),
            master=_text(message, "master", ""),
            replicas=_whole(message, "replicas", 0, 0),
            replicas_before=_whole(message, "replicas_before", 0, 0),
            replace=_ranks(message.get("replace", [])),
        )
        if place.node_rank >= place.nodes:
            raise ValueError(f"node_rank={place.node_rank} of nodes={place.nodes}")
        if not place.workload:
            raise ValueError("workload is empty")
        if place.master:
            place.address()
        return place

    def address(self) -> tuple[str, int]:
        """Of the store.

        Raises:
            ValueError: ``master`` is none.
        """
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
            raise ValueError(f"master={self.master!r} is no address:port")
        return host.removeprefix("[").removesuffix("]"), int(port)


def _whole(message: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = message.get(name, default)
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} is no whole number of {least} or more")
    return value


def _text(message: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = message.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is no text")
    return value


def _ranks(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(rank) is not int for rank in value):
        raise ValueError(f"replace={value!r} is no list of ranks")
    return tuple(value)


class Wish(enum.Enum):
    """The kind of the monitor's last word."""

    UNKNOWN = enum.auto()  # it has said nothing yet
    PLACE = enum.auto()
    NO_PLACE = enum.auto()
    COMPLETED = enum.auto()


class Orders:
    """The newest word of the monitor, beside what this launcher has done. Thread: one.

    Attributes:
        wish: its kind.
        place: the newest that was given; of a :attr:`wish` for none, the one before.
        current: the one whose ranks were started last; None: none yet.
    """

    def __init__(self) -> None:
        self.wish = Wish.UNKNOWN
        self.place: Place | None = None
        self.current: Place | None = None

    @property
    def taken(self) -> int:
        """The epoch whose ranks were started last; 0: none yet."""
        return self.current.epoch if self.current is not None else 0

    @property
    def is_to_start(self) -> bool:
        """A place is given of which no ranks were started yet."""
        return self.wish is Wish.PLACE and self.place is not None and self.place.epoch > self.taken

    @property
    def ends_ranks(self) -> bool:
        """Ranks that run are to end: another place is to be taken, or none."""
        return self.is_to_start or self.wish in (Wish.NO_PLACE, Wish.COMPLETED)

    def give(self, place: Place) -> bool:
        """False when the place is of the past, and nothing changes."""
        newest = self.place.epoch if self.place is not None else 0
        if place.epoch < newest:
            return False
        if place.epoch > newest:
            self.place = place
        elif self.place is not None and self.place.epoch > self.taken and place.master:
            self.place = place  # the same, with an address that was not known before
        self.wish = Wish.PLACE
        return True

    def withdraw(self) -> None:
        self.wish = Wish.NO_PLACE

    def complete(self) -> None:
        self.wish = Wish.COMPLETED

    def start(self) -> Place:
        """The place is taken: its ranks are started."""
        assert self.place is not None
        self.current = self.place
        return self.place
