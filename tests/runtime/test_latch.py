"""The event of the copy: what a signal interrupts in one thread does not hang another."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from resiliency.runtime.latch import Latch


def test_it_is_an_event() -> None:
    latch = Latch()
    assert not latch.is_set() and not latch.wait(0) and not latch.wait(0.01)
    latch.set()
    latch.set()
    assert latch.is_set() and latch.wait(0)
    latch.clear()
    assert not latch.is_set() and not latch.wait(0) and not latch._waiters


def test_every_waiter_is_woken_whenever_it_comes() -> None:
    def look(latch: Latch, woken: list[bool]) -> None:
        woken.append(latch.wait(30))

    for _ in range(200):
        latch, woken, began = Latch(), list[bool](), time.monotonic()
        waiters = [threading.Thread(target=look, args=(latch, woken)) for _ in range(3)]
        setter = threading.Thread(target=latch.set)
        for thread in (*waiters[:2], setter, waiters[2]):
            thread.start()
        for thread in (*waiters, setter):
            thread.join(10)
        assert woken == [True] * 3 and time.monotonic() - began < 10


@pytest.fixture
def alarm() -> Iterator[None]:
    def handler(*_: object) -> None:
        raise InterruptedError

    old = signal.signal(signal.SIGALRM, handler)
    yield
    signal.signal(signal.SIGALRM, old)


def test_a_signal_that_interrupts_one_thread_hangs_no_other(alarm: None) -> None:
    """With threading.Event it does so, once in some hundred times."""
    for number in range(3000):
        latch = Latch()
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.00002 + number % 100 / 1e6)
            while True:
                latch.wait(0.00001)
                latch.set()
                latch.clear()
        other = threading.Thread(target=latch.set, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive() and latch.wait(10)
