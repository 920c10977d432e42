"""The torch stores that this launcher serves: a new one for each attempt."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import TCPStore

__all__ = ["AttemptStores"]


class AttemptStores:
    """Thread: one.

    Each attempt gets its own store, because from a shared one gloo would read addresses of the previous attempt and
    connect to processes that are gone. Stores of earlier attempts stay open for a while: a rank that is told to leave
    before it has connected would retry for half an hour against a closed store, and cannot be interrupted; while the
    store is open it leaves at once.

    Args:
        keep_s: seconds that a rank may take to leave its attempt. When a new store is made, those that were replaced
            longer ago than this are closed.
    """

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self._current: TCPStore | None = None
        #: (monotonic seconds when it was replaced, store), oldest first.
        self._replaced: list[tuple[float, TCPStore]] = []

    def make(self) -> TCPStore:
        """Opens a new store on a free port, listening on all addresses of this host. Blocks: no."""
        now = time.monotonic()
        self._replaced = [one for one in self._replaced if now - one[0] < self.keep_s]
        if self._current is not None:
            self._replaced.append((now, self._current))
        self._current = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return self._current
