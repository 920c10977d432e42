"""Where all ranks stop: the end of one batch, agreed on while they train. Pure but for its lock.

A rank that receives a notice, from any source, publishes the first batch at whose end it can stop: the one it is in, or
the next. The largest of all published ones is where all stop. From the moment it has published until it knows that, a
rank waits at the end of a batch; no rank can therefore be past the agreed one, whatever delays messages. Ranks that
wait for one another in a batch cannot prevent the agreement, because other threads publish and read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Position", "stop_after"]


def stop_after(published: Sequence[int]) -> int:
    """Number of the batch at whose end all ranks stop. Pure.

    Args:
        published: of each rank, the batch at whose end it can stop first.
    """
    return max(published)


class Position:
    """Counts the training batches of this rank, from 1. Threads: the training thread counts; others publish."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._ended = 0
        self._published: int | None = None
        self._stop: int | None = None
        self._known = threading.Event()

    def batch_began(self) -> None:
        with self._lock:
            self._begun += 1

    def publish(self) -> int:
        """The batch at whose end this rank can stop first. The same at each call."""
        with self._lock:
            if self._published is None:
                self._published = self._begun if self._begun > self._ended else self._begun + 1
            return self._published

    def decided(self, stop: int | None) -> None:
        """All ranks stop at the end of that batch; None: there is no agreement, and nobody waits any more."""
        with self._lock:
            self._stop = stop
        self._known.set()

    def batch_ended(self, *, timeout_s: float) -> bool:
        """True when this rank stops here. Blocks: once it has published, until the others have, up to ``timeout_s``."""
        with self._lock:
            self._ended = self._begun
            waits = self._published is not None and self._ended >= self._published
        if waits:
            self._known.wait(timeout_s)
        with self._lock:
            return self._stop is not None and self._ended >= self._stop
