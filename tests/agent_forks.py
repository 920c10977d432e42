"""Agents of tests as forks of a process that has imported what they need.

A new interpreter for each of some thousand agents takes 0.15 to 0.2 s of processor time, and 0.4 s to wait for; a fork of
a process that has imported nothing else a tenth of that. It differs from an agent that is started in its parent alone:
who starts it gets an object that can be asked and waited for as a child can, but no exit status. Tests that look
at the process itself ask for the fixture ``started_agents``.

A process that imports this module asks for forks where the environment says who makes them.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, cast

from resiliency.agent import _start
from resiliency.agent._command import AGENT_FUNCTION, AGENT_WORD, import_path
from resiliency.agent.config import AgentConfig
from resiliency.agent.protocol import config_to_json
from resiliency.runtime.channel import receive, send
from resiliency.runtime.forked_function import run_function
from resiliency.testing.huge_pages import use_huge_pages

logger = logging.getLogger(__name__)

#: In the environment of a test, and of what it starts: the address of who forks.
VARIABLE = "RESILIENCY_TESTS_AGENT_FORKS"
#: Seconds for it to answer.
ANSWER_S = 30.0
PRELOAD = (AGENT_FUNCTION.partition(":")[0], "asyncio", "fsspec.implementations.local")

#: An agent is found by its folder in the list of processes, and can show no more words than this process has.
_ROOM = "." * 4096

_start_interpreter = _start._spawn


class ForkedAgent:
    """What of :class:`subprocess.Popen` is asked of an agent; status 0 stands for whatever it was."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end

    def poll(self) -> int | None:
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(AGENT_WORD, timeout or 0)
        return 0

    def kill(self) -> None:
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._end, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("agent %d had ended", self.pid)

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._end, select.POLLIN)
            if poller.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = 0
                os.close(self._end)
        return self.returncode

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._end)


def _spawn(config: AgentConfig, output: IO[bytes], log: Path) -> Any:
    """An agent that listens, None when another one does; else the original, which finds out why there is none."""
    agent = _fork(os.environ[VARIABLE], config, output) if os.environ.get(VARIABLE) else None
    if agent is None and not (os.environ.get(VARIABLE) and _is_served(config.address)):
        return _start_interpreter(config, output, log)
    return agent


def _is_served(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(address) == 0


def _fork(address: str, config: AgentConfig, output: IO[bytes]) -> ForkedAgent | None:
    request = {
        "function": AGENT_FUNCTION,
        "arguments": [config_to_json(config)],
        "words": [AGENT_WORD, config.local.address],
        "path": import_path(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
    }
    ready, ready_child = os.pipe()
    with os.fdopen(ready, "rb", buffering=0) as listens:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(ANSWER_S)
                connection.connect("\0" + address)
                send(connection, request, [output.fileno(), ready_child])
                answer = receive(connection)
        except OSError as error:
            logger.warning("no agent was forked at %s: %s", address, error)
            return None
        finally:
            os.close(ready_child)
        if answer is None:
            return None
        message, (end,) = answer
        agent = ForkedAgent(message["pid"], end)
        return agent if _start._wait(listens) else None


class AgentForks:
    """Owns the process that forks. It ends with this one."""

    def __init__(self) -> None:
        self.address = f"resiliency-tests-{os.getpid()}-{secrets.token_hex(4)}"
        root = str(Path(__file__).parents[1])
        # Those who ask connect to a socket that is there already, and wait.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), _ROOM],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(listener.fileno(),),
                cwd=root,
                env={**os.environ, "PYTHONPATH": root},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def _serve(listener: socket.socket) -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    use_huge_pages()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the status of an agent
    poller = select.poll()
    for fd in (0, listener.fileno()):
        poller.register(fd)
    while True:
        found = {fd for fd, _ in poller.poll()}
        if 0 in found:
            return  # its owner is gone
        connection, _ = listener.accept()
        with connection:
            try:
                _answer(connection, listener)
            except OSError as error:  # who asked was killed, or the agent has ended already: the next one asks, too
                print(f"an agent could not be handed over: {error}", file=sys.stderr)


def _answer(connection: socket.socket, listener: socket.socket) -> None:
    received = receive(connection)
    if received is None:
        return
    request, fds = received
    try:
        child = os.fork()
        if child == 0:
            try:
                listener.close()
                connection.close()
                run_function(request, fds)
            finally:
                os._exit(1)  # what fails before the function is called must not go on as a second server
        fds = [*fds, os.pidfd_open(child)]
        send(connection, {"pid": child}, fds[-1:])
    finally:
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
else:
    _start._spawn = cast(Any, _spawn)
