"""Tells what a signal's handler has raised from an error of the code in which it was raised."""

from __future__ import annotations

import functools
import inspect
import itertools
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["lets_handlers_raise", "raised_by_a_handler"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _FromHandler(BaseException):
    """Carries what a handler has raised past all ``except Exception`` of the function that it interrupted."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Handlers:
    """The handlers of signals while one call of a function runs: what they raise is carried."""

    def __init__(self) -> None:
        self.active = True
        self._replaced: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # number -> before, now

    def replace(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                now = functools.partial(self._carry, handler)
                self._replaced[number] = handler, now
                signal.signal(number, now)

    def restore(self) -> None:
        self.active = False  # for those that a signal keeps this method from restoring
        for number, (before, now) in self._replaced.items():
            if signal.getsignal(number) is now:
                signal.signal(number, before)

    def _carry(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception as error:
            if not self.active:
                raise
            raise _FromHandler(error) from None


def lets_handlers_raise(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator for a function that handles errors of files, sockets and threads, and calls no code of users: what a
    signal's handler raises in it, often TimeoutError, which is an OSError, is taken for none of those.

    While the function runs on the main thread the handlers are replaced, so that what they raise is no Exception; the
    function then raises it as it was. Where it, or Ctrl-C, has led to another error, it is raised in place of that.
    Costs: about 0.1 ms a call.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        handlers, handled = _Handlers(), sys.exc_info()[1]
        try:
            try:
                handlers.replace()
                return function(*args, **kwargs)
            finally:
                handlers.restore()
        except BaseException as failure:
            handlers.restore()  # again: a signal may have come meanwhile
            # In Condition.wait, Ctrl-C makes the release of the lock fail.
            error = _interruption_behind(failure, handled)
            if error is None or error is failure:
                raise
        raise error

    return call


def _interruption_behind(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """What a handler has raised before ``error``, while it was not ``handled`` already; None: nothing."""
    left, seen = [error], {id(handled)}
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _FromHandler):
            return one.error
        if isinstance(one, KeyboardInterrupt):
            return one
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
    return None


def raised_by_a_handler(error: BaseException) -> bool:
    """True when a signal's handler raised this error, as Ctrl-C does: it came between two instructions of the main
    thread, says nothing about what that thread did, and must reach the program. Thread: any; the one that got it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code in handlers for frame in frames):
        return True
    # A handler that has uninstalled itself: it was given the frame that it interrupted.
    return any(_was_given(inner, outer) for outer, inner in itertools.pairwise(frames))


def _was_given(frame: FrameType, value: object) -> bool:
    """True when one of the arguments of the function of this frame is this value."""
    code = frame.f_code
    positional = code.co_varnames[: code.co_argcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][: bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in positional]
    given += [one for name in rest for one in frame.f_locals.get(name, ())]
    return any(one is value for one in given)


def _code_of(handler: object) -> CodeType | None:
    """What runs when this object is called; None for one that is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for one in (handler, getattr(handler, "__func__", None), getattr(type(handler), "__call__", None)):  # noqa: B004
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
