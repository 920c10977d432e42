"""Counters that the ranks share, asked on a thread of their own, so that a store that does not answer stops nobody.

A call of a TCPStore has no deadline while the process that hosts the store is stopped, or its host is dead and sends no
reset: the store's own timeout does not end it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.launch.leaving import close_when_left

__all__ = ["SharedCounts"]

#: Seconds that :meth:`SharedCounts.count` waits for an answer.
_COUNT_S = 5.0
#: Seconds that the end of an attempt waits for an answer.
_LEFT_S = 1.0


@dataclass
class _Request:
    """One addition; its answer is for :meth:`SharedCounts.take`, or, when ``kept``, for who sent it."""

    topic: str
    amount: int
    kept: bool = False
    value: int = 0
    failure: RuntimeError | None = None
    done: bool = False


class SharedCounts:
    """Adds to counters and reads them, in order of the requests. The thread is started with the first request.

    Threads: any may call.

    Args:
        coordinator: has the counters. Its ``count`` is called on the thread only.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.rank = coordinator.rank
        self._coordinator = coordinator
        self._lock = threading.Condition()
        self._requests: deque[_Request] = deque()  # the first is being answered
        self._began = 0.0  # monotonic seconds when the first was sent
        self._values: dict[str, int] = {}
        self._failure: RuntimeError | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, topic: str, amount: int) -> None:
        """Requests to add to a counter, and its value, which :meth:`take` returns. Blocks: no.

        A reading (``amount`` 0) of a counter that is requested already is not requested twice.
        """
        with self._lock:
            if amount or not any(topic == other.topic for other in self._requests):
                self._send(_Request(topic, amount))

    def _send(self, request: _Request) -> bool:
        """Gives a request to the thread. The caller holds the lock. False: closed."""
        if self._closed:
            return False
        if not self._requests:
            self._began = time.monotonic()
        self._requests.append(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="resiliency-counts", daemon=True)
            close_when_left(self, lambda counts: counts.close(_LEFT_S))
            self._thread.start()
        self._lock.notify_all()
        return True

    @property
    def unanswered_s(self) -> float:
        """Seconds since the request was sent that waits for its answer; 0 when none does."""
        with self._lock:
            return self._unanswered_s()

    def _unanswered_s(self) -> float:
        return time.monotonic() - self._began if self._requests else 0.0

    def wait(self, timeout_s: float) -> bool:
        """Waits until all requests are answered; False when ``timeout_s`` passes first."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._requests, timeout_s)

    def take(self) -> dict[str, int]:
        """The counters whose values came since the last call. Blocks: no.

        Raises:
            RuntimeError: the store has failed a request since then (its host has exited); the values are dropped.
        """
        with self._lock:
            values, self._values = self._values, {}
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return values

    def count(self, topic: str, amount: int) -> int:
        """Adds to a counter and returns its new value. Blocks: up to 5 s; not once an earlier request has been without
        an answer for so long.

        Raises:
            RuntimeError: the store does not answer, or fails. The amount may still be added later.
        """
        with self._lock:
            left = _COUNT_S - self._unanswered_s()
            request = _Request(topic, amount, kept=True)
            if left > 0 and self._send(request):
                self._lock.wait_for(lambda: request.done, left)
            if not request.done:
                raise RuntimeError(f"the job's store has not answered for {_COUNT_S:.0f} s")
            if request.failure is not None:
                raise request.failure
            return request.value

    def close(self, timeout_s: float) -> None:
        """Waits for the answers and ends the thread. A thread whose store never answers is left; it is a daemon."""
        with self._lock:
            if self._thread is None:
                self._closed = True
                return
            done = self._lock.wait_for(lambda: not self._requests, timeout_s)
            self._closed = True
            self._lock.notify_all()
        if done:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._requests or self._closed)
                if self._closed:
                    return
                request = self._requests[0]
                self._began = time.monotonic()
            failure: RuntimeError | None = None
            try:
                request.value = self._coordinator.count(request.topic, request.amount)
            except RuntimeError as error:  # what every torch store raises
                failure = error
            with self._lock:
                self._requests.popleft()
                request.done, request.failure = True, failure
                if not request.kept:
                    if failure is None:
                        self._values[request.topic] = request.value
                    else:
                        self._failure = failure
                self._lock.notify_all()
