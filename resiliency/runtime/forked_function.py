"""Runs a function in a new process that ``resiliency run`` forks from one with the imports already done."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from resiliency.runtime.channel import send
from resiliency.runtime.command_line import show_command_line
from resiliency.settings import LAUNCHER_VARIABLE, all_variables, replace_variables

__all__ = ["call_in_fork", "run_function"]


def call_in_fork(
    function: str, arguments: Sequence[str], *, words: Sequence[str], path: Sequence[str], output: int, extra: int
) -> bool:
    """Asks the launcher to call ``function([*arguments, str(extra)])`` in a new process with its own session, as if
    this process had started an interpreter for it. Returns False where there is no launcher. Blocks: no.

    The new process is not a child of this one, and outlives both it and the launcher. If the fork fails, every copy of
    ``extra`` but the caller's is closed, which a reader at its other end notices.

    Args:
        function: "module:function".
        words: command line that ``ps`` shows for the process.
        path: ``sys.path`` of the process.
        output: file descriptor for its standard output and error.
        extra: a file descriptor to hand over; the process gets it under another number, as its last argument.
    """
    address = all_variables().get(LAUNCHER_VARIABLE, "")
    if not address:
        return False
    request = {
        "kind": "fork",
        "number": 0,
        "function": function,
        "arguments": list(arguments),
        "words": list(words),
        "path": list(path),
        "environment": all_variables(),
        "cwd": os.getcwd(),
    }
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect("\0" + address)
            send(connection, request, [output, extra])
    except OSError:
        return False
    return True


def run_function(request: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Runs the function in the forked process, and ends the process. See :func:`call_in_fork`."""
    output, extra = fds
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((nothing, output, output)):
        os.dup2(fd, number)
    os.close(nothing)
    os.close(output)
    replace_variables(request["environment"])
    with suppress(FileNotFoundError):  # a deleted folder must not prevent the process
        os.chdir(request["cwd"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.path[:] = request["path"]
    code = 1
    try:
        if show_command_line(request["words"]):
            module, _, name = request["function"].partition(":")
            code = int(getattr(importlib.import_module(module), name)([*request["arguments"], str(extra)]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # Boundary: printed as the interpreter prints it.
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the interpreter's teardown, which takes half a second for all that was imported
