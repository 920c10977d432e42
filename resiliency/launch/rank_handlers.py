"""Handlers through which torch's launcher sees the processes of ranks: it makes, asks and closes them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol, cast

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from resiliency.runtime.processes import mark_own

__all__ = ["Kept", "RankHandler", "StillRunning", "handlers_made_by", "kill_group"]

#: Seconds for a process to end after SIGKILL; it takes longer only in uninterruptible sleep.
_KILL_TIMEOUT_S = 5.0


class RankStarter(Protocol):
    def start_rank(self, words: Sequence[str], environment: dict[str, str], *output: IO[str] | None) -> Any: ...


class RankHandler(SubprocessHandler):
    """Torch's handler, around a process that the agent provides, or else one that torch starts."""

    def __init__(self, agent: RankStarter, *arguments: Any, **named: Any) -> None:
        self._agent = agent
        super().__init__(*arguments, **named)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        self._command = args, env
        process = self._agent.start_rank(args, env, self._stdout, self._stderr)
        if process is None:
            process = super()._popen(args, env)
            mark_own(process)
        return process

    def start_again(self) -> None:
        """Starts another process in place of the one that has ended."""
        self.proc = self._popen(*self._command)

    def goes_on(self) -> None:
        """Tells torch that the rank has ended well, while its process goes on to the next attempt."""
        self.proc = cast(Any, Kept(self.proc.pid))
        for file in (self._stdout, self._stderr):
            if file is not None:
                file.close()


class Kept:
    """Stands in, for torch, for a process that goes on to the next attempt: looks as if it had ended with status 0."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0


class StillRunning:
    """Stands in for a process that was seen running: ``poll`` says so until torch has waited for its end."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.pid = process.pid
        self._waited = False

    def poll(self) -> int | None:
        return cast(int | None, self.process.poll()) if self._waited else None

    def wait(self, timeout: float | None = None) -> int:
        code = cast(int, self.process.wait(timeout))
        self._waited = True
        return code


def kill_group(process: Any) -> None:
    """Kills a rank and its process group. Does nothing when the rank has ended. Blocks: up to 5 s."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_TIMEOUT_S)


@contextmanager
def handlers_made_by(make: Callable[..., SubprocessHandler]) -> Iterator[None]:
    """Replaces, within the context, the function that torch looks up to make handlers when it starts ranks."""
    module: Any = multiprocessing.api
    before = module.get_subprocess_handler
    module.get_subprocess_handler = make
    try:
        yield
    finally:
        module.get_subprocess_handler = before
