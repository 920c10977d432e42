"""All-gather of small messages between ranks, with a deadline that names the missing ranks.

No collective operation of a process group is used, so a missing rank is an error with its number in it, not a hang.
"""

from __future__ import annotations

import logging
import struct
import time
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not declare it as exported

from resiliency.errors import ConfigError, Timeout

__all__ = ["Coordinator", "SoloCoordinator", "StoreCoordinator"]

logger = logging.getLogger(__name__)

#: A TCPStore closes the connection of a client that sends more than 8 MiB at once.
_PIECE_NBYTES = 4 << 20
_HEADER = struct.Struct("<III")  # rank, bytes of the message, bytes of this piece


class Coordinator(Protocol):
    """How the ranks of a job agree. Thread: one at a time for ``all_gather``, any for ``count``."""

    rank: int
    world_size: int

    def all_gather(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        """The message of every rank, indexed by rank, ``[world_size]``.

        Collective: yes, every rank calls with the same topics in the same order. Blocks: until every rank has called,
        up to ``timeout``.

        Args:
            topic: names what is agreed on, in keys and errors.
            data: message of this rank; kilobytes are meant, every rank reads the messages of all.
            timeout: counted from this rank's call.

        Raises:
            Timeout: names the ranks that did not call, or says that the ranks cannot reach each other any more.
        """
        ...

    def count(self, topic: str, amount: int) -> int:
        """Adds to a shared counter and returns its value. Collective: no. Blocks: for one answer of the store.

        Raises:
            RuntimeError: the store is gone.
        """
        ...


class SoloCoordinator:
    """The coordinator of a job with one rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def all_gather(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        return [data]

    def count(self, topic: str, amount: int) -> int:
        self._counts[topic] = self._counts.get(topic, 0) + amount
        return self._counts[topic]


class StoreCoordinator:
    """A coordinator over a torch store (TCPStore, FileStore, HashStore).

    Every rank appends its message to one value on the store and counts itself; whoever completes the count sets a key
    that all wait for, and then each rank reads the value. That is a constant number of store operations on a rank, and
    no rank has a part that the others depend on: at its deadline each reads the value to see who is missing.

    Three keys stay on the store. The rank that completes a round deletes those of the round before it: that every rank
    has begun this round says that every rank has returned from the one before. Counters are not deleted.

    A FileStore cannot append atomically, so there each message has a key of its own; every rank reads the whole file
    in any case. Its waits end up to a second late.

    The store itself has to answer: a process that hosts a TCPStore and is stopped (not dead) holds up its callers.

    Args:
        store: shared by all ranks; keys are written below ``prefix``.
        rank, world_size: of this process.
        prefix: unique for each start of the job on this store (a launcher may keep its store over restarts).
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = store  # torch declares neither append nor that values may be bytes
        self._prefix = prefix
        self._appends = bool(store.has_extended_api())  # type: ignore[attr-defined]  # nor this
        self._round = 0
        self._before = ""

    def all_gather(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        base = f"{self._prefix}/{self._round}/{topic}"
        before, self._before = self._before, base
        self._round += 1
        try:
            self._post(base, data)
            completes = self._store.add(f"{base}/arrived", 1) == self.world_size
            if completes:
                self._store.set(f"{base}/complete", "1")
            else:
                self._wait(f"{base}/complete", deadline)
            messages = self._read(base)
        except RuntimeError as error:  # what every torch store raises
            raise Timeout(
                f"rank {self.rank} cannot agree on {topic!r} with the other {self.world_size - 1} ranks: the job's"
                f" store does not answer ({_first_line(error)}); the process that hosts it, rank 0 or the launcher, has"
                " ended: look at its log"
            ) from error
        missing = sorted(set(range(self.world_size)) - set(messages))
        if missing:
            raise Timeout(
                f"rank {self.rank} waited {timeout.total_seconds():.0f} s for rank(s) {missing} of {self.world_size}"
                f" to agree on {topic!r};"
                " they are dead, hung or did not reach this point: look at their logs"
            )
        if completes and before:
            self._delete(before)
        return [messages[rank] for rank in range(self.world_size)]

    def count(self, topic: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/count/{topic}", amount))

    def _post(self, base: str, data: bytes) -> None:
        if not self._appends:
            self._store.set(f"{base}/messages/{self.rank}", _frame(self.rank, data, data))
            return
        for start in range(0, max(1, len(data)), _PIECE_NBYTES):
            framed = _frame(self.rank, data, data[start : start + _PIECE_NBYTES])
            self._store.append(f"{base}/messages", framed)

    def _wait(self, key: str, deadline: float) -> None:
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            # The deadline has passed, or the store is gone: reading the messages tells which. They can even all be
            # there, when a rank died after its message and before it was counted.
            logger.debug("rank %d waited for %s: %s", self.rank, key, _first_line(error))

    def _read(self, base: str) -> dict[int, bytes]:
        """The messages that are on the store whole, by rank."""
        if self._appends:
            framed = [self._store.get(f"{base}/messages")]
        else:
            keys = [f"{base}/messages/{rank}" for rank in range(self.world_size)]
            framed = [self._store.get(key) for key in keys if self._store.check([key])]
        return _unframe(b"".join(framed), where=base)

    def _delete(self, base: str) -> None:
        keys = [f"{base}/arrived", f"{base}/complete"]
        if self._appends:
            keys.append(f"{base}/messages")
        else:
            keys += [f"{base}/messages/{rank}" for rank in range(self.world_size)]
        try:
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError as error:  # only tidiness: a store that cannot delete, or whose host has ended just now
            logger.debug("rank %d could not delete the keys below %s: %s", self.rank, base, _first_line(error))


def _frame(rank: int, message: bytes, piece: bytes) -> bytes:
    """A piece of a rank's message with what it takes to find it among others."""
    return _HEADER.pack(rank, len(message), len(piece)) + piece


def _unframe(framed: bytes, *, where: str) -> dict[int, bytes]:
    """Messages of which every piece is in ``framed``, by rank; the pieces of one rank are in order.

    Raises:
        ConfigError: two processes called themselves by one rank.
    """
    whole: dict[int, bytes] = {}
    begun: dict[int, bytearray] = {}
    at = 0
    while at < len(framed):
        rank, message_nbytes, piece_nbytes = _HEADER.unpack_from(framed, at)
        start = at + _HEADER.size
        at = start + piece_nbytes
        if rank in whole:
            raise ConfigError(f"two processes wrote to {where} as rank {rank}: the prefix must differ with each start")
        if piece_nbytes == message_nbytes:
            whole[rank] = framed[start:at]
            continue
        begun.setdefault(rank, bytearray()).extend(framed[start:at])
        if len(begun[rank]) >= message_nbytes:
            whole[rank] = bytes(begun.pop(rank))
    return whole


def _first_line(error: RuntimeError) -> str:
    """Without the C++ stack that torch appends."""
    return str(error).partition("\n")[0] or type(error).__name__
