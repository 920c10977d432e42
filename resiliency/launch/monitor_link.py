"""The launcher's connection to the monitor of its host, which is made again whenever it ends."""

from __future__ import annotations

import logging
import os
import random
import socket
import struct
import time
from collections.abc import Hashable, Mapping
from typing import Any

from resiliency.launch.channel import receive, send

__all__ = ["MonitorLink"]

logger = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")  # process, user and group id
#: Seconds between two tries to connect: the first, and the most. Nothing tells when somebody listens again.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0


class MonitorLink:
    """Thread: one. Nothing blocks, and nothing raises when the monitor is away.

    What *stands* is kept, and said again to a monitor that was started again, or that did not read for a time.

    Args:
        name: of the abstract unix socket on which the monitor listens.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket: socket.socket | None = None
        self._standing: dict[Hashable, Mapping[str, Any]] = {}
        #: Something that stands was not said on this connection.
        self._owes = False
        self._pause_s, self._retry_at_s = _FIRST_PAUSE_S, 0.0
        #: Why there is no connection, as it was logged.
        self._why = ""

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def fds(self) -> list[int]:
        """Readable when :meth:`serve` has something to do."""
        return [] if self._socket is None else [self._socket.fileno()]

    def seconds_to_look(self, longest_s: float) -> float:
        """Until :meth:`serve` is to be called at the latest."""
        due_s = self._retry_at_s - time.monotonic() if self._socket is None or self._owes else longest_s
        return min(longest_s, max(0.0, due_s))

    # -- what is said -------------------------------------------------------------------------------------------------

    def stand(self, key: Hashable, message: Mapping[str, Any]) -> None:
        """Says something that stays true. Another message of the same key takes its place."""
        self._standing.pop(key, None)
        self._standing[key] = message
        if self._socket is not None and not self._send(message):
            self._say_again_later()

    def take_back(self, *keys: Hashable) -> None:
        """What stood under these keys is true no more. Nobody is told."""
        for key in keys:
            self._standing.pop(key, None)

    def take_back_all(self) -> None:
        self._standing.clear()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Says something once, if somebody listens."""
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

    def _send(self, message: Mapping[str, Any]) -> bool:
        if self._socket is None:
            return False
        try:
            send(self._socket, message)
            return True
        except BlockingIOError:  # it does not read
            return False
        except OSError as error:
            self._lose(f"it cannot be told {message['kind']} ({error})")
            return False

    # -- what is heard ------------------------------------------------------------------------------------------------

    def serve(self) -> list[dict[str, Any]]:
        """What the monitor has said since the last call, in order."""
        if self._socket is None and time.monotonic() >= self._retry_at_s:
            self._connect()
        if self._owes and time.monotonic() >= self._retry_at_s:
            self._say_all()
        heard: list[dict[str, Any]] = []
        while self._socket is not None:
            try:
                message = self._hear(self._socket)
            except BlockingIOError:
                break
            if message is not None:
                heard.append(message)
        return heard

    def _hear(self, connection: socket.socket) -> dict[str, Any] | None:
        """None for what is no message, and at the end of the connection."""
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
        message, fds = received
        for fd in fds:  # none is asked for
            os.close(fd)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            self._refuse(f"{str(message)[:80]!r} has no kind")
            return None
        self._pause_s, self._why = _FIRST_PAUSE_S, ""
        return message

    def _refuse(self, why: str) -> None:
        logger.warning("the host monitor at %r said something that is not understood: %s", self.name, why)

    # -- how it is connected ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect("\0" + self.name)
        except OSError as error:
            connection.close()
            self._retry(f"it cannot be reached ({error.strerror})")
            return
        pid, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if user != os.getuid():
            connection.close()
            self._retry(f"process {pid} that listens there is of user {user}, not of this one, and is not obeyed")
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
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._retry_at_s = float("inf")
