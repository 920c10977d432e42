"""Agents of tests as forks of a process that has imported what they need, as ``resiliency run`` makes them.

A new interpreter for each of some thousand agents would be a quarter of the suite's processor time. What a test of the
start itself looks at is made by :func:`resiliency.agent._start.start_agent` as ever: tests ask for forks by a fixture.
A process that imports this asks where the environment says so.
"""

from __future__ import annotations

import gc
import importlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from resiliency.agent import _start
from resiliency.agent._command import AGENT_FUNCTION
from resiliency.launch.channel import receive
from resiliency.launch.forked_function import call_in_fork, run_function
from resiliency.settings import LAUNCHER_VARIABLE, child_environment

#: In the environment of a test, and of what it starts: where agents are forked.
VARIABLE = "RESILIENCY_TESTS_AGENT_FORKS"

PRELOAD = (
    AGENT_FUNCTION.partition(":")[0],
    "asyncio",
    "fsspec.implementations.local",
)


def _call_in_fork(*arguments: Any, **given: Any) -> bool:
    launched = LAUNCHER_VARIABLE in os.environ
    return call_in_fork(*arguments, **given, address="" if launched else os.environ.get(VARIABLE, ""))


class AgentForks:
    """Owns the process that forks. It ends with this one."""

    def __init__(self) -> None:
        self.address = f"resiliency-tests-{os.getpid()}-{secrets.token_hex(4)}"
        ready, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent_forks", self.address, str(theirs)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(theirs,),
            cwd=Path(__file__).parents[1],
            env=child_environment(str(Path(__file__).parents[1])),
        )
        os.close(theirs)
        with os.fdopen(ready, "rb") as end:
            assert end.read(1), "the process that forks agents has ended"

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _serve(address: str, ready: int) -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents
        os.write(ready, b"1")
        os.close(ready)
        poller = select.poll()
        for fd in (0, listener.fileno()):
            poller.register(fd)
        while True:
            found = {fd for fd, _ in poller.poll()}
            if 0 in found:
                return
            connection, _ = listener.accept()
            with connection:
                received = receive(connection)
            if received is None:
                continue
            request, fds = received
            if os.fork() == 0:
                listener.close()
                run_function(request, fds)
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
else:
    _start.call_in_fork = _call_in_fork  # type: ignore[attr-defined]
