"""Where all ranks stop: at the end of one batch, on which they agree while they train. Pure except for a lock.

When a notice reaches a rank, from any source, the rank publishes the first batch at whose end it can stop: the present
one, or the next. All ranks stop at the end of the largest published batch. After it has published, a rank waits at the
end of its batches until the largest is known, so that no rank can be past the agreed batch, however late messages are.
Ranks that wait for each other inside a batch do not prevent the agreement, because other threads publish and read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Position", "stop_after"]


def stop_after(published: Sequence[int]) -> int:
    """Returns the number of the batch at whose end all ranks stop. Pure.

    Args:
        published: for each rank, the first batch at whose end it can stop.
    """
    return max(published)


class Position:
    """Counts the training batches of this rank, from 1. Thread: the training thread counts; other threads publish."""

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
        """Returns the first batch at whose end this rank can stop. The same at every call."""
        with self._lock:
            if self._published is None:
                self._published = self._begun if self._begun > self._ended else self._begun + 1
            return self._published

    def decided(self, stop: int | None) -> None:
        """All ranks stop at the end of batch ``stop``; None: there is no agreement, and waiting ends."""
        with self._lock:
            self._stop = stop
        self._known.set()

    def batch_ended(self, *, timeout_s: float) -> bool:
        """Counts the end of a batch. Returns True when this rank stops here. Blocks, once this rank has published:
        until the agreed batch is known, up to ``timeout_s``."""
        with self._lock:
            self._ended = self._begun
            waits = self._published is not None and self._ended >= self._published
        if waits:
            self._known.wait(timeout_s)
        with self._lock:
            return self._stop is not None and self._ended >= self._stop
