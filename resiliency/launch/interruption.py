"""Tells what a signal's handler has raised from an error of the code in which it was raised."""

from __future__ import annotations

import functools
import inspect
import itertools
import signal
import threading
import traceback
from types import CodeType, FrameType

__all__ = ["raised_by_a_handler"]


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
