"""Which process is at the other end of a unix socket, as the kernel knows it. Linux."""

from __future__ import annotations

import socket
import struct

__all__ = ["pid_and_user"]

#: Format of the value of SO_PEERCRED: pid, user, group.
_CREDENTIALS = struct.Struct("3i")


def pid_and_user(connection: socket.socket) -> tuple[int, int]:
    """Process id and user of the process that connected; on the connecting side, of the one that listens.

    The pid is 0 when the process is in another pid namespace.
    """
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user
