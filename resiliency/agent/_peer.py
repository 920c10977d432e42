"""The process at the other end of a unix socket, as the kernel knows it: alive or gone. Linux."""

from __future__ import annotations

import os
import select
import signal
import socket
from types import TracebackType

from resiliency.runtime.peer_credentials import pid_and_user

__all__ = ["Peer"]


class Peer:
    """The process that made the other end of a connection.

    The end of the connection does not prove its death, because a child that it forked has the socket too. So it is
    watched by a pidfd, which never means a later process with the same pid. Where the kernel provides none (older than
    Linux 5.3, another pid namespace, a seccomp filter), only the end of the connection counts.

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
        """Closes the pidfd, not the connection. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def receive(self, nbytes: int) -> bytes:
        """Like ``recv``; also returns b"" when the process has died and all that it sent was read.

        Blocks: until data comes, the connection ends, or the process dies.

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
        """True when the process has died, or dies within these seconds: its connections end a moment before it does."""
        if self.gone or self._pidfd < 0:
            return self.gone
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        self.gone = bool(poller.poll(within_s * 1e3))
        return self.gone

    def runs(self, module: str) -> bool:
        """True when the process was started with this word among its arguments; False also when that is unknown."""
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                return module.encode() in file.read().split(b"\0")
        except OSError:
            return False

    def kill(self) -> bool:
        """Sends SIGKILL, never to a later process with the same pid; False when that cannot be done."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            return False
        return True

    def wait_gone(self, timeout_s: float) -> bool:
        """Blocks until the process has died; False when ``timeout_s`` passes first. Without a pidfd it returns at once
        what is known."""
        if self._pidfd < 0:
            return self.gone
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        self.gone = bool(poller.poll(max(0.0, timeout_s) * 1000))
        return self.gone
