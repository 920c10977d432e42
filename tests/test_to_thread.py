"""A call on another thread, for which the main thread waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from resiliency.to_thread import to_thread


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def raises(*_: Any) -> None:
        raise TimeoutError("of the handler")

    old = signal.signal(signal.SIGUSR2, raises)
    yield
    signal.signal(signal.SIGUSR2, old)


def test_what_a_handler_raises_ends_the_wait_and_not_the_call() -> None:
    main, seen, go_on = threading.main_thread().ident or 0, list[str](), threading.Event()

    def call() -> None:
        try:
            signal.pthread_kill(main, signal.SIGUSR2)
            assert go_on.wait(10)
        except OSError:
            seen.append("taken for an error of a file")
        seen.append("ended")

    with pytest.raises(TimeoutError, match="of the handler"):
        to_thread(call, interrupted=go_on.set, patience_s=10)
    assert seen == ["ended"], "the caller has waited for the end of the call"


def test_what_the_function_returns_or_raises() -> None:
    def refuses() -> None:
        raise PermissionError(13, "no")

    assert to_thread(threading.current_thread).name == "resiliency-call"
    with pytest.raises(PermissionError, match="no"):
        to_thread(refuses)


def test_another_thread_than_the_main_one_calls_directly() -> None:
    found: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: found.append(to_thread(threading.current_thread)))
    thread.start()
    thread.join(10)
    assert found == [thread]
