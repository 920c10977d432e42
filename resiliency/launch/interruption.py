"""Tells what a signal's handler has raised from an error of the code in which it was raised."""

from __future__ import annotations

import functools
import signal
import threading
import traceback
from types import CodeType

__all__ = ["raised_by_a_handler"]


def raised_by_a_handler(error: BaseException) -> bool:
    """True when a signal's handler raised this error, as Ctrl-C does: it came between two instructions of the main
    thread, says nothing about what that thread did, and must reach the program. Thread: any; the one that got it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: object) -> CodeType | None:
    """What runs when this object is called; None for one that is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for one in (handler, getattr(handler, "__func__", None), getattr(type(handler), "__call__", None)):  # noqa: B004
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
