"""Calls a function on another thread and waits for it, as :func:`asyncio.to_thread` does.

Python runs the handlers of signals on the main thread, between any two of its instructions. What one raises there
(Ctrl-C, a TimeoutError by ``signal.alarm``) would be taken for an error of the file or socket that is just being used.
So what handles such errors runs on another thread, and the main thread only waits. Blocking the signals meanwhile would
not do: the system then gives them to another thread of the process, and Python runs their handlers all the same.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["raised_by_a_handler", "to_thread"]

Result = TypeVar("Result")

#: Seconds that an interrupted caller waits for the call to end, so that it does not go on behind the caller's back.
_PATIENCE_S = 2.0


def to_thread(
    function: Callable[[], Result],
    *,
    interrupted: Callable[[], object] = lambda: None,
    patience_s: float = _PATIENCE_S,
) -> Result:
    """Calls ``function`` on another thread, and returns or raises what it does. Off the main thread, where no signal's
    handler runs, and where no thread can be started it calls it directly. Blocks: as long as the function; a thread's
    start is some 0.1 ms.

    When a signal's handler raises meanwhile, this is raised, and the call goes on.

    Args:
        interrupted: called first in this case.
        patience_s: most seconds that this waits for the call to end in this case.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()  # waits in C, without a lock of Python code
    results: list[Result] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # Boundary: raised by the caller.
            ended.put(error)
        else:
            ended.put(None)

    try:
        thread = threading.Thread(target=run, name="resiliency-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if thread.ident is not None:
                raise
            return function()  # the limit of threads is reached
        failure = ended.get()
    except BaseException:
        interrupted()
        with suppress(Empty):
            ended.get(timeout=patience_s)
        raise
    if failure is None:
        return results[0]
    try:
        raise failure
    finally:
        del failure  # else the error and this frame keep each other, and all frames of the call


def raised_by_a_handler(error: BaseException) -> bool:
    """Whether a handler of a signal has raised the error, as its traceback shows: for code on the main thread that must
    go on after any other error. A handler that is no function is not recognized."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
