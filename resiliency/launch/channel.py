"""What launcher, zygote and standbys say to each other: one JSON object a packet, with file descriptors beside it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pair", "receive", "send"]

_MAX_FDS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. A message is read whole, by one of the processes that have the other end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Thread: any. Of any size: an environment may be larger than what a packet can hold.

    Raises:
        OSError: nobody has the other end.
    """
    text = os.memfd_create("resiliency-message", os.MFD_CLOEXEC)
    with open(text, "wb") as file:
        file.write(json.dumps(message).encode())
        file.flush()
        socket.send_fds(end, [b"m"], [text, *fds])


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its file descriptors; None when nobody has the other end any more.

    Raises:
        TimeoutError: of the socket.
        OSError: a message that cannot be read.
        ValueError: one that is not JSON.
        RecursionError: one that is nested too deep.
    """
    data, fds, _, _ = socket.recv_fds(end, 1, _MAX_FDS)
    if not data:
        return None
    if not fds:
        raise OSError("a message came without its text: too many file descriptors are open in this process")
    try:
        with open(fds[0], "rb") as file:
            file.seek(0)
            message: dict[str, Any] = json.loads(file.read())
    except BaseException:
        for fd in fds[1:]:
            os.close(fd)
        raise
    return message, fds[1:]
