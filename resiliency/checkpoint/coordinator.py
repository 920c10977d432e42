"""One small talk between ranks: everybody says something, everybody hears all of it, or a deadline names who is
missing.

No collective operation of a process group is used, so a missing rank is an error with its number in it, not a hang.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not declare it as exported

from resiliency.errors import Timeout

__all__ = ["Coordinator", "SoloCoordinator", "StoreCoordinator"]


class Coordinator(Protocol):
    """Collective: yes, among the ranks of the job; every rank calls with the same ``topic`` in the same order."""

    rank: int
    world_size: int

    def all(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        """What every rank said (UTF-8 text as bytes), indexed by rank, ``[world_size]``.

        Blocks: until all have spoken, up to ``timeout``.

        Raises:
            Timeout: names the ranks that did not speak.
        """
        ...

    def count(self, topic: str, amount: int) -> int:
        """Adds to a shared counter and returns its value. Does not wait for anyone. Thread: any."""
        ...


class SoloCoordinator:
    """The coordinator of a job with one rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def all(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        return [data]

    def count(self, topic: str, amount: int) -> int:
        self._counts[topic] = self._counts.get(topic, 0) + amount
        return self._counts[topic]


class StoreCoordinator:
    """An coordinator over a torch store (TCPStore, FileStore, HashStore).

    Args:
        store: shared by all ranks; keys are written below ``prefix``.
        rank, world_size: of this process.
        prefix: unique for each start of the job on this store (a launcher may keep its store over restarts).
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = prefix
        self._round = 0

    def all(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        base = f"{self._prefix}/{self._round}/{topic}"
        self._round += 1
        self._store.set(f"{base}/{self.rank}", data.decode())
        deadline = time.monotonic() + timeout.total_seconds()
        missing = []
        for rank in range(self.world_size):
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                self._store.wait([f"{base}/{rank}"], left)
            except RuntimeError:  # what every torch store raises on a timeout (DistStoreError is one)
                missing.append(rank)
        if missing:
            raise Timeout(
                f"rank {self.rank} waited {timeout.total_seconds():.0f} s for rank(s) {missing} of {self.world_size}"
                f" to agree on {topic!r};"
                " they are dead, hung or did not reach this point: look at their logs"
            )
        return [bytes(self._store.get(f"{base}/{rank}")) for rank in range(self.world_size)]

    def count(self, topic: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/count/{topic}", amount))
