"""The processes of a local cluster: each has a process group of its own, and their ends are waited for without
polling."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from resiliency.settings import child_environment

__all__ = ["LocalProcess", "SignalCount", "end_all", "end_tree", "handled_by", "signal_all", "start", "wait_for_any"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds that processes have to end by themselves after the job has ended or after a signal, before they are killed.
_END_TIMEOUT_S = 40.0


@dataclass
class LocalProcess:
    """A process that was started.

    Attributes:
        number: of the host; None: it is the supervisor.
    """

    name: str
    number: int | None
    popen: subprocess.Popen[bytes]
    pidfd: int


class SignalCount:
    """Counts a signal, and makes its arrival something that :func:`wait_for_any` can wait for. Thread: the main one."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self.fd, self._end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> SignalCount:
        self._before = signal.signal(self._number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(self._number, self._before)
        os.close(self.fd)
        os.close(self._end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):  # the pipe is full: thousands of signals are counted already
            os.write(self._end, b".")

    def take(self) -> int:
        """How often the signal has come since the last call, up to 4096."""
        with suppress(BlockingIOError):
            return len(os.read(self.fd, 4096))
        return 0


def start(
    name: str, number: int | None, words: Sequence[str], variables: Mapping[str, str], fds: Sequence[int] = ()
) -> LocalProcess:
    """Starts ``resiliency`` with these arguments, additional environment variables, and inherited descriptors."""
    popen = subprocess.Popen(
        [sys.executable, "-m", "resiliency.cli", *words],
        env=child_environment() | dict(variables),
        start_new_session=True,
        pass_fds=fds,
    )
    logger.info("%s is process %d", name, popen.pid)
    return LocalProcess(name, number, popen, os.pidfd_open(popen.pid))


def wait_for_any(processes: Sequence[LocalProcess], timeout_s: float | None, *fds: int) -> None:
    """Waits until a process has ended or a descriptor is readable. Blocks: up to ``timeout_s``; None: for ever."""
    poll = select.poll()
    for fd in [*fds, *(one.pidfd for one in processes)]:
        poll.register(fd, select.POLLIN)
    poll.poll(None if timeout_s is None else timeout_s * 1000)


def signal_all(processes: Sequence[LocalProcess], number: int) -> None:
    for one in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(one.pidfd, number)


def end_all(running: list[LocalProcess]) -> None:
    """Ends the processes that still run, and empties the list. Blocks: up to 80 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if number is signal.SIGTERM:
            signal_all(running, number)
        else:
            for one in running:  # together with the processes that it has started
                with suppress(ProcessLookupError):
                    os.killpg(one.popen.pid, number)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while running and time.monotonic() < deadline:
            wait_for_any(running, deadline - time.monotonic())
            for one in [one for one in running if one.popen.poll() is not None]:
                running.remove(one)
                os.close(one.pidfd)


def end_tree(pid: int, timeout_s: float) -> None:
    """Ends a process that is no child of this one; after the timeout kills what is left of it and of its
    descendants."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        tree = [first, *first.children(recursive=True)]
        first.terminate()
        _, left = psutil.wait_procs(tree, timeout=timeout_s)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles the signals that ask a process to end, while the context is open."""
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
