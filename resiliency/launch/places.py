"""What the monitor of a host wants of its launcher: that it takes a place in a job, takes none, or ends. Pure.

Messages are level-triggered, like all that a supervisor sends: receiving one twice, or late, changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Orders", "Place", "Wish"]

_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this host in one epoch of a workload.

    Attributes:
        epoch: counted from 1; ranks of an earlier epoch are superseded.
        node_rank: of this host, less than ``nodes``.
        master: "address:port" of the epoch's store; "": the host of node rank 0 has not reported it yet.
        replicas, replicas_before: number of data parallel replicas in this epoch and in the previous one; 0: unknown,
            or none.
        replace: global ranks of the previous epoch that hang, and are killed instead of told to leave.
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
        """Reads a place from a message. Raises: ValueError: a field is missing or invalid; the error names it."""
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
        """Host and port of the epoch's store.

        Raises:
            ValueError: ``master`` is not an address and a port.
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
        """The epoch whose ranks were started last; 0: none yet."""
        return self.current.epoch if self.current is not None else 0

    @property
    def is_to_start(self) -> bool:
        """True when the newest place's ranks have not been started yet."""
        return self.wish is Wish.PLACE and self.place is not None and self.place.epoch > self.taken

    @property
    def ends_ranks(self) -> bool:
        """True when running ranks must end: another place is to be taken, or none."""
        return self.is_to_start or self.wish in (Wish.NO_PLACE, Wish.COMPLETED)

    def give(self, place: Place) -> bool:
        """Takes a place from the monitor; returns False, and changes nothing, when its epoch is older than the newest
        one."""
        newest = self.place.epoch if self.place is not None else 0
        if place.epoch < newest:
            return False
        if place.epoch > newest:
            self.place = place
        elif self.place is not None and self.place.epoch > self.taken and place.master:
            self.place = place  # the same epoch, now with the address of its store
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
