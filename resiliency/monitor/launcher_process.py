"""The launcher as a process: started so that its identity is on disk first, or taken over from an earlier monitor."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from resiliency.monitor.state import LauncherId, boot_id
from resiliency.runtime.tasks import is_set_within

__all__ = [
    "LauncherProcess",
    "adopt_launcher",
    "end_processes",
    "find_launcher",
    "identities_of",
    "start_launcher",
]

logger = logging.getLogger(__name__)

#: The shell waits for a line before it becomes the launcher, and the line comes once the process id is on disk. When
#: the monitor is killed before that, the shell reads end of file and exits.
_SHELL = ["/bin/sh", "-c", 'read -r go && exec "$@" < /dev/null', "resiliency-launcher"]


class LauncherProcess:
    """A launcher that runs or has run. Thread: one, with an event loop.

    Attributes:
        identity: of the process.
        started_s: when this monitor started or adopted it; monotonic seconds.
        ended: set when it has ended, for whatever reason.
    """

    def __init__(self, identity: LauncherId, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self.started_s = time.monotonic()
        self.ended = asyncio.Event()
        self._child, self._pidfd = child, pidfd
        self._how = ""
        self._status: int | None = None
        self._ranks: dict[int, int] = {}  # pid -> pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended)

    @property
    def is_adopted(self) -> bool:
        return self._child is None

    @property
    def status(self) -> int | None:
        """Its exit status as in :class:`subprocess.Popen`; None while it runs, or when an earlier monitor had started
        it."""
        return self._status

    @property
    def how_it_ended(self) -> str:
        """How it ended, in words; "" while it runs."""
        return self._how

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._child is None:
            self._how = "ended (it was started by an earlier monitor, so its status is not known)"
        else:
            self._status = self._child.wait()  # does not block: the pidfd says that it has ended
            code = self._status
            self._how = f"ended with status {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
        self.ended.set()

    def watch_ranks(self, pids: Sequence[int]) -> None:
        """Sets the processes that must not outlive the launcher."""
        for pid in [known for known in self._ranks if known not in pids]:
            os.close(self._ranks.pop(pid))
        for pid in pids:
            if pid not in self._ranks:
                with suppress(OSError):  # the rank has ended already
                    self._ranks[pid] = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """Signals the launcher alone. No error when it has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def signal_ranks(self, number: int) -> None:
        """Signals its ranks. No error for ranks that have ended."""
        for pidfd in self._ranks.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    async def end(self, grace_s: float) -> None:
        """Sends SIGTERM, after ``grace_s`` SIGKILL, and kills the ranks that are left. Blocks: until the launcher has
        ended."""
        self.send_signal(signal.SIGTERM)
        if not await is_set_within(self.ended, grace_s):
            logger.warning("the launcher has not ended within %.0f s of SIGTERM; it is killed", grace_s)
            self.send_signal(signal.SIGKILL)
            await self.ended.wait()
        self.end_ranks()

    def end_ranks(self) -> None:
        """Kills ranks that are left. The kernel has killed those that were forked from the launcher already."""
        for pidfd in self._ranks.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._ranks.clear()

    def let_go(self) -> None:
        """Stops watching the launcher, which runs on. Idempotent."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for pidfd in self._ranks.values():
            os.close(pidfd)
        self._ranks.clear()
        if self._child is not None and self._child.returncode is None:
            self._child.returncode = 0  # keeps Popen from warning that its child still runs


def start_launcher(
    command: Sequence[str], env: dict[str, str], written: Callable[[LauncherId], bool]
) -> LauncherProcess | None:
    """Starts a launcher in a session of its own.

    Args:
        written: called with its identity before it begins; returns False to cancel the start.

    Returns:
        None when ``written`` returned False.

    Raises:
        OSError: it cannot be started.
    """
    child = subprocess.Popen([*_SHELL, *command], env=env, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    pidfd = os.pidfd_open(child.pid)
    identity = LauncherId(pid=child.pid, started=_start_ticks(child.pid), boot=boot_id())
    try:
        if not written(identity):
            child.stdin.close()
            child.wait()
            os.close(pidfd)
            return None
        with suppress(BrokenPipeError):  # the shell was killed meanwhile
            child.stdin.write(b"go\n")
            child.stdin.flush()
    finally:
        with suppress(OSError):
            child.stdin.close()
    return LauncherProcess(identity, pidfd, child)


def adopt_launcher(identity: LauncherId) -> LauncherProcess | None:
    """Adopts the launcher that an earlier monitor has started; None when it has ended."""
    if identity.boot != boot_id() or identity.pid <= 0:
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # The pidfd means one process even if its id is used again, so check the start time after opening it.
    if _start_ticks(identity.pid) != identity.started:
        os.close(pidfd)
        return None
    return LauncherProcess(identity, pidfd, None)


def identities_of(pids: Iterable[int]) -> tuple[LauncherId, ...]:
    """Identities of processes that run now, stored for a later monitor."""
    boot = boot_id()
    found = (LauncherId(pid=pid, started=_start_ticks(pid), boot=boot) for pid in sorted(pids))
    return tuple(one for one in found if one.started >= 0)


def end_processes(identities: Iterable[LauncherId]) -> int:
    """Kills the processes that still run. Returns their number."""
    count, boot = 0, boot_id()
    for one in identities:
        if one.boot != boot or one.pid <= 0:
            continue
        try:
            pidfd = os.pidfd_open(one.pid)
        except OSError:
            continue
        with suppress(ProcessLookupError):
            if _start_ticks(one.pid) == one.started:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                count += 1
        os.close(pidfd)
    return count


def find_launcher(endpoint: str) -> LauncherId | None:
    """Finds the launcher without stored state: the process of this user that has the monitor's socket among its
    arguments; of several the parent of the others. None when there is none."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid != os.getuid():
                continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue  # the process has ended
        if endpoint.encode() in words:
            found[int(entry)] = parent
    first = [pid for pid, parent in found.items() if parent not in found]
    if not first or (started := _start_ticks(min(first))) < 0:
        return None
    return LauncherId(pid=min(first), started=started, boot=boot_id())


def _start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; -1 when it has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return -1 if fields[0] in b"ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
