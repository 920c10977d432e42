"""Makes a forked process look like a newly started interpreter, and runs a script in it."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import importlib.machinery
import io
import os
import random
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from resiliency.settings import replace_variables

__all__ = ["ScriptCommand", "become_fresh", "parse_command", "run_script", "seed_anew"]


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """A command line of the form ``python [-u] [-m] target arguments``.

    Attributes:
        target: path of a script, or name of a module.
        is_module: ``target`` is a module.
        arguments: the script's own arguments.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]

    def import_folder(self, cwd: str) -> str:
        """The folder that the interpreter puts first in ``sys.path``."""
        if self.is_module:
            return cwd
        return os.path.dirname(os.path.realpath(os.path.join(cwd, self.target)))


def parse_command(words: Sequence[str]) -> ScriptCommand | str:
    """The script or module that a command line runs; or, as text, why a forked process cannot run it."""
    program, *rest = words
    if os.path.realpath(program) != os.path.realpath(sys.executable):
        return f"{program} is not this interpreter"
    while rest and rest[0] in ("-u", "-m"):
        word = rest.pop(0)
        if word == "-m" and rest:
            return ScriptCommand(target=rest[0], is_module=True, arguments=tuple(rest[1:]))
    if not rest or rest[0].startswith("-"):
        return f"it has options of the interpreter: {' '.join(rest[:1])}"
    if not rest[0].endswith(".py"):
        return f"{rest[0]} is not a .py file"
    return ScriptCommand(target=rest[0], is_module=False, arguments=tuple(rest[1:]))


def become_fresh(
    command: ScriptCommand,
    *,
    environment: dict[str, str],
    cwd: str,
    words: Sequence[str],
    ignored: Sequence[int] = (),
    blocked: Sequence[int] = (),
) -> None:
    """Undoes what this process inherited by the fork, as far as a script can see it.

    Thread: the only one. File descriptors stay as they are. What else stays: imported modules, and the warnings filters
        that they set.

    Args:
        ignored: signals that the launcher ignores, which a program that it starts would inherit; all others get the
            interpreter's usual handling.
        blocked: signals that the launcher blocks, inherited in the same way.
    """
    replace_variables(environment)
    os.chdir(cwd)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        default: Any = signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ, *ignored) else signal.SIG_DFL
        if number == signal.SIGINT and number not in ignored:
            default = signal.default_int_handler
        signal.signal(number, default)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    seed_anew()
    sys.argv = [command.target, *command.arguments]
    sys.orig_argv[:] = words
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, command.import_folder(cwd))
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main


def seed_anew() -> None:
    """Seeds Python, numpy and torch from the system's random source, as in a new interpreter."""
    random.seed()  # Python does this at a fork, but not when a process begins another attempt
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()


def run_script(command: ScriptCommand) -> None:
    """Runs the script in ``__main__``, as the interpreter does.

    An exception of the script ends the process with status 1; its traceback is shown without frames of this library.

    Raises:
        SystemExit, KeyboardInterrupt: raised by the script.
    """
    try:
        if command.is_module:
            run: Any = runpy.__dict__["_run_module_as_main"]  # the function behind ``python -m``
            run(command.target, alter_argv=True)
            return
        path = os.path.join(os.getcwd(), command.target)  # not normalised, because the interpreter does not either
        main = sys.modules["__main__"]
        main.__file__ = path
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the user's script
    except SystemExit as error:
        if isinstance(error.code, str):
            _tell_launcher(error)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Boundary: whatever the user's script raises.
        _end_as_failed(error)


def _tell_launcher(error: BaseException) -> None:
    """Writes torch's error file, as its ``record`` does: only there the launcher can read why this rank ended."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # torch, for a script without it

    with suppress(OSError):
        get_error_handler().record_exception(error)


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    return trace


def _end_as_failed(error: BaseException) -> NoReturn:
    """Prints the error and does what the interpreter does at its end, except for tearing down what was imported before
    the fork: that would copy all of it, for a quarter of a second, while the next attempt waits.
    """
    trace = error.__traceback__ = _without_ours(error.__traceback__)
    threads: Any = threading
    ends = (
        lambda: _tell_launcher(error),
        lambda: sys.excepthook(type(error), error, trace),
        threads._shutdown,
        atexit._run_exitfuncs,
    )
    for end in ends:
        try:
            end()
        except BaseException:  # Boundary: a hook of the script that fails; the rest is done nevertheless.
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, broken or closed
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(1)
