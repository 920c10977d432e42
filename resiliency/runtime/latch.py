"""An event in which a thread may be interrupted at any moment."""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Latch"]


class Latch:
    """As :class:`threading.Event`, for the thread that runs the handlers of signals.

    An Event enters a lock in Python code. When Ctrl-C comes there, nobody leaves it, and every thread that then sets
    the Event, or waits for it, hangs. Here each waiter has a lock of its own, which nobody else waits for.

    Threads: any.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Wakes the waiters; when a signal interrupts it, some of them only once their time is over. Blocks: no."""
        self._set = True
        for waiter in list(self._waiters):
            with suppress(RuntimeError):  # another thread has woken it
                waiter.release()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float) -> bool:
        """True once it is set. Blocks: up to ``timeout`` seconds."""
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._set:  # after the append, so that no set is missed
                waiter.acquire(timeout=max(0.0, timeout))
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)
        return self._set
