"""The launcher's connection to the monitor of its host; it reconnects whenever the connection ends."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Hashable

from resiliency.runtime.channel import receive, send
from resiliency.runtime.messages.launcher import FromLauncher, FromMonitor, kind_of, of_monitor, pack
from resiliency.runtime.peer_credentials import pid_and_user

__all__ = ["MonitorLink"]

logger = logging.getLogger(__name__)

#: Least and most seconds between two attempts to connect. Nothing tells when the monitor listens again.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0


class MonitorLink:
    """Sends to and receives from the monitor. Thread: one. Blocks: no. Raises nothing when the monitor is away.

    *Standing* messages are kept, and sent again to a monitor that was restarted, or that did not read for a time.

    Args:
        name: of the abstract unix socket on which the monitor listens.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket: socket.socket | None = None
        self._standing: dict[Hashable, FromLauncher] = {}
        #: True when a standing message has not been sent on this connection.
        self._owes = False
        self._pause_s, self._retry_at_s = _FIRST_PAUSE_S, 0.0
        #: The reason, as last logged, why there is no connection; "" while connected.
        self._why = ""

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def fds(self) -> list[int]:
        """The socket, readable when :meth:`serve` has something to do; empty without a connection."""
        return [] if self._socket is None else [self._socket.fileno()]

    def seconds_to_look(self, longest_s: float) -> float:
        """Seconds until :meth:`serve` must be called, at most ``longest_s``."""
        due_s = self._retry_at_s - time.monotonic() if self._socket is None or self._owes else longest_s
        return min(longest_s, max(0.0, due_s))

    # -- sending ------------------------------------------------------------------------------------------------------

    def stand(self, key: Hashable, message: FromLauncher) -> None:
        """Sends a message that stays true until it is taken back. It replaces the standing message of the same key."""
        self._standing.pop(key, None)
        self._standing[key] = message
        if self._socket is not None and not self._send(message):
            self._say_again_later()

    def take_back(self, *keys: Hashable) -> None:
        """Drops the standing messages of these keys, which are no longer true. The monitor is not told."""
        for key in keys:
            self._standing.pop(key, None)

    def tell(self, message: FromLauncher) -> None:
        """Sends a message once; it is dropped without a connection, or while standing messages are still unsent."""
        if self._socket is not None and not self._owes:
            self._send(message)

    def _say_all(self) -> None:
        self._owes = False
        for message in list(self._standing.values()):
            if not self._send(message):
                self._say_again_later()
                return

    def _say_again_later(self) -> None:
        self._owes, self._retry_at_s = True, time.monotonic() + _FIRST_PAUSE_S

    def _send(self, message: FromLauncher) -> bool:
        if self._socket is None:
            return False
        try:
            send(self._socket, pack(message))
            return True
        except BlockingIOError:  # the monitor does not read
            return False
        except OSError as error:
            self._lose(f"it cannot be told {kind_of(message)} ({error})")
            return False

    # -- receiving ----------------------------------------------------------------------------------------------------

    def serve(self) -> list[FromMonitor]:
        """Connects if needed, and returns the messages received since the last call, in order. Blocks: no."""
        if self._socket is None and time.monotonic() >= self._retry_at_s:
            self._connect()
        if self._owes and time.monotonic() >= self._retry_at_s:
            self._say_all()
        heard: list[FromMonitor] = []
        while self._socket is not None:
            try:
                message = self._hear(self._socket)
            except BlockingIOError:
                break
            if message is not None:
                heard.append(message)
        return heard

    def _hear(self, connection: socket.socket) -> FromMonitor | None:
        """The next message; None for one that is not understood, and when the connection ends."""
        try:
            received = receive(connection)
        except BlockingIOError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                self._lose(f"the connection has ended ({error})")
            else:
                self._refuse(repr(error))
            return None
        if received is None:
            self._lose("it has closed the connection")
            return None
        fields, fds = received
        for fd in fds:  # the monitor sends none that are wanted
            os.close(fd)
        try:
            message = of_monitor(fields)
        except ValueError as error:
            self._refuse(f"{error}: {str(fields)[:80]!r}")
            return None
        self._pause_s, self._why = _FIRST_PAUSE_S, ""
        return message

    def _refuse(self, why: str) -> None:
        logger.warning("the host monitor at %r said something that is not understood: %s", self.name, why)

    # -- connecting ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect("\0" + self.name)
        except OSError as error:
            connection.close()
            self._retry(f"it cannot be reached ({error.strerror})")
            return
        pid, user = pid_and_user(connection)
        if user != os.getuid():
            connection.close()
            self._retry(
                f"process {pid} that listens there belongs to user {user}, not to this one; its orders are ignored"
            )
            return
        self._socket = connection
        logger.info("connected to the host monitor at %r (process %d)", self.name, pid)
        self._say_all()

    def _lose(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket, self._owes = None, False
        self._retry(why)

    def _retry(self, why: str) -> None:
        self._retry_at_s = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(_MOST_PAUSE_S, 2 * self._pause_s)
        if why != self._why:
            self._why = why
            logger.warning("the host monitor at %r: %s; ranks go on, and it is tried again", self.name, why)

    def close(self) -> None:
        """Ends the connection for good. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._retry_at_s = float("inf")
