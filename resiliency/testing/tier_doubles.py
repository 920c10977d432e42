"""Test doubles that wrap a tier: one fails as scripted, one is slow, one records calls."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

from resiliency.errors import TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers.base import ObjectInfo, Tier

__all__ = ["Call", "Fault", "FaultyTier", "RecordingTier", "SlowTier", "Verb", "WrappedTier"]

T = TypeVar("T")

Verb = Literal["put_bytes", "put_file", "alias", "read", "read_range", "list", "delete"]


class WrappedTier:
    """Passes every verb on to ``inner`` through :meth:`around`. Thread: as ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.root = inner.root
        self.is_local = inner.is_local
        self.durable = inner.durable

    def around(self, verb: Verb, key: str, call: Callable[[], T]) -> T:
        """Runs one verb. Override it to do something other than ``call()``. ``key`` is the new name for aliases."""
        return call()

    def location(self, key: str) -> str:
        return self.inner.location(key)

    def put_bytes(self, key: str, data: bytes) -> None:
        self.around("put_bytes", key, lambda: self.inner.put_bytes(key, data))

    def put_file(
        self,
        key: str,
        path: str,
        *,
        check: Callable[[bytes | memoryview], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.around("put_file", key, lambda: self.inner.put_file(key, path, check=check, progress=progress))

    def alias(self, key: str, name: str) -> None:
        self.around("alias", name, lambda: self.inner.alias(key, name))

    def read(self, key: str) -> bytes:
        return self.around("read", key, lambda: self.inner.read(key))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self.around("read_range", key, lambda: self.inner.read_range(key, start, end))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.around("list", prefix, lambda: [*self.inner.list(prefix)]))

    def delete(self, key: str, *, keep_folder: bool = False) -> None:
        self.around("delete", key, lambda: self.inner.delete(key, keep_folder=keep_folder))


class Fault(enum.Enum):
    """What a scripted verb does in place of its work."""

    BUSY = "503: retryable TierError, nothing done"
    FULL = "no space: retryable TierError, nothing done"
    REFUSED = "403: TierError that is not retryable, nothing done"
    CONFLICT = "412: TierError that is not retryable, nothing done"
    LOST_ANSWER = "done, and then a retryable TierError"
    MISSING = "reads: FileNotFoundError; listings: empty"
    CORRUPT = "puts and aliases store, and reads return, the bytes with one bit flipped, without an error"


_RETRYABLE = {Fault.BUSY: True, Fault.FULL: True, Fault.LOST_ANSWER: True, Fault.REFUSED: False, Fault.CONFLICT: False}


@dataclass
class _ScriptedFault:
    verb: Verb
    fault: Fault
    at: int
    times: int
    key: str


class FaultyTier(WrappedTier):
    """Fails as scripted: ``tier.fail("put_file", Fault.BUSY, at=2)`` fails the second put_file from now on."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._trips: list[_ScriptedFault] = []
        self._tripped: Counter[Fault] = Counter()

    def fail(self, verb: Verb, fault: Fault, *, at: int = 1, times: int = 1, key: str = "") -> None:
        """Arms a fault.

        Args:
            verb: which verb.
            at: 1 for the next call of the verb, 2 for the one after; only calls with a matching key count.
            times: calls in a row that fail.
            key: only keys that contain this text.
        """
        with self._lock:
            self._trips.append(_ScriptedFault(verb, fault, at, times, key))

    def tripped(self, fault: Fault) -> int:
        """How often this fault happened."""
        with self._lock:
            return self._tripped[fault]

    def around(self, verb: Verb, key: str, call: Callable[[], T]) -> T:
        return self._run(verb, key, call, lambda: _flipped(call()))

    def put_bytes(self, key: str, data: bytes) -> None:
        self._run(
            "put_bytes", key, lambda: self.inner.put_bytes(key, data), lambda: self.inner.put_bytes(key, _flip(data))
        )

    def put_file(
        self,
        key: str,
        path: str,
        *,
        check: Callable[[bytes | memoryview], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        def corrupted() -> None:
            # Corrupted after the check of the source, as by the network or the store.
            data = Path(path).read_bytes()
            if check is not None:
                for at in range(0, len(data), BLOCK_BYTES):
                    check(data[at : at + BLOCK_BYTES])
            with TemporaryDirectory() as folder:
                bad = Path(folder, "corrupted")
                bad.write_bytes(_flip(data))
                self.inner.put_file(key, str(bad), progress=progress)

        self._run("put_file", key, lambda: self.inner.put_file(key, path, check=check, progress=progress), corrupted)

    def alias(self, key: str, name: str) -> None:
        def corrupted() -> None:
            self.inner.put_bytes(name, _flip(self.inner.read(key)))

        self._run("alias", name, lambda: self.inner.alias(key, name), corrupted)

    def _run(self, verb: Verb, key: str, call: Callable[[], T], corrupt: Callable[[], T]) -> T:
        fault = self._next(verb, key)
        if fault is None:
            return call()
        if fault is Fault.CORRUPT:
            return corrupt()
        where = f"{self.name} tier {self.root}"
        if fault is Fault.MISSING:
            if verb in ("read", "read_range"):
                raise FileNotFoundError(f"{where}: no object {key!r} (injected)")
            if verb == "list":
                return []  # type: ignore[return-value]  # T is a list here
            return call()
        if fault is Fault.LOST_ANSWER:
            call()
        raise TierError(f"{where}: cannot {verb} {key!r}: {fault.value} (injected)", retryable=_RETRYABLE[fault])

    def _next(self, verb: Verb, key: str) -> Fault | None:
        """Counts a call and returns its fault, if one is armed."""
        with self._lock:
            met = None
            for trip in self._trips:
                if trip.verb != verb or trip.key not in key or not trip.times:
                    continue
                if trip.at > 1:
                    trip.at -= 1
                elif met is None:
                    trip.times -= 1
                    met = trip.fault
            if met is not None:
                self._tripped[met] += 1
            return met


class SlowTier(WrappedTier):
    """Waits before each verb, and for the bytes: before ``put_bytes``, during ``put_file``, after reads.

    Args:
        delay: wait before each verb.
        bytes_per_s: adds a wait for the bytes of puts and reads at this rate; None: none.
        pause: waits that many seconds; a true result ends the verb with a retryable TierError. Pass the ``wait`` of an
            Event to free a waiting verb, or a clock's own wait.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        delay: timedelta = timedelta(0),
        bytes_per_s: float | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(inner)
        self._delay_s = delay.total_seconds()
        self._bytes_per_s = bytes_per_s
        self._pause = threading.Event().wait if pause is None else pause

    def around(self, verb: Verb, key: str, call: Callable[[], T]) -> T:
        if self._delay_s:
            self._wait(self._delay_s, key)
        result = call()
        if isinstance(result, bytes):
            self._take(len(result), key)
        return result

    def put_bytes(self, key: str, data: bytes) -> None:
        self._take(len(data), key)
        super().put_bytes(key, data)

    def put_file(
        self,
        key: str,
        path: str,
        *,
        check: Callable[[bytes | memoryview], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        def slow(block: bytes | memoryview) -> None:
            if check is not None:
                check(block)
            self._take(len(block), key)

        super().put_file(key, path, check=slow, progress=progress)

    def _take(self, nbytes: int, key: str) -> None:
        if self._bytes_per_s and nbytes:
            self._wait(nbytes / self._bytes_per_s, key)

    def _wait(self, seconds: float, key: str) -> None:
        if self._pause(seconds):
            raise TierError(
                f"{self.name} tier {self.root}: stopped while waiting for {key!r} (injected)", retryable=True
            )


@dataclass(frozen=True)
class Call:
    """One recorded call of a verb. ``key`` is the prefix for listings, and the new name for aliases."""

    verb: Verb
    key: str


class RecordingTier(WrappedTier):
    """Records every call, in the order they began; :meth:`forget` clears the record."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    def around(self, verb: Verb, key: str, call: Callable[[], T]) -> T:
        with self._lock:
            self._calls.append(Call(verb, key))
        return call()

    def calls(self, *verbs: Verb) -> tuple[Call, ...]:
        """Calls so far, of these verbs only when some are named."""
        with self._lock:
            return tuple(call for call in self._calls if not verbs or call.verb in verbs)

    def forget(self) -> None:
        with self._lock:
            self._calls.clear()


def _flip(data: bytes) -> bytes:
    """Flips one bit in the middle; an empty object gets one byte."""
    if not data:
        return b"\xff"
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _flipped(result: T) -> T:
    return _flip(result) if isinstance(result, bytes) else result  # type: ignore[return-value]  # bytes stay bytes
