"""The stores that this launcher keeps for attempts, one each."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import TCPStore

__all__ = ["AttemptStores"]


class AttemptStores:
    """Thread: one.

    A store for each attempt: gloo would read addresses of the attempt before from a store that is kept, and connect to
    processes that are gone. Stores of earlier attempts are kept for a while: a rank that was to leave before it had
    connected tries to for half an hour where there is no store, and cannot be interrupted; with one it leaves at once.

    Args:
        keep_s: how long a rank may take to leave.
    """

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        #: With the monotonic seconds of their begin; the last one is in use.
        self._stores: list[tuple[float, TCPStore]] = []

    def make(self) -> TCPStore:
        """A new one, on a free port of all addresses of this host. Blocks: no."""
        store, now = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), time.monotonic()
        last = self._stores[-1:]
        kept = [one for one in self._stores[:-1] if now - one[0] < self.keep_s]
        self._stores = [*kept, *last, (now, store)]
        return store
