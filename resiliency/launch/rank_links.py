"""The launcher's side of its connections to ranks: orders to leave or start an attempt, heartbeats, and requests."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from resiliency.runtime.channel import receive, send
from resiliency.runtime.heartbeat import Page
from resiliency.runtime.heartbeat_page import PAGE_BYTES, SaveWords, WorkWords
from resiliency.runtime.peer_credentials import pid_and_user

__all__ = ["RankLink", "RankLinks"]

logger = logging.getLogger(__name__)

_BACKLOG = 256
#: Seconds for a rank that waits for its next attempt to begin it; a busy machine may need more.
_BEGIN_S = 5.0


@dataclass(kw_only=True)
class RankLink:
    """One connection from a process of a rank.

    Attributes:
        pid: of the process that has connected.
        group: its process group, which the launcher has made for the rank.
        socket: connected to the process.
        joined: the process can go on when another rank has died.
        given: number of the start that it was given last; None: only the start that made its process.
        left: number of the start that it was told to leave last; less than -1: none.
        deadline: monotonic seconds by which it must begin its next attempt after it was told to leave; None: it has
            begun, or was not told.
        within_s: seconds that it was given to leave.
        lost_peer_s: monotonic seconds when it reported a lost peer in its current start; None: it has not.
        error: text of the error by which it noticed the lost peer.
        finished: it has finished for good, and the launcher has agreed.
        closed: the connection has ended.
        page: its heartbeat page; None: it has sent none.
        saves: the words on that page for wanted and committed saves.
        work: the words on that page for its own work.
    """

    pid: int
    group: int
    socket: socket.socket
    joined: bool = False
    given: int | None = None
    left: int = -2
    deadline: float | None = None
    within_s: float = 0.0
    lost_peer_s: float | None = None
    error: str = ""
    finished: bool = False
    closed: bool = False
    page: mmap.mmap | None = None
    saves: SaveWords | None = None
    work: WorkWords | None = None


class RankLinks:
    """Accepts and serves the connections. Thread: one. A rank connects to :attr:`address`, an abstract unix socket
    without a file, which it finds in its environment.

    Messages from ranks: ``inside`` (it has entered the restartable function), ``lost_peer`` (it has an error that looks
    like a lost peer, and waits for ``leave`` or ``no_restart``), ``finished`` (answered with ``exit`` unless it was
    told to leave), ``heartbeat`` (with its page), ``log`` (folder of the event log), ``fork`` (see
    :mod:`~resiliency.runtime.forked_function`). Messages to ranks: ``leave``, ``start`` (with an environment and two
    files for output), ``no_restart`` (no rank will be told to leave any more), ``exit``. Each carries the number of a
    start of this host's ranks; -1 is the start that made the process.

    Args:
        fork: called with each ``fork`` message and its file descriptors.
        log: called with each ``log`` message.
    """

    def __init__(
        self, fork: Callable[[Mapping[str, Any], Sequence[int]], None], log: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._fork = fork
        self._log = log
        # An abstract name: a launcher that is killed leaves no file behind.
        self.address = f"resiliency-run-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._links: list[RankLink] = []

    def fds(self) -> list[int]:
        """File descriptors that are readable when :meth:`serve` has something to do."""
        return [self._listener.fileno(), *(link.socket.fileno() for link in self._links if not link.closed)]

    def serve(self) -> None:
        """Accepts connections, and handles the messages received. Blocks: no."""
        with suppress(BlockingIOError):
            while True:
                self._accept(self._listener.accept()[0])
        for link in [link for link in self._links if not link.closed]:
            with suppress(BlockingIOError):
                while not link.closed and self._take(link):
                    pass

    def _accept(self, connection: socket.socket) -> None:
        pid, user = pid_and_user(connection)
        try:
            group = os.getpgid(pid)
        except ProcessLookupError:
            connection.close()
            return
        if user != os.getuid():
            logger.warning("process %d of another user asked for orders of this launcher, and was refused", pid)
            connection.close()
            return
        connection.setblocking(False)
        self._links.append(RankLink(pid=pid, group=group, socket=connection))

    def _take(self, link: RankLink) -> bool:
        """Handles one message; False when the connection has ended.

        Raises:
            BlockingIOError: there is no message.
        """
        try:
            received = receive(link.socket)
        except BlockingIOError:
            raise
        except ConnectionResetError:  # it has ended without reading what was sent
            received = None
        except (OSError, ValueError) as error:
            logger.warning("process %d said something that is not understood: %s", link.pid, error)
            received = None
        if received is None:
            self._lose(link)
            return False
        message, fds = received
        try:
            self._understand(link, message, fds)
            return True
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("process %d said something that is not understood: %r", link.pid, error)
            self._lose(link)
            return False
        finally:
            for fd in fds:
                os.close(fd)

    def _understand(self, link: RankLink, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        if message["kind"] == "fork":
            self._fork(message, fds)
        elif message["kind"] == "log":
            self._log(message)
        elif message["kind"] == "heartbeat":
            link.page = mmap.mmap(fds[0], PAGE_BYTES)
            link.saves, link.work = SaveWords(link.page), WorkWords(link.page)
        elif message["number"] <= link.left:
            return  # the rank sent it before it read that it is to leave
        elif message["kind"] == "inside":
            link.joined, link.deadline = True, None
        elif message["kind"] == "lost_peer":
            link.error = str(message["error"])
            link.lost_peer_s = time.monotonic()
        elif message["kind"] == "finished":
            link.finished = True
            self._send(link, {"kind": "exit", "number": message["number"]})

    def link_of(self, group: int) -> RankLink | None:
        """The link of the rank with this process group; None when it has none, or cannot go on in its process."""
        for link in self._links:
            if link.group == group and link.joined and not (link.finished or link.closed):
                return link
        return None

    def leaving(self, group: int) -> RankLink | None:
        """The link of the rank with this process group if it was told to leave and has not begun its next attempt, even
        when the connection is lost; else None."""
        for link in self._links:
            if link.group == group and link.deadline is not None:
                return link
        return None

    def heartbeat_of(self, group: int) -> tuple[int, Page] | None:
        """The process that beats for the rank with this process group, and its page; None: there is none.

        When several processes of the group beat, the group's first one counts, whoever connected first. Another one
        counts only where the user's script has started the process that trains.
        """
        found = [(link.pid, link.page) for link in self._links if link.group == group and not link.closed]
        beating = [(pid, page) for pid, page in found if page is not None]
        if not beating:
            return None
        pid, page = next((one for one in beating if one[0] == group), beating[0])
        return pid, Page.read(page)

    def want_save(self, group: int, step: int) -> bool:
        """Asks the rank with this process group to save after this many optimizer steps. False: nothing in that rank
        looks for wanted saves. Blocks: no."""
        found = [link.saves for link in self._links if link.group == group and link.saves is not None]
        for saves in found:
            saves.want(step)
        return any(saves.is_looked_for for saves in found)

    def newest_committed(self, group: int) -> int:
        """The newest optimizer step that the rank with this process group knows to be committed; -1: none."""
        found = [link.saves for link in self._links if link.group == group and link.saves is not None]
        return max((saves.newest_committed() for saves in found), default=-1)

    def own_work(self, group: int) -> tuple[float, int]:
        """(Seconds of own work, steps that they cover) of the rank with this process group; 0 steps: it does not
        measure it."""
        found = [link.work.read() for link in self._links if link.group == group and link.work is not None]
        return max(found, key=lambda one: one[1], default=(0.0, 0))

    def lost_peer(self, group: int) -> tuple[float, str] | None:
        """When (monotonic seconds) the rank with this process group reported a lost peer, and its error; None: it has
        not."""
        link = self.link_of(group)
        return None if link is None or link.lost_peer_s is None else (link.lost_peer_s, link.error)

    def say_no_restart(self) -> None:
        """Tells all ranks that no restart follows, so that those that have lost a peer end with its error. Blocks:
        no."""
        for link in [link for link in self._links if link.joined and not link.closed]:
            link.lost_peer_s = None
            self._send(link, {"kind": "no_restart", "number": -1 if link.given is None else link.given})

    def tell_to_leave(self, link: RankLink, *, within_s: float) -> bool:
        """Tells a rank to leave its current start; False when it cannot be reached. Blocks: no."""
        link.left, link.lost_peer_s = (-1 if link.given is None else link.given), None
        if link.deadline is None:
            link.deadline, link.within_s = time.monotonic() + within_s, within_s
        return self._send(link, {"kind": "leave", "number": link.left})

    def start(self, link: RankLink, number: int, environment: Mapping[str, str], output: Sequence[int]) -> bool:
        """Gives a rank that was told to leave its next attempt; False when it cannot be reached. Blocks: no.

        Args:
            number: of this start, larger than the previous one.
        """
        link.given = number
        if link.saves is not None:
            link.saves.want(-1)
        if link.deadline is not None:  # it may have left long ago, and waited for hosts or for a delay
            link.deadline = max(link.deadline, time.monotonic() + min(link.within_s, _BEGIN_S))
        return self._send(link, {"kind": "start", "number": number, "environment": dict(environment)}, output)

    def _send(self, link: RankLink, message: Mapping[str, Any], fds: Sequence[int] = ()) -> bool:
        try:
            send(link.socket, message, fds)
        except OSError as error:  # it has ended, or has not read for a very long time
            logger.debug("process %d cannot be told %s: %s", link.pid, message["kind"], error)
            self._lose(link)
            return False
        return True

    def _lose(self, link: RankLink) -> None:
        """Closes a connection. The link of a rank that was told to leave is kept until a new process replaces the
        rank."""
        link.closed = True
        link.socket.close()
        if link.deadline is None:
            self.drop(link)

    def forget(self, group: int) -> None:
        """Drops all connections of the rank with this process group, which has ended."""
        for link in [link for link in self._links if link.group == group]:
            self.drop(link)

    def drop(self, link: RankLink) -> None:
        """Closes and removes a link. Idempotent."""
        if link in self._links:
            self._links.remove(link)
            link.closed = True
            link.socket.close()

    def close(self) -> None:
        """Closes the listener and all connections. Idempotent."""
        for link in list(self._links):
            self.drop(link)
        self._listener.close()
