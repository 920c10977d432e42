"""What a launcher says to the monitor of its host, checked field by field, and what it is told."""

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
from resiliency.storage.typed_json import from_jsonable
from resiliency.supervisor.messages import RankReport

__all__ = [
    "MOST_BYTES",
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

#: The pages of 4,096 ranks of a host are less.
MOST_BYTES = 1024 * 1024
_MOST_RANKS = 4096
#: Defined by Linux, not by Python; only files of memfd_create have seals.
_F_GET_SEALS = 1034


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """It has no ranks, and waits for a place of a later epoch. Attributes: warm: ranks can be forked at once."""

    epoch: int = 0
    warm: bool = True


@dataclass(frozen=True, kw_only=True)
class Master:
    """It is node rank 0, and its store listens at ``address``."""

    epoch: int
    address: str


@dataclass(frozen=True, kw_only=True)
class Running:
    """Its ranks were started. Attributes: ranks: local rank -> [global rank, process id]."""

    epoch: int
    ranks: Mapping[str, Any]

    def pids(self) -> dict[int, int]:
        """Process ids by global rank.

        Raises:
            ValueError: it is not of that shape.
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
    """Ranks wait with an error of a lost peer, and none of this host has failed."""

    epoch: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The heartbeats of its ranks."""

    epoch: int
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """All of its ranks have finished."""

    epoch: int
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The answer to a wish for a save. Attributes: problem: "": a checkpoint was committed."""

    epoch: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Control:
    """Not of a launcher: a fault that is put into this monitor, see :mod:`~resiliency.supervisor.inject`."""

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
    """The next message of a socket that has something to read; None when nobody has the other end any more.

    Other fields than these are left out: the launcher may be newer. Blocks: no.

    Raises:
        AgentError: it is no message of the channel; the error says why.
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
    """One packet, with all the files that came with it, so that they can be closed."""
    fds = array.array("i")
    data, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(64 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, part in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)


def _text(fd: int) -> bytes:
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)  # of another kind of file a read might wait
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
