"""The launcher's side of the zygote: starts it, and asks it for ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from resiliency.errors import ResiliencyError
from resiliency.launch.fresh import parse_command
from resiliency.runtime.channel import pair, receive, send
from resiliency.runtime.processes import ForkedProcess, mark_own
from resiliency.settings import package_root

__all__ = ["CannotFork", "HostZygote"]

logger = logging.getLogger(__name__)

#: Omits the working directory from ``sys.path``, because a user's file there may have the name of a module.
_BOOTSTRAP = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; sys.path.append(sys.argv[1]); "
    "from resiliency.launch.standby import main; sys.path.pop(); main(sys.argv[2:])"
)
#: Seconds that a zygote's imports may take.
_IMPORT_TIMEOUT_S = 120.0
#: Seconds that a standby may take to answer.
_START_TIMEOUT_S = 20.0
#: Seconds after which a wait is logged.
_SAY_S = 10.0


class CannotFork(ResiliencyError):
    """A fork cannot run this rank, so it must start as a fresh interpreter; the message says why."""


class HostZygote:
    """The process that forks ranks. Thread: one. Call :func:`~resiliency.runtime.processes.become_subreaper` first.

    Args:
        modules: to import, in this order.
        standbys: number of standbys to keep ready.
        environment: of the zygote: torch and OpenMP read parts of it at import.
        words: command line of the ranks, shown by ``ps``.
    """

    def __init__(
        self, modules: Sequence[str], *, standbys: int, environment: Mapping[str, str], words: Sequence[str]
    ) -> None:
        self._control, control = pair()
        self._requests, requests = pair()
        self._problem = ""
        self._silent = False
        self._ready = False
        self._modules: Mapping[str, str] = {}
        options = [str(os.getpid()), str(standbys), ",".join(modules), *words]
        with control, requests:
            self._process = start_interpreter([control.fileno(), requests.fileno()], options, environment)
        mark_own(self._process)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The zygote's process, to wait for its end."""
        return self._process

    def fds(self) -> list[int]:
        """File descriptors that become readable when the result of :meth:`is_warm` may change; empty once that is
        known."""
        return [] if self._ready or self._problem else [self._control.fileno()]

    def is_warm(self) -> bool:
        """True when the zygote can fork at once. Blocks: no."""
        if self.fds() and select.select([self._control], [], [], 0)[0]:
            with suppress(CannotFork):  # reported when a rank is to be started
                self._wait_until_ready()
        return self._ready and not self.has_died

    @property
    def has_died(self) -> bool:
        """True when another zygote is worth trying: this one could fork, and has ended or does not answer; or a signal
        ended it before it could."""
        if not self._ready:
            return bool(self._problem) and (self._process.poll() or 0) < 0
        return self._silent or self._process.poll() is not None

    def start(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> ForkedProcess:
        """Starts a rank as ``subprocess.Popen(words, env=environment, start_new_session=True)`` does.

        Blocks: until the rank's process has begun, up to 20 s; before the first rank also until the zygote has imported
            everything, up to 120 s.

        Raises:
            CannotFork: this command cannot run in a fork, or this zygote cannot fork.
        """
        command = parse_command(words)
        if isinstance(command, str):
            raise CannotFork(command)
        self._wait_until_ready()
        cwd = os.getcwd()
        shadowed = self._shadowed(command.import_folder(cwd))
        if shadowed:
            raise CannotFork(
                f"{shadowed} beside the script has the name of a module that is imported in advance, and would be"
                " imported in its place"
            )
        request = {
            "command": dataclasses.asdict(command),
            "environment": dict(environment),
            "cwd": cwd,
            "words": list(words),
            **_inherited_signals(),
        }
        mine, reply = pair()
        with mine:
            with reply:
                fds = [reply.fileno(), 1 if stdout is None else stdout, 2 if stderr is None else stderr]
                try:
                    send(self._requests, request, fds)
                except OSError as error:
                    raise CannotFork(f"the standbys are gone ({error})") from error
            return ForkedProcess(self._answer(mine))

    def start_function(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Starts what :func:`~resiliency.runtime.forked_function.call_in_fork` asks for. Blocks: no.

        Raises:
            CannotFork: this zygote cannot fork, or not yet.
        """
        if not self._ready and not select.select([self._control], [], [], 0)[0]:
            raise CannotFork("it imports still")
        self._wait_until_ready()
        try:
            send(self._requests, request, fds)
        except OSError as error:
            raise CannotFork(f"the standbys are gone ({error})") from error

    def _answer(self, mine: socket.socket) -> int:
        try:
            answer = self._receive(mine, _START_TIMEOUT_S)
        except CannotFork:
            self._silent = True  # so that the other ranks of this attempt do not wait for the zygote, too
            raise
        if answer is None:
            raise CannotFork("the standby ended before it began")
        return int(answer["pid"])

    def _receive(self, connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None when the other end is closed. Blocks: up to ``timeout_s``.

        Raises:
            CannotFork: no message came in time.
        """
        ready = select.select([connection], [], [], _SAY_S)[0]
        if not ready:
            logger.warning(
                "waiting for process %d, which forks ranks, for %.0f s so far (at most %.0f): it imports what ranks"
                " need, or is busy; --no-standby starts ranks without it",
                self._process.pid,
                _SAY_S,
                timeout_s,
            )
            ready = select.select([connection], [], [], timeout_s - _SAY_S)[0]
        if not ready:
            raise CannotFork(f"the process that forks ranks does not answer (for {timeout_s:.0f} s)")
        try:
            received = receive(connection)
        except OSError as error:
            logger.debug("the connection to the process that forks ranks has ended: %s", error)
            return None
        return None if received is None else received[0]

    def _wait_until_ready(self) -> None:
        if self._ready:
            if self._silent:
                raise CannotFork("its standbys do not answer")
            if self.has_died:
                raise CannotFork(f"the zygote has ended ({self._process.returncode})")
            return
        if not self._problem:
            try:
                answer = self._receive(self._control, _IMPORT_TIMEOUT_S)
            except CannotFork as error:
                self._problem = str(error)
                raise
            if answer is None:
                self._problem = "the zygote ended while it imported"
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
            else:
                self._problem, self._modules = answer["problem"], answer["modules"]
                logger.debug("imported in advance in %.2f s: %s", answer["seconds"], len(self._modules))
        if self._problem:
            raise CannotFork(self._problem)
        self._ready = True

    def _shadowed(self, folder: str) -> str:
        """Name of a file or package in the folder that has the name of a module imported from elsewhere; "" for
        none."""
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name, _, ending = entry.name.partition(".")
                if self._modules.get(name, folder) == os.path.realpath(folder):
                    continue
                if ending in ("py", "so") or ending.endswith(".so") or _is_package(entry.path):
                    return entry.name
        return ""

    def close(self) -> None:
        """Ends the zygote and its standbys, but not the ranks. Idempotent. Blocks: up to 5 s."""
        self._control.close()
        self._requests.close()
        try:
            self._process.wait(0 if self._silent else 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


def start_interpreter(
    fds: Sequence[int], options: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts :func:`resiliency.launch.standby.main` in a fresh interpreter, which then imports everything.

    Args:
        fds: file descriptors that it inherits, passed as its first arguments in this order.
        options: its further arguments, and words that only ``ps`` shows.
    """
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOTSTRAP, package_root(), *map(str, fds), *options],
        pass_fds=fds,
        env=dict(environment),
        start_new_session=True,
    )


def _inherited_signals() -> dict[str, list[int]]:
    """Signals that this process ignores or blocks, which programs that it starts inherit."""
    return {
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }


def _is_package(path: str) -> bool:
    return os.path.exists(os.path.join(path, "__init__.py"))
