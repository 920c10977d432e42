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
        keep_s: seconds that a rank may take to leave its attempt. When a new store is made, the one before it is kept,
            and earlier ones that were made more than this long ago are closed.
    """

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        #: (monotonic seconds at creation, store); the last one is in use.
        self._stores: list[tuple[float, TCPStore]] = []

    def make(self) -> TCPStore:
        """Opens a new store on a free port, listening on all addresses of this host. Blocks: no."""
        store, now = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), time.monotonic()
        last = self._stores[-1:]
        kept = [one for one in self._stores[:-1] if now - one[0] < self.keep_s]
        self._stores = [*kept, *last, (now, store)]
        return store
