"""The messages between trainer and host agent: frozen dataclasses, in which a StepId identifies a save.

Trainer to agent: :class:`Hello` first, then any of :data:`Request`. Agent to trainer: :class:`Welcome` or
:class:`Refused`, then any of :data:`Notice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resiliency.agent.config import AgentConfig
from resiliency.storage.manifest import BlockShare, ShardRecord
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = [
    "Bye",
    "Committed",
    "Complete",
    "Delete",
    "Durable",
    "Failed",
    "FileReady",
    "Flush",
    "Flushed",
    "GiveUp",
    "Heard",
    "Hello",
    "Message",
    "NameRefused",
    "Notice",
    "Prepare",
    "Recorded",
    "Refused",
    "Request",
    "Rescan",
    "Seal",
    "SealedFile",
    "TierSave",
    "Trace",
    "TraceEnded",
    "Traced",
    "Welcome",
]


# -- trainer to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TierSave:
    """A save on a tier."""

    tier: str
    id: StepId


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What earlier agents of the attempt have told a rank.

    Attributes:
        newest: for each tier the newest save that the rank was notified of as committed on the local tier, or durable
            on another one: it and those before it have been given their names there.
        failed: saves that failed on the local tier; the newest.
        awaited: saves that are committed on the local tier and go to a remote one, of which nothing was heard yet;
            oldest first.
    """

    newest: tuple[TierSave, ...] = ()
    failed: tuple[StepId, ...] = ()
    awaited: tuple[TierSave, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A rank has connected; the first message of a connection.

    Attributes:
        version: the rank's protocol version.
        rank: global rank.
        config: of its attempt; equal on all ranks of the host. None when the rank has another protocol version.
        heard: what earlier agents have told the rank.
    """

    version: int
    rank: int
    config: AgentConfig | None
    heard: Heard = Heard()


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    """A completely written shard file in its step's folder.

    Attributes:
        shard: number of the shard.
        path, inode, nbytes: the file, and its size in bytes. The rank must not write to it any more.
        block_bytes, sections, digests: as in :class:`~resiliency.storage.manifest.ShardRecord`.
    """

    shard: int
    path: str
    inode: int
    nbytes: int
    block_bytes: int
    sections: tuple[int, ...] = ()
    digests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Seal:
    """This rank has completely written its part of a save, and asks the agent to record it.

    Attributes:
        id: the save.
        files: files that this rank has written, or whose last part it has written; that of its own shard is last.
        share_inode: inode of shard 0 of the step, the file that ``share`` is in; 0 without a share.
        share, replicated, plan, names, supersedes, created, info, job, tiers, exact: as in
            :class:`~resiliency.storage.manifest.ShardRecord`.
    """

    id: StepId
    files: tuple[SealedFile, ...]
    plan: str
    share: BlockShare | None = None
    share_inode: int = 0
    replicated: bool = False
    names: tuple[str, ...] = ()
    supersedes: tuple[str, ...] = ()
    created: float = 0.0
    info: Mapping[str, Any]
    job: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    exact: bool = True

    def record(self, file: SealedFile, *, run: str, node: str, world_size: int, own: bool = True) -> ShardRecord:
        """The record of one of the sealed files. ``own``: the file is the sealing rank's shard, not its host's copy of
        shard 0."""
        return ShardRecord(
            id=self.id,
            run=run,
            rank=file.shard,
            world_size=world_size,
            node=node,
            nbytes=file.nbytes,
            block_bytes=file.block_bytes,
            sections=file.sections,
            digests=file.digests,
            share=self.share if own else None,
            replicated=self.replicated,
            plan=self.plan,
            names=self.names,
            supersedes=self.supersedes,
            created=self.created,
            info=self.info,
            job=self.job,
            tiers=self.tiers,
            exact=self.exact,
        )


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Saves will need files of this size: prepare some.

    Attributes:
        nbytes: size of a file in bytes.
        count: number of files that the rank would like; the agent may keep fewer.
    """

    nbytes: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """A part of this save will never be written: stop waiting for it, and delete the rest.

    Attributes:
        reason: text for the logs of the other ranks.
    """

    id: StepId
    reason: str


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
    """The trainer has added files to the local tier (a restore): list it again.

    Attributes:
        loaded: the restored step, kept until a save that follows it is durable; None: nothing to keep.
        line: line of descent of the saves to come.
    """

    loaded: StepId | None = None
    line: int = 0


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
class Trace:
    """Asks for :class:`Traced` messages about all work for this save.

    Attributes:
        end: stop sending; the answer is :class:`TraceEnded`, after the work that is queued on the local tier.
    """

    id: StepId
    end: bool = False


@dataclass(frozen=True, kw_only=True)
class Bye:
    """The rank is about to disconnect in order, and will not connect again.

    Attributes:
        finished: the job has finished; False after an exception.
    """

    finished: bool = True


# -- agent to trainer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The answer to :class:`Hello`. ``pid``: process id of the agent."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The answer to :class:`Hello` from an agent that does not serve this job.

    Attributes:
        in_use: it serves another job.
    """

    reason: str
    in_use: bool = False


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
        retrying: the agent will try again; a later message has the outcome.
        gave_way: the save was not sent to a remote tier, because a newer save is to go there instead.
    """

    id: StepId
    tier: str
    reason: str
    retrying: bool = False
    gave_way: bool = False


@dataclass(frozen=True, kw_only=True)
class NameRefused:
    """The save does not get one of its names on a tier; it is committed without it.

    Attributes:
        reason: text for the log: another run has the name, or a file of somebody else has it.
    """

    id: StepId
    tier: str
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FileReady:
    """A prepared file, whose pages are in memory: the next save may move it into its step.

    Attributes:
        path, inode, nbytes: of the file; "" and 0: the agent can prepare none, so do not wait for one.
        is_new: it was made now, not taken from a deleted step: its bytes have not been written to a disk yet.
    """

    path: str
    inode: int
    nbytes: int
    is_new: bool = False


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """The answer to :class:`Flush`; ``done`` is False when ``timeout_s`` passed first."""

    ticket: int
    done: bool


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A piece of work for a save that this rank traces, see :class:`~resiliency.spans.Span`."""

    id: StepId
    name: str
    began_ns: int
    ended_ns: int
    pid: int
    thread: int
    thread_name: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceEnded:
    """The answer to :class:`Trace` with ``end``: no :class:`Traced` of this save follows."""

    id: StepId


Request = Seal | GiveUp | Prepare | Complete | Delete | Rescan | Flush | Trace | Bye
Notice = Recorded | Committed | Durable | Failed | NameRefused | FileReady | Flushed | Traced | TraceEnded
Message = Hello | Request | Welcome | Refused | Notice
