"""Exchanges of small messages between ranks, with a deadline that names the missing ranks.

It uses no collective operation of a process group, so that a missing rank causes an error that names it, instead of a
hang.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not declare it as exported

from resiliency.errors import ConfigError, Timeout

__all__ = ["Coordinator", "SoloCoordinator", "StoreCoordinator"]

logger = logging.getLogger(__name__)

#: Bytes sent at once; a TCPStore closes the connection of a client that sends more than 8 MiB at once.
_PIECE_NBYTES = 4 << 20
_HEADER = struct.Struct("<III")  # rank, bytes of the message, bytes of this piece


class Coordinator(Protocol):
    """Exchanges messages between the ranks of a job. Thread: one at a time, any for ``count``."""

    rank: int
    world_size: int

    def all_gather(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        """The message of every rank, indexed by rank, ``[world_size]``.

        Collective: yes, every rank calls with the same topics in the same order. Blocks: until every rank has called,
        up to ``timeout``.

        Args:
            topic: names the exchange in keys and errors.
            data: message of this rank; should be kilobytes, because every rank reads all messages.
            timeout: counted from this rank's call.

        Raises:
            Timeout: names the ranks that did not call, or says that the store does not answer.
        """
        ...

    def ask_first(
        self, topic: str, data: bytes, decide: Callable[[list[bytes]], list[bytes]], *, timeout: timedelta
    ) -> bytes:
        """Sends a message to rank 0, and returns what rank 0 answers to this rank.

        Collective: yes. Blocks: until every rank has called and rank 0 has decided, up to ``timeout``. Exchanges do not
        depend on each other: one that some ranks miss fails, and the next one works.

        Args:
            topic: names the exchange; unique in this start of the job.
            decide: called on rank 0 with the messages of all ranks, indexed by rank; returns the answer to each.
            timeout: counted from this rank's call.

        Raises:
            Timeout: names the ranks that did not call, or says that the store does not answer.
        """
        ...

    def count(self, topic: str, amount: int) -> int:
        """Adds to a shared counter and returns its new value. Collective: no. Blocks: for one answer of the store.

        Raises:
            RuntimeError: the store does not answer.
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

    def ask_first(
        self, topic: str, data: bytes, decide: Callable[[list[bytes]], list[bytes]], *, timeout: timedelta
    ) -> bytes:
        return decide([data])[0]

    def count(self, topic: str, amount: int) -> int:
        self._counts[topic] = self._counts.get(topic, 0) + amount
        return self._counts[topic]


class StoreCoordinator:
    """A coordinator over a torch store (TCPStore, FileStore, HashStore).

    Every rank appends its message to one value on the store and increments a counter. The rank that completes the count
    sets a key that all ranks wait for, and then each rank reads the value. That is a constant number of store
    operations per rank, and no rank depends on another one's work: a rank whose deadline passes reads the value, too,
    to see which ranks are missing.

    Three keys of the last round stay on the store. The rank that completes a round deletes the keys of the previous
    one, from which every rank has returned by then. Counters are not deleted.

    A FileStore cannot append atomically, so each message there has its own key; every rank reads the complete file in
    any case. Waits on a FileStore end up to a second late.

    The store must answer: while the process that hosts a TCPStore is stopped (not dead), calls block without limit.

    Args:
        store: shared by all ranks; keys are written below ``prefix``.
        rank, world_size: of this process.
        prefix: unique for each start of the job on this store (a launcher may keep its store across restarts).
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = store  # untyped: torch declares neither append nor that values may be bytes
        self._prefix = prefix
        self._appends = bool(store.has_extended_api())  # type: ignore[attr-defined]  # nor this
        self._round = 0
        self._previous = ""

    @property
    def store(self) -> Any:
        """The torch store."""
        return self._store

    @property
    def prefix(self) -> str:
        """Prefix of this coordinator's keys; keys of others may lie below it."""
        return self._prefix

    def all_gather(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        base = f"{self._prefix}/{self._round}/{topic}"
        previous, self._previous = self._previous, base
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
            raise self._no_answer(topic, error) from error
        self._check_all(topic, messages, timeout)
        if completes and previous:
            self._delete(previous)
        return [messages[rank] for rank in range(self.world_size)]

    def ask_first(
        self, topic: str, data: bytes, decide: Callable[[list[bytes]], list[bytes]], *, timeout: timedelta
    ) -> bytes:
        deadline = time.monotonic() + timeout.total_seconds()
        base = f"{self._prefix}/ask/{topic}"
        answer = f"{base}/answer/{self.rank}"
        try:
            self._post(base, data)
            if self._store.add(f"{base}/arrived", 1) == self.world_size:
                self._store.set(f"{base}/complete", "1")
            self._wait(f"{base}/complete" if self.rank == 0 else answer, deadline)
            if self.rank != 0 and self._store.check([answer]):
                found = bytes(self._store.get(answer))
                self._delete_keys([answer])
                return found
            messages = self._read(base)
        except RuntimeError as error:  # what every torch store raises
            raise self._no_answer(topic, error) from error
        self._check_all(topic, messages, timeout)
        if self.rank != 0:
            raise Timeout(
                f"rank {self.rank} waited {timeout.total_seconds():.0f} s for rank 0 to decide on {topic!r}: look at"
                " its log"
            )
        answers = decide([messages[rank] for rank in range(self.world_size)])
        try:
            for rank in range(1, self.world_size):
                self._store.set(f"{base}/answer/{rank}", answers[rank])
        except RuntimeError as error:
            raise self._no_answer(topic, error) from error
        self._delete(base)
        return answers[0]

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
            # Either the deadline has passed, or the store does not answer: reading the messages shows which. All
            # messages may be there, when a rank died between its message and its count.
            logger.debug("rank %d waited for %s: %s", self.rank, key, _first_line(error))

    def _read(self, base: str) -> dict[int, bytes]:
        """The complete messages on the store, by rank."""
        if self._appends:
            framed = [self._store.get(f"{base}/messages")]
        else:
            keys = [f"{base}/messages/{rank}" for rank in range(self.world_size)]
            framed = [self._store.get(key) for key in keys if self._store.check([key])]
        return _unframe(b"".join(framed), where=base)

    def _no_answer(self, topic: str, error: RuntimeError) -> Timeout:
        return Timeout(
            f"rank {self.rank} cannot agree on {topic!r} with the other {self.world_size - 1} ranks: the job's store"
            f" does not answer ({_first_line(error)}); the process that hosts it, rank 0 or the launcher, has ended:"
            " look at its log"
        )

    def _check_all(self, topic: str, messages: Collection[int], timeout: timedelta) -> None:
        """Raises Timeout when the messages of some ranks are missing."""
        missing = sorted(set(range(self.world_size)) - set(messages))
        if missing:
            raise Timeout(
                f"rank {self.rank} waited {timeout.total_seconds():.0f} s for rank(s) {missing} of {self.world_size}"
                f" to agree on {topic!r};"
                " they died, hang or did not reach this point: look at their logs"
            )

    def _delete(self, base: str) -> None:
        keys = [f"{base}/arrived", f"{base}/complete"]
        if self._appends:
            keys.append(f"{base}/messages")
        else:
            keys += [f"{base}/messages/{rank}" for rank in range(self.world_size)]
        self._delete_keys(keys)

    def _delete_keys(self, keys: Sequence[str]) -> None:
        try:
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError as error:  # harmless: the store cannot delete, or its host has exited
            logger.debug("rank %d could not delete %s: %s", self.rank, keys[0], _first_line(error))


def _frame(rank: int, message: bytes, piece: bytes) -> bytes:
    """A piece of a rank's message with a header: rank, size of the message, size of the piece."""
    return _HEADER.pack(rank, len(message), len(piece)) + piece


def _unframe(framed: bytes, *, where: str) -> dict[int, bytes]:
    """The messages of which ``framed`` contains every piece, by rank. The pieces of one rank must be in order.

    Raises:
        ConfigError: two processes wrote as the same rank.
    """
    complete: dict[int, bytes] = {}
    begun: dict[int, bytearray] = {}
    at = 0
    while at < len(framed):
        rank, message_nbytes, piece_nbytes = _HEADER.unpack_from(framed, at)
        start = at + _HEADER.size
        at = start + piece_nbytes
        if rank in complete:
            raise ConfigError(f"two processes wrote to {where} as rank {rank}: the prefix must differ with each start")
        if piece_nbytes == message_nbytes:
            complete[rank] = framed[start:at]
            continue
        begun.setdefault(rank, bytearray()).extend(framed[start:at])
        if len(begun[rank]) >= message_nbytes:
            complete[rank] = bytes(begun.pop(rank))
    return complete


def _first_line(error: RuntimeError) -> str:
    """The error's text without the C++ stack that torch appends."""
    return str(error).partition("\n")[0] or type(error).__name__
