"""Commands of this package that a process under test starts, as forks of it.

``resiliency run --spares`` starts a supervisor, and a monitor and a launcher for each host: interpreters, of which each
launcher imports torch, and its zygote Lightning, too, for seconds. A process under test is itself a fork of
one that has imported it all, and so can be what it starts: it forks a helper before it begins, when it runs one thread,
has nothing open and no handlers of signals, and the helper forks its children when they are wanted. They are children of
the process under test, not of the helper.

What an interpreter of its own has that these have not is tested where commands are started "not forked".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from resiliency.cli import __main__ as command_line
from resiliency.cli.main import main
from resiliency.monitor import launcher_process
from resiliency.runtime.command_line import show_command_line
from resiliency.testing.hosts import local_processes
from resiliency.testing.hosts.namespaces import _CLONE_NEWNET, _call, _own
from tests.launch.fork_helper import ForkHelper
from tests.launch.ready_zygote import Child, end_as_interpreter, keep_only, prepare_zygote, take_environment

__all__ = ["COMMAND", "prepare_commands"]

COMMAND = [sys.executable, "-m", "resiliency.cli"]
_SHELL = launcher_process._SHELL


def prepare_commands(words: Sequence[str]) -> None:
    """Makes this process, a command with these words that has not begun, start forks instead of interpreters."""
    starts_hosts = words[0] == "run" and "--spares" in words
    if starts_hosts:
        _import_what_hosts_need()
    if starts_hosts or words[0] == "host-monitor":
        _fork_helper()
    elif words[0] == "run":
        prepare_zygote()


def _import_what_hosts_need() -> None:
    """Once for all of them."""
    import aiohttp.web  # noqa: F401

    import resiliency.cli.host_monitor
    import resiliency.cli.supervisor
    import resiliency.monitor.host_monitor
    import resiliency.supervisor.service  # noqa: F401


def _fork_helper() -> None:
    helper = ForkHelper(_run)

    def popen(
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        start_new_session: bool,
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
    ) -> _Child:
        begins_later = list(words[: len(_SHELL)]) == _SHELL
        command = list(words[len(_SHELL) :] if begins_later else words)
        assert command[: len(COMMAND)] == COMMAND and start_new_session, words
        request = {"words": command[len(COMMAND) :], "environment": dict(env), "numbers": list(pass_fds)}
        begin, go = os.pipe()
        network = _own()
        child = _Child(helper.fork({**request, "cwd": os.getcwd()}, [network, begin, *pass_fds]), go)
        os.close(network)
        os.close(begin)
        if not begins_later:
            child.stdin.write(b"go\n")
            child.stdin.close()
        return child

    forks = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    for module in (local_processes, launcher_process):
        module.subprocess = forks  # type: ignore[attr-defined]


class _Child(Child):
    """Begins when it is told to by its input, as the shell in front of a launcher."""

    def __init__(self, pid: int, go: int) -> None:
        super().__init__(pid)
        self.stdin = os.fdopen(go, "wb", buffering=0)


def _run(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    os.setsid()
    network, begin, *given = fds
    _call("setns", network, _CLONE_NEWNET)
    (begin,) = keep_only(given, request["numbers"], others=[begin])
    os.chdir(request["cwd"])
    take_environment(request["environment"], script=request["cwd"])
    words = request["words"]
    sys.argv = [command_line.__file__, *words]
    prepare_commands(words)
    show_command_line([*COMMAND, *words])
    if not os.read(begin, 3):
        os._exit(1)  # who started it was killed before it had written down that it did
    os.close(begin)
    end_as_interpreter(lambda: sys.exit(main(words)))
