"""Ends native waits for peers by shutting down this process's own connections to them.

* Of gloo: torch's ``abort`` of a gloo group does nothing (seen with torch 2.13), and an operation waits for its
  neighbours only. A rank whose neighbours are alive, and have left, waits until their groups are gone, which may be
  never where something still refers to them. Gloo has no word for its sockets; they are those that its event loop
  watches. They are ended for reading only: its event loop then sees an end and tells nearly all that wait; the others
  are ended by ``gloo_waits`` when all connections are closed.
* That gloo waits for as a group forms: of two ranks one listens until the other one connects and says which pair it
  belongs to; pairs of a group are numbered from 0 (``gloo/transport/tcp/listener.cc``). Where the other one never comes
  this process does, in its place, and hangs up.
* To the store in which ranks look for each other as a group forms: nobody will write what they wait for.
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

#: The number of a pair, as gloo sends it.
_PAIR = struct.Struct("=q")
_CONNECT_TIMEOUT_S = 1.0
#: For a client to finish connecting to its store.
_STORE_CONNECT_TIMEOUT_S = 0.3
#: Name of the thread that is gloo's event loop, one for each device. Torch 2.11 and older do not name it (looked up in
#: 2.4, 2.7, 2.9, 2.10 and 2.11): there connections of gloo are not found, and none is known to be closed.
_LOOP = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"
#: A file descriptor and its inode.
_Watched = tuple[int, int]


class PeerConnections:
    """Those of this process, while it leaves one attempt. Thread: one at a time."""

    def __init__(self) -> None:
        #: Monotonic seconds when a connection to a store was seen first, by its inode.
        self._seen: dict[int, float] = {}
        #: What threads of gloo wait on, from when they last did; a thread keeps to one.
        self._epolls: dict[str, int] = {}
        #: Gloo had no connection when they were shut down last: it has seen the ends of all.
        self.closed = False

    def shut_down(self, store_port: int | None, *, pairs: int) -> int:
        """Shuts down gloo's connections and those to a store, so that what waits for them ends with an error.

        Gloo's are not found where the kernel does not show system calls of threads (a process that may not be traced),
        and in older torch.
        Thread: any. Blocks: for a connection to this process for each pair, which takes some 50 microseconds.

        Args:
            store_port: of the store; None: there is none.
            pairs: of the largest group that may be forming, as many as it has ranks; 0: none is. Connecting to a group
                that stands costs a file descriptor for each.

        Returns:
            How many.
        """
        self.closed = False
        try:
            loops, sockets = _loops(), _sockets()
        except OSError as error:  # no file descriptor is left: the thread that asks goes on to interrupt this process
            logger.debug("connections to peers are not known: %s", error)
            return 0
        self._epolls = {task: epoll for task, epoll in self._epolls.items() if task in loops}
        self._epolls |= {task: epoll for task, epoll in loops.items() if epoll is not None}
        watched = {one: waits for epoll in self._epolls.values() for one, waits in _watched(epoll).items()}
        self.closed = bool(loops) and loops.keys() == self._epolls.keys()  # of others it is not known
        return sum(self._shut_down(fd, watched, store_port, pairs) for fd in sockets)

    def _shut_down(self, fd: int, by_gloo: Mapping[_Watched, bool], store_port: int | None, pairs: int) -> bool:
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                # Gloo may have closed its own meanwhile, and somebody else have opened one with that number.
                watched = by_gloo.get((fd, os.fstat(one.fileno()).st_ino))
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    return False
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    # Not shut down: gloo ends the process when it cannot accept.
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
        """A client of a store that is just being made would try again, after longer and longer waits."""
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
    """Of each thread of gloo, the file descriptor that it waits on; it is in ``epoll_wait`` nearly always. None: not
    now, or the kernel does not say."""
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
    """Whether an event of theirs is waited for: not where one was waited for and came, as from those who have only said
    a number and hung up."""
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
