"""Ends native waits for peers by shutting down this process's own connections to them.

* Gloo's connections: torch's ``abort`` of a gloo group does nothing (seen with torch 2.13), and an operation waits for
  its neighbours only. A rank whose neighbours are alive but have left the attempt would wait until their groups are
  released, which never happens while something refers to them. Gloo offers no access to its sockets; they are the ones
  that its event loop watches. They are shut down for reading only: the event loop then sees an end of file and tells
  nearly all waits; ``gloo_waits`` ends the rest once all connections are closed.
* Connections that gloo waits for while a group forms: of two ranks one listens until the other one connects and names
  the pair it belongs to; the pairs of a group are numbered from 0 (``gloo/transport/tcp/listener.cc``). When the other
  rank never comes, this process connects in its place, and hangs up.
* Connections to the store in which ranks look for each other while a group forms: nobody will write what they wait for.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["PeerConnections"]

logger = logging.getLogger(__name__)

#: A pair number, as gloo sends it.
_PAIR = struct.Struct("=q")
_CONNECT_TIMEOUT_S = 1.0
#: Seconds that a client gets to finish connecting to its store.
_STORE_CONNECT_TIMEOUT_S = 0.3
#: Name of the thread that runs gloo's event loop, one per device. Torch 2.11 and older do not name the thread (looked
#: up in 2.4, 2.7, 2.9, 2.10 and 2.11); there gloo's connections are not found, and none counts as closed.
_LOOP = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"
#: A file descriptor and its inode.
_Watched = tuple[int, int]


class PeerConnections:
    """Finds and shuts down this process's connections, while it leaves one attempt. Thread: one at a time."""

    def __init__(self) -> None:
        #: Inode of a connection to a store -> monotonic seconds when it was first seen.
        self._seen: dict[int, float] = {}
        #: Gloo thread id -> the epoll file descriptor that it last waited on; a thread always uses the same one.
        self._epolls: dict[str, int] = {}
        #: True when the last call found no open gloo connection: gloo has seen the end of all of them.
        self.closed = False

    def shut_down(self, store_port: int | None, *, pairs: int) -> int:
        """Shuts down gloo's connections and those to a store, so that waits for them end with an error.

        Gloo's connections are not found where the kernel does not show the system calls of threads (a process that may
        not be traced), and with older torch. Thread: any. Blocks: while it connects to this process once per pair, 50
        microseconds each.

        Args:
            store_port: port of the store; None: there is no store.
            pairs: number of ranks of the largest group that may be forming; 0: none. If the group has already formed,
                each connection costs a file descriptor.

        Returns:
            The number of connections shut down.
        """
        self.closed = False
        try:
            loops, sockets = _loops(), _sockets()
        except OSError as error:  # no file descriptor is left; the calling thread must go on to interrupt this process
            logger.debug("connections to peers are not known: %s", error)
            return 0
        self._epolls = {task: epoll for task, epoll in self._epolls.items() if task in loops}
        self._epolls |= {task: epoll for task, epoll in loops.items() if epoll is not None}
        watched = {one: waits for epoll in self._epolls.values() for one, waits in _watched(epoll).items()}
        self.closed = bool(loops) and loops.keys() == self._epolls.keys()  # not known while a loop's epoll is missing
        return sum(self._shut_down(fd, watched, store_port, pairs) for fd in sockets)

    def _shut_down(self, fd: int, by_gloo: Mapping[_Watched, bool], store_port: int | None, pairs: int) -> bool:
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                # Gloo may have closed its socket meanwhile, and somebody else may have opened one with the same number.
                watched = by_gloo.get((fd, os.fstat(one.fileno()).st_ino))
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    return False
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    # A listener is not shut down, because gloo ends the process when it cannot accept.
                    if watched is not None:
                        _connect_and_hang_up(one, pairs)
                    return False
                if watched is None and not (one.getpeername()[1] == store_port and self._is_old(one)):
                    return False
                self.closed = self.closed and not watched
                one.shutdown(socket.SHUT_RDWR if watched is None else socket.SHUT_RD)
        except OSError as error:  # closed meanwhile, not connected, or no file descriptor is left
            self.closed = self.closed and error.errno != errno.EMFILE
            logger.debug("connection %d to a peer was not shut down: %s", fd, error)
            return False
        return True

    def _is_old(self, connection: socket.socket) -> bool:
        """True when a store connection has existed long enough to be connected. A client that is interrupted while it
        still connects would retry with longer and longer pauses."""
        now = time.monotonic()
        return now - self._seen.setdefault(os.fstat(connection.fileno()).st_ino, now) >= _STORE_CONNECT_TIMEOUT_S


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _loops() -> dict[str, int | None]:
    """Id of each gloo thread -> the epoll file descriptor that it waits on; None: it does not wait at this moment,
    though it nearly always does, or the kernel does not show it."""
    found: dict[str, int | None] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that ends
            if (task / "comm").read_text().strip() == _LOOP:
                found[task.name] = _epoll_of(task)
    return found


def _epoll_of(task: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):  # a thread that ends, or runs at this moment
        fd = int((task / "syscall").read_text().split()[1], 16)
        if os.readlink(f"/proc/self/fd/{fd}") == _EPOLL:
            return fd
    return None


def _watched(epoll: int) -> dict[_Watched, bool]:
    """Sockets that an epoll watches -> whether it still waits for an event of theirs. It does not for a one-shot event
    that has come, as from a connection that only sent a pair number and hung up."""
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return {}
    entries = [line.split() for line in lines if line.startswith("tfd:")]
    return {
        (int(entry[1]), int(one.removeprefix("ino:"), 16)): bool(int(entry[3], 16) & ~select.EPOLLONESHOT)
        for entry in entries
        for one in entry
        if one.startswith("ino:")
    }


def _connect_and_hang_up(listener: socket.socket, pairs: int) -> None:
    for pair in range(pairs):
        with socket.socket(listener.family, socket.SOCK_STREAM) as one:
            one.settimeout(_CONNECT_TIMEOUT_S)
            one.connect(listener.getsockname())
            one.sendall(_PAIR.pack(pair))
