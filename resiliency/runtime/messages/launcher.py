"""The messages that a launcher sends to the monitor of its host, checked field by field."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from resiliency.errors import AgentError
from resiliency.runtime.messages.monitor import RankReport
from resiliency.runtime.typed_json import from_jsonable

__all__ = [
    "MOST_BYTES",
    "REPORT_S",
    "Control",
    "Ended",
    "FromLauncher",
    "Lost",
    "LostPeers",
    "Master",
    "Pages",
    "Running",
    "Saved",
    "Waiting",
    "read_message",
]

#: Seconds between two progress reports of a launcher about its ranks; its monitor passes on the newest one.
REPORT_S = 0.25
#: Longest message. The pages of 4,096 ranks on one host take less.
MOST_BYTES = 1024 * 1024
_MOST_RANKS = 4096
#: A number that Linux defines and Python does not. Only files of memfd_create have seals.
_F_GET_SEALS = 1034


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The launcher has no ranks, and waits for a place in a later epoch.

    Attributes:
        warm: it can fork ranks at once.
    """

    epoch: int = 0
    warm: bool = True


@dataclass(frozen=True, kw_only=True)
class Master:
    """The launcher is node rank 0, and its store listens at ``address``."""

    epoch: int
    address: str


@dataclass(frozen=True, kw_only=True)
class Running:
    """The launcher has started its ranks.

    Attributes:
        ranks: local rank -> [global rank, process id].
    """

    epoch: int
    ranks: Mapping[str, Any]

    def pids(self) -> dict[int, int]:
        """Process ids by global rank.

        Raises:
            ValueError: ``ranks`` does not have that shape.
        """
        found = {}
        for pair in self.ranks.values():
            if not (isinstance(pair, list) and len(pair) == 2 and all(type(one) is int and one >= 0 for one in pair)):
                raise ValueError(f"ranks must be [global rank, process id] each, not {pair!r:.80}")
            found[pair[0]] = pair[1]
        return found


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank has failed."""

    epoch: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class LostPeers:
    """Ranks wait after an error that says a peer is lost, and no rank of this host has failed."""

    epoch: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The heartbeats of the launcher's ranks."""

    epoch: int
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """All ranks of the launcher have finished."""

    epoch: int
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Answers a request to save.

    Attributes:
        problem: why no checkpoint was committed; "": one was.
    """

    epoch: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A request of another process than the launcher (``resiliency inject``): puts a fault into this monitor, or asks
    for its ranks."""

    action: str
    seconds: float = 0.0
    device: str = ""
    code: int = 0
    count: int = 0


FromLauncher = Waiting | Master | Running | Lost | LostPeers | Pages | Ended | Saved
_KINDS: dict[str, Any] = {
    "waiting": Waiting,
    "master": Master,
    "running": Running,
    "lost": Lost,
    "lost_peers": LostPeers,
    "pages": Pages,
    "ended": Ended,
    "saved": Saved,
    "control": Control,
}
assert set(_KINDS.values()) == {*get_args(FromLauncher), Control}


def read_message(end: socket.socket) -> FromLauncher | Control | None:
    """Reads the next message of a socket that is readable; None when the other end was closed. Ignores unknown fields,
    because the launcher may be newer. Blocks: no.

    Raises:
        AgentError: it is not a valid message; the error says why.
        OSError: the connection broke.
    """
    data, fds = _received(end)
    try:
        if not data:
            return None
        if not fds:
            raise AgentError("a message without its text")
        return _parsed(_text(fds[0]))
    finally:
        for fd in fds:
            os.close(fd)


def _received(end: socket.socket) -> tuple[bytes, list[int]]:
    """Receives one packet, and all descriptors that came with it, so that they can be closed."""
    fds = array.array("i")
    data, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(64 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, part in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)


def _text(fd: int) -> bytes:
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)  # fails for every other kind of file, from which a read might block
    except OSError:
        raise AgentError("a message whose text is not in memory") from None
    size = os.fstat(fd).st_size
    if size > MOST_BYTES:
        raise AgentError(f"a message of {size} bytes; {MOST_BYTES} are the most")
    return os.pread(fd, size, 0)


def _parsed(text: bytes) -> FromLauncher | Control:
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("kind")]
        known = {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}
        found: FromLauncher | Control = from_jsonable(kind, known)
        if isinstance(found, Running):
            found.pids()
        if isinstance(found, (Running, Pages)) and len(found.ranks) > _MOST_RANKS:
            raise ValueError(f"{len(found.ranks)} ranks of one host")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AgentError(f"not a message of the channel ({type(error).__name__}: {error}): {text[:80]!r}") from error
    return found
