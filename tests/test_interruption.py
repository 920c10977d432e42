"""What a signal's handler has raised, told from errors of the code in which it was raised."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from resiliency.interruption import lets_handlers_raise, raised_by_a_handler


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


@lets_handlers_raise
def swallows() -> str:
    """As code that takes an error of a file for a reason to go on."""
    try:
        signal.raise_signal(signal.SIGUSR2)
    except Exception:
        return "swallowed"
    return "nothing was raised"


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_handler_raises_leaves_the_function_as_it_was_raised(handler: str) -> None:
    signal.signal(signal.SIGUSR2, HANDLERS[handler])
    with pytest.raises(OSError, match="of the handler") as caught:
        swallows()
    assert type(caught.value) is OSError and caught.value.__context__ is None and caught.value.__cause__ is None
    assert raised_by_a_handler(caught.value), "who catches it could not tell"
    assert signal.getsignal(signal.SIGUSR2) == HANDLERS[handler]


def test_other_errors_and_results_are_as_without() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: None)
    assert swallows() == "nothing was raised"

    @lets_handlers_raise
    def raises() -> None:
        raise TimeoutError("of the function")

    with pytest.raises(TimeoutError, match="of the function"):
        raises()

    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR2, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        swallows()


def test_a_function_within_another_and_a_handler_that_is_set_meanwhile() -> None:
    def once(*_: Any) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        raise OSError("of the handler")

    signal.signal(signal.SIGUSR2, once)
    with pytest.raises(OSError, match="of the handler"):
        lets_handlers_raise(swallows)()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN, "what the handler has set is undone"
    assert swallows() == "nothing was raised"


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_while_handlers_are_put_back_raises_what_its_handler_raises(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = signal.signal, []

    def slow(number: int, handler: Any) -> Any:
        if handler is function and len(sent) < times:
            sent.append(number)
            signal.raise_signal(signal.SIGUSR1)
        return real(number, handler)

    before = signal.signal(signal.SIGUSR1, function)
    signal.signal(signal.SIGUSR2, function)
    try:
        monkeypatch.setattr(signal, "signal", slow)
        with pytest.raises(OSError, match="of the handler"):
            lets_handlers_raise(lambda: None)()
        assert len(sent) == times
        if times == 1:
            assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGUSR2) == function
        with pytest.raises(OSError, match="of the handler"):  # also by one that could not be put back
            signal.raise_signal(signal.SIGUSR2)
    finally:
        real(signal.SIGUSR1, before)


def test_on_other_threads_handlers_stay_as_they_are() -> None:
    signal.signal(signal.SIGUSR2, function)
    found = []
    look = lets_handlers_raise(lambda: found.append(signal.getsignal(signal.SIGUSR2)))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert found == [function]
