"""Retries with growing random pauses, a number of attempts and a deadline. No I/O, no fsspec."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GaveUp", "Retry"]

T = TypeVar("T")


class GaveUp(Exception):
    """Raised when no further call is made; the last failure is ``__cause__``.

    Attributes:
        tries: calls made.
        seconds: from the first call to now.
        stopped: True when ``pause`` asked to stop.
    """

    def __init__(self, *, tries: int, seconds: float, stopped: bool) -> None:
        super().__init__(f"{tries} attempt{'s' if tries > 1 else ''} in {seconds:.1f} s")
        self.tries = tries
        self.seconds = seconds
        self.stopped = stopped


class Retry:
    """Calls again after a pause. The longest pause doubles each time; each is a random length between half of it and
    all.

    Thread: any; holds no state between calls of :meth:`run`.

    Args:
        attempts: calls at most, >= 1.
        deadline_s: no call starts later than this many seconds after the first.
        first_s: longest first pause, seconds.
        most_s: longest pause, seconds.
        pause: waits that many seconds; a true result means stop trying (an Event's ``wait``).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        attempts: int,
        deadline_s: float,
        first_s: float,
        most_s: float = 30.0,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._first_s = first_s
        self._most_s = most_s
        self._pause = threading.Event().wait if pause is None else pause
        self._clock = clock

    def run(self, call: Callable[[], T], *, retryable: Callable[[Exception], bool]) -> T:
        """The result of the first call that returns. Blocks up to: ``deadline_s`` and one call.

        Raises:
            GaveUp: a call failed permanently, or the attempts or the time are used up; ``__cause__`` is that call's
                error.
        """
        begin = self._clock()
        limit_s = self._first_s
        tries = 0
        while True:
            try:
                tries += 1
                return call()
            except Exception as error:  # Boundary: client libraries raise anything; the caller says what is retryable.
                delay_s = random.uniform(limit_s / 2, limit_s)
                spent_s = self._clock() - begin
                hopeless = not retryable(error) or tries >= self._attempts or spent_s + delay_s > self._deadline_s
                stopped = not hopeless and bool(self._pause(delay_s))
                if hopeless or stopped:
                    raise GaveUp(tries=tries, seconds=self._clock() - begin, stopped=stopped) from error
                limit_s = min(limit_s * 2, self._most_s)
