"""Messages between launcher, zygote and standbys: one JSON object per packet, with file descriptors attached."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pair", "receive", "send"]

_MAX_FDS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets. If several processes share one end, each message goes whole to one of them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Sends a message of any size: the JSON travels in a memory file, because an environment may exceed what a packet
    can hold. Thread: any.

    Raises:
        OSError: the other end is closed.
    """
    text = os.memfd_create("resiliency-message", os.MFD_CLOEXEC)
    with open(text, "wb") as file:
        file.write(json.dumps(message).encode())
        file.flush()
        socket.send_fds(end, [b"m"], [text, *fds])


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its file descriptors, which the caller closes; None when the other end is closed.

    Raises:
        TimeoutError: the socket's timeout has passed.
        OSError: the message cannot be read.
        ValueError: the message is not JSON.
        RecursionError: the message's JSON is nested too deep.
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
