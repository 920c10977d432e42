"""The monitor's end of the channel to its launcher: an abstract unix socket that only this user's processes may use."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable

from resiliency.errors import AgentError, ConfigError
from resiliency.runtime.channel import send
from resiliency.runtime.messages.launcher import (
    Control,
    Controlled,
    FromLauncher,
    FromMonitor,
    kind_of,
    of_launcher,
    pack,
)
from resiliency.runtime.peer_credentials import pid_and_user

__all__ = ["MOST_BYTES", "LauncherLink", "read_message"]

logger = logging.getLogger(__name__)

_BACKLOG = 16
#: Longest message. The pages of 4,096 ranks on one host take less.
MOST_BYTES = 1024 * 1024
#: A number that Linux defines and Python does not. Only files of memfd_create have seals.
_F_GET_SEALS = 1034
#: Most other connections at a time; each carries one control message and is closed.
_MOST_CONNECTIONS = 32


class LauncherLink:
    """Listens for the launcher and for control messages. Thread: one, with an event loop.

    Args:
        name: of the socket, without the leading zero byte.
        launcher_pid: returns the process id of the launcher to listen to; None: there is none.
        heard: called with each message of the launcher.
        connected: called with True when the launcher has connected, and with False when its connection has ended.
        control: called with a control message of another process of this user; returns the answer.
    """

    def __init__(
        self,
        name: str,
        *,
        launcher_pid: Callable[[], int | None],
        heard: Callable[[FromLauncher], None],
        connected: Callable[[bool], None],
        control: Callable[[Control], Controlled],
    ) -> None:
        self.name = name
        self._launcher_pid, self._heard, self._connected, self._control = launcher_pid, heard, connected, control
        self._listener: socket.socket | None = None
        self._launcher: socket.socket | None = None
        self._others: set[socket.socket] = set()
        self._complained = False

    @property
    def is_connected(self) -> bool:
        return self._launcher is not None

    def open(self) -> None:
        """Starts to listen.

        Raises:
            ConfigError: another process has the name.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind("\0" + self.name)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(
                f"another process listens at the abstract socket {self.name}, and holds no lock of the state folder:"
                " it is no monitor; look for it with ss -xlp"
            ) from None
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                logger.warning("a connection to %s was not taken: %s", self.name, error)
            return
        connection.setblocking(False)
        pid, user = pid_and_user(connection)
        if user != os.getuid():
            logger.warning("process %d of user %d has connected to %s and is refused", pid, user, self.name)
            connection.close()
            return
        if pid == self._launcher_pid():
            self._drop_launcher()
            self._launcher = connection
            asyncio.get_running_loop().add_reader(connection, self._read_launcher, connection)
            self._connected(True)
            return
        if len(self._others) >= _MOST_CONNECTIONS:
            connection.close()
            return
        self._others.add(connection)
        asyncio.get_running_loop().add_reader(connection, self._read_other, connection, pid)

    def _read_launcher(self, connection: socket.socket, ended: bool = False) -> None:
        if connection is not self._launcher:
            return
        try:
            message = read_message(connection)
        except BlockingIOError:
            if ended:  # a process that the launcher has started still holds the other end
                self._drop_launcher()
            return
        except AgentError as error:
            if not self._complained:
                self._complained = True
                logger.error("a message of the launcher is ignored (logged once): %s", error)
            return
        except OSError as error:
            logger.warning("the connection to the launcher broke: %s", error)
            message = None
        if message is None:
            self._drop_launcher()
            self._connected(False)
        elif isinstance(message, Control):
            logger.warning("the launcher has sent a control message; it is not listened to")
        else:
            self._heard(message)

    def _read_other(self, connection: socket.socket, pid: int) -> None:
        try:
            message = read_message(connection)
            if isinstance(message, Control):
                send(connection, pack(self._control(message)))
            elif message is not None:
                logger.warning("process %d says it is a launcher, and is not the one of this monitor; refused", pid)
        except BlockingIOError:
            return
        except (AgentError, OSError) as error:
            logger.warning("process %d at the monitor's socket is not listened to: %s", pid, error)
        self._others.discard(connection)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()

    def tell(self, message: FromMonitor) -> bool:
        """Sends a message to the launcher. Returns False when it is not connected or does not read; then the message
        must be sent again later."""
        if self._launcher is None:
            return False
        try:
            send(self._launcher, pack(message))
        except OSError as error:  # BlockingIOError: a signal has stopped the launcher
            logger.debug("the launcher was not told %s: %s", kind_of(message), error)
            return False
        return True

    def _drop_launcher(self) -> None:
        if self._launcher is not None:
            asyncio.get_running_loop().remove_reader(self._launcher)
            self._launcher.close()
            self._launcher = None

    def hear_last_words(self) -> None:
        """Reads what a launcher that has ended had sent before its end, and then closes its connection."""
        while (connection := self._launcher) is not None:
            self._read_launcher(connection, ended=True)

    def drop_launcher(self) -> None:
        """Closes the launcher's connection, because another launcher is to be started."""
        self._drop_launcher()

    def close(self) -> None:
        """Closes all connections. Idempotent. The launcher runs on, and connects to the next monitor."""
        loop = asyncio.get_running_loop()
        for connection in [*filter(None, [self._listener]), *self._others]:
            loop.remove_reader(connection)
            connection.close()
        self._others.clear()
        self._listener = None
        self._drop_launcher()  # last, because the launcher connects again at once


def read_message(end: socket.socket) -> FromLauncher | Control | None:
    """Reads the next message of a socket that is readable; None when the other end was closed. Blocks: no.

    Unlike :func:`~resiliency.runtime.channel.receive` it trusts nobody: it reads no file that might block, closes what
    comes with a message, and limits its size.

    Raises:
        AgentError: it is not a valid message; the error says why.
        OSError: the connection broke.
    """
    data, fds = _received(end)
    try:
        if not data:
            return None
        if not fds:
            raise AgentError("a message without its text")
        return _parsed(_text(fds[0]))
    finally:
        for fd in fds:
            os.close(fd)


def _received(end: socket.socket) -> tuple[bytes, list[int]]:
    """Receives one packet, and all descriptors that came with it, so that they can be closed."""
    fds = array.array("i")
    data, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(64 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, part in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)


def _text(fd: int) -> bytes:
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)  # fails for every other kind of file, from which a read might block
    except OSError:
        raise AgentError("a message whose text is not in memory") from None
    size = os.fstat(fd).st_size
    if size > MOST_BYTES:
        raise AgentError(f"a message of {size} bytes; {MOST_BYTES} are the most")
    return os.pread(fd, size, 0)


def _parsed(text: bytes) -> FromLauncher | Control:
    try:
        return of_launcher(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise AgentError(f"not a message of the channel ({type(error).__name__}: {error}): {text[:80]!r}") from error
