"""Starts the copies of a rank's saves, and reports the files to the agent when they are copied."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import time
from dataclasses import dataclass
from functools import partial

from resiliency.agent.messages import Seal, SealedFile
from resiliency.checkpoint.arena import Arena, Slot
from resiliency.checkpoint.copier import Copier
from resiliency.checkpoint.save_tracker import InFlightSave, SaveTracker
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.shard_writer import BouncePool, ShardPlan, WrittenFile, small_file, state_job
from resiliency.checkpoint.snapshot import Job, Snapshot
from resiliency.faultpoints import hit
from resiliency.spans import traced
from resiliency.state.load_proof import LoadProof
from resiliency.state.structure import Structure
from resiliency.storage.blocks import BLOCK_BYTES, Blocks, block_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import BlockShare, ShardRecord, shard_file
from resiliency.storage.shard_file import Identity
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = ["SaveCopies"]

logger = logging.getLogger(__name__)


class SaveCopies:
    """The copies of one open checkpointer. Thread: training.

    Args:
        run, rank, world_size: of the checkpointer.
        session, saves, arena, copier: parts of the checkpointer.
    """

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        world_size: int,
        session: Session,
        saves: SaveTracker,
        arena: Arena,
        copier: Copier,
    ) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size
        self._session, self._saves, self._arena, self._copier = session, saves, arena, copier
        self._bounce = BouncePool()
        self._proof, self._saves_begun = LoadProof(), 0
        self._late_saves = 0  # of lazy saves; the 1st, 2nd, 4th, 8th, ... is compared with the tensors

    def start(self, plan: ShardPlan, in_flight: InFlightSave, seal: Seal) -> int:
        """Starts the copies of a save; after them the copy thread sends ``seal``, completed with the files, to the
        agent.

        Returns:
            The number of bytes that may be copied late.
        """
        self._saves_begun += 1
        save = _Save(
            plan=plan,
            in_flight=in_flight,
            seal=seal,
            shard=0 if plan.replicated else self._rank,
            proven=self._saves_begun.bit_count() == 1,
        )

        def done(snapshot: Snapshot) -> None:
            self._done(save, snapshot)

        def hold(snapshot: Snapshot | None) -> None:
            in_flight.snapshot = snapshot

        hit("save.eager", rank=self._rank)
        file = plan.file
        if file is None:
            nothing = Job(copies=(), blocks=Blocks(0, BLOCK_BYTES), mine=(), trace=in_flight.trace)
            self._copier.start(nothing, done, hold=hold)
            return 0
        path = self._path(seal.id, save.shard, replicated=plan.replicated)

        def open_file() -> Slot:
            return self._arena.open(path, file.plan.mapped_nbytes, writers=file.plan.writers)

        def record() -> ShardRecord:
            now = dataclasses.replace(seal, supersedes=tuple(in_flight.supersedes))
            nothing = SealedFile(shard=self._rank, path="", inode=0, nbytes=0, block_bytes=BLOCK_BYTES, digests=())
            return now.record(nothing, run=self._run, node=self._session.node, world_size=self._world_size)

        self._late_saves += file.lazy is not None and True in file.lazy
        job, lazy_bytes = state_job(
            file,
            self._identity(save, save.shard),
            None if self._has_own_file(save) else plan.own,
            save.written,
            self._bounce,
            open_file=open_file,
            record=record if plan.replicated and self._world_size == 1 else None,
            discard=lambda: _remove(path),
            compare=self._late_saves.bit_count() == 1,  # 1, 2, 4, 8, ...
        )
        if in_flight.trace is not None:
            job = dataclasses.replace(job, trace=in_flight.trace)
        self._copier.start(job, done, hold=hold)
        return lazy_bytes

    def _done(self, save: _Save, snapshot: Snapshot) -> None:
        """Seals the save on the copy thread, which must survive any failure; the training thread reports it."""
        failure, trace = snapshot.error, save.in_flight.trace
        if failure is None:
            try:
                with traced(trace, "seal"):
                    sealed = self._seal(save, snapshot)
                if trace is not None:
                    trace.sealed()
                self._session.client.send(sealed)
                if save.proven:
                    # Without the plan, because what is kept until then must not keep the state's tensors.
                    snapshot.afterwards = partial(
                        self._prove, sealed.id, save.written.structure, save.plan.own.structure
                    )
                save.written.structure = b""
                return
            except OSError as error:
                failure = error
            except Exception as error:  # Boundary: the copy thread must survive.
                logger.exception("the agent could not be told of a copied shard: this save fails")
                failure = error
        self._saves.copy_failed(save.in_flight, failure)

    def _seal(self, save: _Save, snapshot: Snapshot) -> Seal:
        """Writes the rest of this rank's part, and returns the seal that reports it to the agent."""
        in_flight, file = save.in_flight, save.plan.file
        files: list[SealedFile] = []
        share, share_inode = None, 0
        if file is not None and snapshot.slot is not None:
            if file.plan.index == 0:
                files.append(
                    SealedFile(
                        shard=save.shard,
                        path=snapshot.slot.path,
                        inode=snapshot.slot.inode,
                        nbytes=save.written.nbytes,
                        block_bytes=file.plan.block_bytes,
                        sections=save.written.sections,
                        digests=tuple(snapshot.digests),
                    )
                )
            elif file.plan.mine:
                first, last = file.plan.mine[0], file.plan.mine[-1]
                share = BlockShare(first=first, digests=tuple(snapshot.digests[first : last + 1]))
                share_inode = snapshot.slot.inode
        if self._has_own_file(save):
            path = self._path(save.seal.id, self._rank)
            files.append(_write_small(path, self._rank, small_file(self._identity(save, self._rank), save.plan.own)))
        hit("save.sealed", rank=self._rank)
        in_flight.sealed_at = time.monotonic()
        in_flight.ticket.mark_reached(Stage.COPIED)
        return dataclasses.replace(
            save.seal,
            files=tuple(files),
            share=share,
            share_inode=share_inode,
            supersedes=tuple(in_flight.supersedes),
        )

    def _prove(self, save: StepId, state: bytes, own: Structure) -> None:
        """Warns when a later start would refuse to load this save. Runs after the seal, which need not wait for it."""
        for structure in (state, own.data_pickle()):
            refusal = self._proof.refusal(structure) if structure else ""
            if refusal:
                logger.warning(
                    "rank %d: %s is saved, but a start that is to go on from it will refuse to load it: %s",
                    self._rank,
                    save,
                    refusal,
                )

    def _has_own_file(self, save: _Save) -> bool:
        """True when this rank writes a small shard of its own: in a replicated state, only rank 0's shard holds the
        state."""
        return save.plan.replicated and self._rank != 0

    def _identity(self, save: _Save, number: int) -> Identity:
        return Identity(
            id=save.seal.id,
            run=self._run,
            rank=number,
            world_size=self._world_size,
            replicated=save.plan.replicated,
        )

    def _path(self, step: StepId, shard: int, *, replicated: bool = True) -> str:
        file = shard_file(shard, replicated=replicated)
        return self._session.local_tier.location(step_prefix(self._run, step) + file)


@dataclass(frozen=True, kw_only=True)
class _Save:
    """One save of this rank.

    Attributes:
        shard: number of the shard with the state.
        proven: load the save's pickle to check that this works: done for the 1st, 2nd, 4th, 8th, ... save.
        written: facts of the written file, filled in by the copy thread.
    """

    plan: ShardPlan
    in_flight: InFlightSave
    seal: Seal
    shard: int
    proven: bool
    written: WrittenFile = dataclasses.field(default_factory=WrittenFile)


def _remove(path: str) -> None:
    """Deletes the file of a save that was given up, and the step's folder if it is empty then.

    Raises:
        OSError: it cannot be deleted, and stays until a later step is committed.
    """
    os.unlink(path)
    try:
        os.rmdir(os.path.dirname(path))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # files of other ranks
            raise


def _write_small(path: str, shard: int, data: bytes) -> SealedFile:
    """Writes the small shard of a rank, and returns what to seal of it.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        inode = os.fstat(file.fileno()).st_ino
    blocks = Blocks(len(data), BLOCK_BYTES)
    digests = tuple(block_digest(memoryview(data)[slice(*blocks.bounds(index))]) for index in range(blocks.count))
    return SealedFile(shard=shard, path=path, inode=inode, nbytes=len(data), block_bytes=BLOCK_BYTES, digests=digests)
