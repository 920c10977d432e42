"""The messages between trainer and host agent. Each is a frozen dataclass; a save is identified by its StepId.

Trainer to agent: :class:`Hello` first, then any of :data:`Request`. Agent to trainer: :class:`Welcome` or
:class:`Refused`, then any of :data:`Notice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.agent.config import AgentConfig
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

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
        version: the rank's protocol version.
        rank: global rank.
        config: of its attempt; equal on all ranks of the host. None when the rank has another protocol version.
    """

    version: int
    rank: int
    config: AgentConfig | None


@dataclass(frozen=True, kw_only=True)
class Seal:
    """This rank's shard of a save is completely written to its file: commit it.

    Attributes:
        id: the save.
        path, inode, nbytes: the file, and its size in bytes. The rank must not write to it any more.
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
    """Every rank of the job, on every host, has a record of its shard of this save: commit this host's part."""

    id: StepId


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Delete names, and the steps left without a name, once a newer save is durable.

    Attributes:
        names: the names to delete.
        after: the newest save when the deletion was requested. Of the steps the names point to, those up to this save
            are deleted, once it or a later save is durable. None: nothing was saved in this attempt; only steps of
            earlier attempts are deleted.
    """

    names: tuple[str, ...]
    after: StepId | None = None


@dataclass(frozen=True, kw_only=True)
class Rescan:
    """The trainer has added files to the local tier (a restore): list it again."""


@dataclass(frozen=True, kw_only=True)
class Flush:
    """Answer with :class:`Flushed` when everything sealed so far has reached a stage.

    Attributes:
        ticket: number that the answer carries too.
        stage: RECORDED or COMMITTED on the local tier; DURABLE on ``tier``.
        tier: name of the tier for DURABLE; None: all tiers of each save.
        timeout_s: seconds after which the agent answers ``done=False``.
    """

    ticket: int
    stage: Stage
    tier: str | None = None
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Bye:
    """The rank's job has finished; the rank will not connect again."""


# -- agent to trainer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The answer to :class:`Hello`. ``pid``: process id of the agent."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The answer to :class:`Hello` of an agent that does not serve this job."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """This rank's record of a save is written; the next save may begin."""

    id: StepId


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The save is committed on a tier: it survives the death of every process."""

    id: StepId
    tier: str


@dataclass(frozen=True, kw_only=True)
class Durable:
    """The save is durable: fsynced on a disk, or committed on a remote tier. It survives a power loss."""

    id: StepId
    tier: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The save failed to reach its next stage on a tier.

    Attributes:
        reason: text for the log.
        retrying: the agent tries again; a later message has the outcome.
    """

    id: StepId
    tier: str
    reason: str
    retrying: bool = False


@dataclass(frozen=True, kw_only=True)
class FileFreed:
    """A shard file of this rank belongs to no step any more and may be reused; ``path`` is its path now."""

    inode: int
    path: str


@dataclass(frozen=True, kw_only=True)
class FileGone:
    """A shard file of this rank was deleted."""

    inode: int


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """The answer to :class:`Flush`; ``done`` is False when ``timeout_s`` passed first."""

    ticket: int
    done: bool


Request = Seal | Complete | Delete | Rescan | Flush | Bye
Notice = Recorded | Committed | Durable | Failed | FileFreed | FileGone | Flushed
Message = Hello | Request | Welcome | Refused | Notice
