"""What a signal's handler has raised, told from errors of the code in which it was raised."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from resiliency.launch.interruption import raised_by_a_handler


class Handler:
    def __call__(self, *_: Any) -> None:
        raise OSError("of the handler")

    def method(self, *_: Any) -> None:
        self()


def function(*_: Any) -> None:
    Handler()()


HANDLERS = {
    "function": function,
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(function, 1),
    "partial of a partial of a method": functools.partial(functools.partial(Handler().method, 1), 2),
}


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    old = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, old)


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_handler_has_raised_is_told_from_other_errors(handler: str) -> None:
    signal.signal(signal.SIGUSR2, HANDLERS[handler])
    with pytest.raises(OSError, match="of the handler") as caught:
        signal.raise_signal(signal.SIGUSR2)
    assert raised_by_a_handler(caught.value)
    with pytest.raises(ValueError, match="no") as own:
        raise ValueError("no")
    assert not raised_by_a_handler(own.value)


@pytest.mark.parametrize("kind", ["named", "any", "method"])
def test_a_handler_that_has_uninstalled_itself(kind: str) -> None:
    def named(number: int, frame: Any) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        function()

    class Once:
        def method(self, number: int, frame: Any) -> None:
            named(number, frame)

    handlers = {"named": named, "any": lambda *arguments: named(*arguments), "method": Once().method}
    signal.signal(signal.SIGUSR2, handlers[kind])
    with pytest.raises(OSError, match="of the handler") as caught:
        signal.raise_signal(signal.SIGUSR2)
    assert raised_by_a_handler(caught.value)


def test_ctrl_c_is_a_handlers() -> None:
    assert raised_by_a_handler(KeyboardInterrupt())


def test_other_threads_run_no_handlers() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(raised_by_a_handler(KeyboardInterrupt())))
    thread.start()
    thread.join(10)
    assert found == [False]
