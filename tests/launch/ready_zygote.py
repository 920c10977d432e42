"""A zygote of a launcher under test that need not import torch and Lightning: they are there when it begins.

``resiliency run`` starts an interpreter for its zygote, and seconds pass until that has imported what ranks need. A
launcher under test is itself a fork of a process that has imported it all, and so can be its zygote. What an interpreter
of its own has that this one has not is tested where launchers are started "not forked", and by those tests that kill a
zygote: the next one is an interpreter.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from resiliency.launch import standby, zygote
from resiliency.runtime.channel import pair, receive, send
from resiliency.runtime.command_line import show_command_line
from resiliency.settings import all_variables, replace_variables

__all__ = ["Child", "end_as_interpreter", "keep_only", "prepare_zygote", "take_environment"]

#: Above all numbers that a file descriptor must have.
_HIGH = 512


def prepare_zygote() -> None:
    """Forks this process, a launcher that has not begun; the first zygote that it starts will be that fork.

    Forked before it begins, because then it runs one thread, with nothing on the stack and no handlers of signals.
    """
    mine, theirs = pair()
    pid = os.fork()
    if pid == 0:
        mine.close()
        end_as_interpreter(lambda: _wait_to_begin(theirs))
    theirs.close()
    start_interpreter = zygote.start_interpreter

    def begin(fds: Sequence[int], options: Sequence[str], environment: Mapping[str, str]) -> Any:
        zygote.start_interpreter = start_interpreter
        send(mine, {"options": list(options), "environment": dict(environment)}, fds)
        mine.close()
        return Child(pid)

    zygote.start_interpreter = begin


class Child:
    """As much of ``subprocess.Popen`` as is asked of what was forked here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            select.select([pidfd], [], [], timeout)
            os.close(pidfd)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _wait_to_begin(end: Any) -> None:
    received = receive(end)
    if received is None:  # a launcher that has ended, or that needs no zygote
        return
    request, fds = received
    end.close()
    os.setsid()
    _close_all_but(fds)
    take_environment(request["environment"])
    for name, fd in (("stdout", 1), ("stderr", 2)):  # as with ``python -u``
        setattr(sys, name, io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True))
        setattr(sys, f"__{name}__", getattr(sys, name))
    arguments = [*map(str, fds), *request["options"]]
    show_command_line([sys.executable, "-u", "-c", "a fork", *arguments])
    standby.main(arguments)


def take_environment(environment: Mapping[str, str], *, script: str = "") -> None:
    """And imports from where an interpreter would with it, that was given a script in this folder."""
    given = [*all_variables().get("PYTHONPATH", "").split(os.pathsep), sys.path[0]]
    replace_variables(environment)
    folders = [script, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, folders), *(entry for entry in sys.path if entry not in given)]


def keep_only(fds: Sequence[int], numbers: Sequence[int], *, others: Sequence[int] = ()) -> list[int]:
    """Gives file descriptors these numbers, and closes all but these, those from 0 to 2, and the others, whose new numbers
    it returns."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in (*fds, *others)]
    _close_all_but(moved)
    for fd, number in zip(moved[: len(fds)], numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return moved[len(fds) :]


def _close_all_but(fds: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in fds:
            try:
                os.close(int(name))
            except OSError:  # the one of the listing
                continue


def end_as_interpreter(run: Callable[[], None]) -> NoReturn:
    """Runs it, and ends the process as an interpreter ends, except that it leaves to the kernel what is in memory."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
