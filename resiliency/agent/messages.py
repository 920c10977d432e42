"""What trainer and host agent say to each other. Each message is a frozen dataclass; a save is named by its StepId.

Trainer to agent: :class:`Hello` first, then any of :data:`Request`. Agent to trainer: :class:`Welcome` or
:class:`Refused`, then any of :data:`Notice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.agent.config import AgentConfig
from resiliency.storage.manifest import StepId
from resiliency.storage.stage import Stage

__all__ = [
    "Bye",
    "Committed",
    "Complete",
    "Delete",
    "Durable",
    "Failed",
    "FileFreed",
    "FileGone",
    "Flush",
    "Flushed",
    "Hello",
    "Message",
    "Notice",
    "Recorded",
    "Refused",
    "Request",
    "Rescan",
    "Seal",
    "Welcome",
]


# -- trainer to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A rank has connected.

    Attributes:
        version: of the protocol the rank speaks.
        rank: global rank.
        config: of its attempt; equal on all ranks of the host. None when the rank speaks another version.
    """

    version: int
    rank: int
    config: AgentConfig | None


@dataclass(frozen=True, kw_only=True)
class Seal:
    """Every byte of this rank's shard of a save is in its file; commit it.

    Attributes:
        id: the save.
        path, inode, nbytes: the file, and its size in bytes. It belongs to the agent from here on.
        digests: one per block of the file, in order, see :mod:`resiliency.storage.blocks`.
        plan, names, supersedes, created, info, tiers, exact: as in :class:`~resiliency.storage.manifest.ShardRecord`.
    """

    id: StepId
    path: str
    inode: int
    nbytes: int
    digests: tuple[str, ...]
    plan: str
    names: tuple[str, ...] = ()
    supersedes: tuple[str, ...] = ()
    created: float = 0.0
    info: Mapping[str, Any]
    tiers: tuple[str, ...] = ()
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Every rank of the job has recorded its shard of this save, on whatever host: commit this host's part."""

    id: StepId


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Delete names, and the steps nothing refers to any more, once a later save is safe.

    Attributes:
        names: to be deleted.
        after: the newest save when the deletion was asked for: what the names mean up to there goes, once this save or
            a later one is safe. None: nothing was saved in this attempt; what earlier attempts left may go.
    """

    names: tuple[str, ...]
    after: StepId | None = None


@dataclass(frozen=True, kw_only=True)
class Rescan:
    """The trainer has brought files into the local tier (a restore); look again at what is there."""


@dataclass(frozen=True, kw_only=True)
class Flush:
    """Answer with :class:`Flushed` when everything sealed so far has come to a stage.

    Attributes:
        ticket: number that the answer repeats.
        stage: RECORDED or COMMITTED on the local tier; DURABLE on ``tier``.
        tier: name of the tier that DURABLE is about; None: all tiers of each save.
        timeout_s: seconds after which the answer is "not done".
    """

    ticket: int
    stage: Stage
    tier: str | None = None
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Bye:
    """The rank's job has finished; it will not come back."""


# -- agent to trainer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The answer to :class:`Hello`. ``pid``: process id of the agent."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The other answer to :class:`Hello`: the agent does not serve this job."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """This rank's record of a save is written; the next save may begin."""

    id: StepId


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The save is whole on a tier and survives the death of every process."""

    id: StepId
    tier: str


@dataclass(frozen=True, kw_only=True)
class Durable:
    """The save survives a power loss: fsynced on a disk, or stored whole on a remote tier."""

    id: StepId
    tier: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The save did not come further on a tier.

    Attributes:
        reason: for people.
        retrying: the agent tries again by itself; a later message tells how it ended.
    """

    id: StepId
    tier: str
    reason: str
    retrying: bool = False


@dataclass(frozen=True, kw_only=True)
class FileFreed:
    """A shard file of this rank belongs to no step any more and may be filled again; ``path`` is where it lies now."""

    inode: int
    path: str


@dataclass(frozen=True, kw_only=True)
class FileGone:
    """A shard file of this rank was deleted."""

    inode: int


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """The answer to :class:`Flush`: ``done`` is False when the time was up first."""

    ticket: int
    done: bool


Request = Seal | Complete | Delete | Rescan | Flush | Bye
Notice = Recorded | Committed | Durable | Failed | FileFreed | FileGone | Flushed
Message = Hello | Request | Welcome | Refused | Notice
