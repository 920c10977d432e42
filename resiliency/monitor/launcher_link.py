"""The monitor's end of the channel to its launcher: an abstract unix socket that only this user's processes may use."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from resiliency.errors import AgentError, ConfigError
from resiliency.runtime.channel import send
from resiliency.runtime.messages.launcher import Control, FromLauncher, read_message
from resiliency.runtime.peer_credentials import pid_and_user

__all__ = ["LauncherLink"]

logger = logging.getLogger(__name__)

_BACKLOG = 16
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
        control: Callable[[Control], Mapping[str, Any]],
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
                send(connection, {"kind": "controlled", **self._control(message)})
            elif message is not None:
                logger.warning("process %d says it is a launcher, and is not the one of this monitor; refused", pid)
        except BlockingIOError:
            return
        except (AgentError, OSError) as error:
            logger.warning("process %d at the monitor's socket is not listened to: %s", pid, error)
        self._others.discard(connection)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Sends a message to the launcher. Returns False when it is not connected or does not read; then the message
        must be sent again later."""
        if self._launcher is None:
            return False
        try:
            send(self._launcher, message)
        except OSError as error:  # BlockingIOError: a signal has stopped the launcher
            logger.debug("the launcher was not told %s: %s", message.get("kind"), error)
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
