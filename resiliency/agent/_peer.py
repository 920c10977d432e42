"""The process at the other end of a unix socket, as the kernel knows it: alive, stopped, or gone. Linux."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from types import TracebackType

__all__ = ["Peer", "pid_and_user"]

#: What SO_PEERCRED returns: pid, user, group.
_CREDENTIALS = struct.Struct("3i")


def pid_and_user(connection: socket.socket) -> tuple[int, int]:
    """Process id and user of the process that connected; on the connecting side, of the one that listens.

    The pid is 0 when the process is in another pid namespace.
    """
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


class Peer:
    """The process that made the other end of a connection.

    The end of a connection does not tell of its death: a child that it forked has the socket too. So it is watched by a
    pidfd, which means this process and no later one of that number. Where the kernel gives none (older than Linux 5.3,
    another pid namespace, a seccomp filter), only the end of the connection tells.

    Thread: one at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid, self.user = pid_and_user(connection)
        self._pidfd = -1
        self.gone = False
        if self.pid > 0:
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self.gone = True
            except (OSError, AttributeError):
                self._pidfd = -1

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def receive(self, nbytes: int) -> bytes:
        """As ``recv``; also returns b"" when the process has died and nothing that it sent is left.

        Blocks: until one of the two.

        Raises:
            OSError: the connection broke.
        """
        if self._pidfd < 0 and not self.gone:
            return self._connection.recv(nbytes)
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        if self._pidfd >= 0:
            poller.register(self._pidfd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(0 if self.gone else None)}
        if self._connection.fileno() in ready:
            return self._connection.recv(nbytes)
        self.gone = True
        return b""

    def died(self, *, within_s: float) -> bool:
        """True when the process is known to have died, now or within this time: its connections end a moment before."""
        if self.gone or self._pidfd < 0:
            return self.gone
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        self.gone = bool(poller.poll(within_s * 1e3))
        return self.gone

    @property
    def watched(self) -> bool:
        """True when its death is noticed."""
        return self._pidfd >= 0

    @property
    def stopped(self) -> bool:
        """True while the process is stopped by a signal (not by a debugger); False when that is not known."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # The name, in parentheses, may hold anything.
                return file.read().rpartition(b")")[2].split()[0] == b"T"
        except (OSError, IndexError):
            return False

    def runs(self, module: str) -> bool:
        """True when the process was started with this word as one of its arguments."""
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                return module.encode() in file.read().split(b"\0")
        except OSError:
            return False

    def kill(self) -> bool:
        """Sends SIGKILL to this process, never to a later one of its number; False when that cannot be done."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            return False
        return True

    def wait_gone(self, timeout_s: float) -> bool:
        """Waits until the process has died; False when ``timeout_s`` passes first, or when it cannot be watched."""
        if self._pidfd < 0:
            return self.gone
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        self.gone = bool(poller.poll(max(0.0, timeout_s) * 1000))
        return self.gone
