"""Watches and ends processes by pidfd, which means the same process for ever, whereas process ids are reused."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from resiliency.errors import ResiliencyError

__all__ = [
    "ForkedProcess",
    "become_subreaper",
    "end_with_parent",
    "is_stopped",
    "mark_own",
    "pidfds_of",
    "reap_others",
    "wait_for_any",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds for a process to end after SIGKILL; it takes longer only in uninterruptible sleep.
_KILL_TIMEOUT_S = 5.0
#: Process id -> child whose exit status its starter collects; entries stay after that until :func:`mark_own` cleans up.
_own: dict[int, ForkedProcess | subprocess.Popen[Any]] = {}


def become_subreaper() -> None:
    """From now on orphaned descendants of this process become its children, so that it can wait for them.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """From now on this process gets a signal when the thread that forked it ends. It gets none if that thread has ended
    already: check ``os.getppid`` afterwards. Forks of this process do not inherit this.

    Args:
        number: the signal; 0: none any more.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class ForkedProcess:
    """A child of this process that :class:`subprocess.Popen` did not start, with the part of Popen's interface that
    torch's launcher uses. Thread: one.

    Attributes:
        pid: id of the process and of its process group.
        pidfd: becomes readable when the process ends.
        returncode: None while it runs; negative when a signal ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None
        mark_own(self)

    def poll(self) -> int | None:
        """The return code; None while it runs. After a failure, blocks up to 5 s until the rest of its group has ended.

        Raises:
            ResiliencyError: something else in this process took the exit status.
        """
        if self.returncode is None:
            try:
                ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                raise ResiliencyError(
                    f"process {self.pid} ended, and something else in this process took its exit status"
                ) from None
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                if code:
                    # Other processes of its group may hold a GPU or a port that the next attempt needs. Until its exit
                    # status is collected, the id cannot be reused, so it means this group.
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, signal.SIGKILL)
                os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
                os.close(self.pidfd)
                self.returncode = code
                if code:
                    self._wait_for_orphans()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code. Blocks: until the process has ended, at most ``timeout`` seconds; None: without limit.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            wait_for_any([self.pidfd], left)
        assert self.returncode is not None
        return self.returncode

    def _wait_for_orphans(self) -> None:
        """Waits for the killed members of the process's group, because a kill takes effect later. Blocks: up to 5 s."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (members := self._orphans()) and time.monotonic() < deadline:
            for child in members:
                with suppress(ProcessLookupError, ChildProcessError):
                    pidfd = os.pidfd_open(child)
                    wait_for_any([pidfd], deadline - time.monotonic())
                    os.close(pidfd)
                    os.waitpid(child, os.WNOHANG)

    def _orphans(self) -> list[int]:
        """Adopted members of the process's group. When one ends, its children become orphans, and appear in the next
        call."""
        found = []
        for pid in _adopted():
            with suppress(ProcessLookupError):
                if os.getpgid(pid) == self.pid:
                    found.append(pid)
        return found

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, not its group. Does nothing when it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)


def wait_for_any(pidfds: Iterable[int], timeout_s: float | None) -> None:
    """Blocks until one of the processes has ended, or ``timeout_s`` has passed; a handled signal may end the wait
    early."""
    poller = select.poll()
    for fd in pidfds:
        poller.register(fd, select.POLLIN)
    poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)


@contextmanager
def pidfds_of(processes: Sequence[ForkedProcess | subprocess.Popen[Any]]) -> Iterator[list[int]]:
    """A pidfd for each process, readable when it has ended; those opened here are closed at exit."""
    opened: list[int] = []
    found: list[int] = []
    try:
        for process in processes:
            if isinstance(process, ForkedProcess):
                found.append(process.pidfd)
            else:
                # Its id cannot be reused until somebody polls it.
                opened.append(os.pidfd_open(process.pid))
        yield found + opened
    finally:
        for fd in opened:
            os.close(fd)


def is_stopped(pid: int) -> bool:
    """True when a signal or a debugger has stopped the process; False otherwise, also when it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "tT"
    return False


def mark_own(process: ForkedProcess | subprocess.Popen[Any]) -> None:
    """Records that somebody waits for this child, so that :func:`reap_others` does not take its exit status."""
    for pid in [pid for pid, known in _own.items() if known.returncode is not None]:
        del _own[pid]
    _own[process.pid] = process


def reap_others() -> None:
    """Collects the exit status of adopted orphans that have ended. Blocks: no."""
    for pid in _adopted():
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _adopted() -> set[int]:
    """Process ids of children that no code of this process has started or still waits for."""
    children: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            children.update(map(int, file.read().split()))
    return {pid for pid in children if pid not in _own or _own[pid].returncode is not None}
