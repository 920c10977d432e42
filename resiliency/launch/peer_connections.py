"""Ends native waits for peers by shutting down this process's own connections to them.

* Of gloo: torch's ``abort`` of a gloo group does nothing (seen with torch 2.13), and an operation waits for its
  neighbours only. A rank whose neighbours are alive, and have left, waits until their groups are gone, which may be
  never where something still refers to them. Gloo has no word for its sockets; they are those that its event loop
  watches.
* To the store in which ranks look for each other as a group forms: nobody will write what they wait for.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["shut_down_peer_connections"]

logger = logging.getLogger(__name__)

#: Name of the thread that is gloo's event loop, one for each device.
_LOOP = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"


def shut_down_peer_connections(store_port: int | None) -> int:
    """Shuts down gloo's connections and those to a store, so that what waits for them ends with an error.

    Gloo's are not found where the kernel does not show system calls of threads (a process that may not be traced).
    Thread: any. Blocks: no.

    Args:
        store_port: of the store; None: there is none.

    Returns:
        How many.
    """
    watched = {fd for epoll in _epolls() for fd in _watched(epoll)}
    return sum(_shut_down(fd, watched, store_port) for fd in _sockets())


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _epolls() -> set[int]:
    """File descriptors that threads of gloo wait on; each is in ``epoll_wait`` nearly always."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError, IndexError):  # a thread that ends, or runs at this moment
            if (task / "comm").read_text().strip() == _LOOP:
                fd = int((task / "syscall").read_text().split()[1], 16)
                if os.readlink(f"/proc/self/fd/{fd}") == _EPOLL:
                    found.add(fd)
    return found


def _watched(epoll: int) -> list[int]:
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _shut_down(fd: int, watched: set[int], store_port: int | None) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return False
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # gloo ends the process when it cannot accept
            if fd not in watched and one.getpeername()[1] != store_port:
                return False
            one.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # closed meanwhile, or not connected
        logger.debug("connection %d to a peer was not shut down: %s", fd, error)
        return False
    return True
