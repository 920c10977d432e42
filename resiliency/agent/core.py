"""The agent's work: commit, make durable, upload, prune. Runs in the agent process or, as a fallback, in the trainer.

One instance serves the ranks of one host in one attempt. Every decision about completeness is made from files, so that
several agents (one per host on a shared folder, or one per rank when embedded) can work side by side and an agent that
dies at any point leaves nothing that its successor cannot finish or discard.

Order of a commit on the local tier: shard renamed into its step folder, record, manifest (last), name files. Then, on
a durable tier, fsync of all of it; only then older steps are pruned, manifest first.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from resiliency import faultpoints
from resiliency.agent._removal import Remover
from resiliency.agent._reporter import Notify, Reporter
from resiliency.agent._worker import Worker
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.messages import Bye, Complete, Delete, FileFreed, Recorded, Request, Rescan, Seal
from resiliency.agent.uploader import Uploader, UploadOutcome
from resiliency.errors import AgentError, CorruptShard, TierError
from resiliency.events import EventWriter
from resiliency.storage.blocks import BLOCK_BYTES, Blocks
from resiliency.storage.catalog import read_name, scan, step_prefix
from resiliency.storage.fetch import remove_dead_fetches
from resiliency.storage.manifest import (
    MANIFEST,
    Manifest,
    NameFile,
    ShardRecord,
    StepId,
    UnfinishedStep,
    gather_records,
    record_file,
)
from resiliency.storage.retention import DeleteRequest, live_names, steps_to_delete
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier, fsync_dir, fsync_file

__all__ = ["HostAgent"]

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """What the agent knows of a step on the local tier.

    Attributes:
        committed: the step, once it is committed here; on a node-local tier of a job over several hosts this host's
            part of it, whose other parts are committed elsewhere.
        pins: uploads under way, while which it is not deleted.
        began: monotonic time when the save began.
    """

    id: StepId
    records: dict[int, ShardRecord] = field(default_factory=dict)
    committed: Manifest | UnfinishedStep | None = None
    durable: bool = False
    pins: int = 0
    began: float = field(default_factory=time.monotonic)


class HostAgent:
    """See the module docstring.

    Args:
        config: of this attempt.
        notify: how a rank is told something.
        events: where facts go.
        alone: no other agent works in the same folder of this host.

    Threads: :meth:`handle` from any; the work is done on threads of its own, all named ``resiliency-agent-*``.
    """

    def __init__(
        self,
        config: AgentConfig,
        notify: Notify,
        events: EventWriter,
        *,
        alone: bool = True,
    ) -> None:
        self.config = config
        self._alone = alone
        self._report = Reporter(config.local_ranks, notify, events)
        # Commits must be quick and survive a kill, not a power loss: fsync follows in its own stage.
        self._tier = LocalTier(config.local.address, durable=False, name=config.local.name)
        self._lock = threading.RLock()
        self._steps: dict[StepId, _Step] = {}
        self._deletes: dict[str, DeleteRequest] = {}
        self._commits = Worker("resiliency-agent-commit")
        self._syncs = Worker("resiliency-agent-sync")
        self._uploaders = [Uploader(config, spec, self._path, self._uploaded, events) for spec in config.remotes]
        self._finished: set[int] = set()
        self._closed = False
        self._remover = Remover(config, self._tier, notify)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads what is there and resumes uploads an earlier agent did not finish. Blocks: one listing.

        Raises:
            TierError: the local tier cannot be listed.
        """
        self._rescan()
        self._syncs.submit(self._sweep)
        with self._lock:
            newest = max((s for s in self._steps.values() if s.committed is not None), key=lambda s: s.id, default=None)
        if newest is not None and newest.committed is not None:
            for uploader in self._uploaders:
                if uploader.spec.name in newest.committed.tiers:
                    self._pin(newest.id)
                    uploader.submit(newest.id, self._own_records(newest), only_if_missing=True)

    def _sweep(self) -> None:
        """Removes what killed writers and killed restores left half done; no listing shows it, but it takes room."""
        try:
            remove_dead_fetches(self.config.local.address, self.config.run, self.config.node)
            self._tier.sweep()
        except TierError as error:
            logger.info("%s could not be swept: %s", self.config.local.address, error)

    def announce(self, rank: int) -> None:
        """Tells a rank that has just connected what became of the saves of its attempt: an agent before this one may
        have died between doing something and saying so."""

        def tell() -> None:
            with self._lock:
                ours = [s for s in self._steps.values() if self._is_ours(s.id) and s.committed is not None]
            for step in sorted(ours, key=lambda s: s.id):
                self._report.tell_reached(step.id, Stage.COMMITTED, self.config.local.name, ranks=(rank,))
                if step.durable and self.config.durable:
                    self._report.tell_reached(step.id, Stage.DURABLE, self.config.local.name, ranks=(rank,))

        self._commits.submit(tell)

    def _is_ours(self, step: StepId) -> bool:
        return step.of_attempt(self.config.attempt, self.config.token)

    def _rescan(self) -> None:
        found = {listing.id: listing for listing in scan(self._tier, self.config.run)}
        with self._lock:
            for step in list(self._steps):
                if step not in found and self._steps[step].committed is not None and self._steps[step].pins == 0:
                    del self._steps[step]
            for listing in found.values():
                known = self._steps.setdefault(listing.id, _Step(listing.id))
                known.records.update(listing.records)
                if listing.manifest is not None and known.committed is None:
                    # Whoever committed it may have died before its fsync: nothing older is deleted before ours.
                    known.committed = listing.manifest
                    self._syncs.submit(partial(self._sync, known))

    def wait(self, stage: Stage, *, tier: str | None = None, timeout_s: float) -> bool:
        """Waits until everything sealed so far has come to a stage, see :class:`~resiliency.agent.messages.Flush`."""
        deadline = time.monotonic() + timeout_s
        workers = [self._commits]
        uploaders = [uploader for uploader in self._uploaders if tier in (None, uploader.spec.name)]
        if stage is Stage.DURABLE:
            workers += [self._syncs, self._commits]
        done = all(worker.wait_idle(deadline) for worker in workers)
        if done and stage is Stage.DURABLE and uploaders:
            done = all(uploader.wait_idle(deadline) for uploader in uploaders) and self._commits.wait_idle(deadline)
        return done

    @property
    def idle(self) -> bool:
        """True when nothing sealed is left to do."""
        return self._commits.idle and self._syncs.idle and all(uploader.idle for uploader in self._uploaders)

    def close(self) -> None:
        """Stops all threads and tidies a ramdisk; unfinished uploads are left to a later start. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for uploader in self._uploaders:
            uploader.close()
        for worker in (self._syncs, self._commits):
            worker.close()
        if not self.config.durable:
            try:
                self._tidy_ramdisk()
            except (OSError, TierError):
                # Boundary: the end of the agent; what stays is taken up or removed by the next start.
                logger.warning("%s could not be tidied", self.config.local.address, exc_info=True)

    def _tidy_ramdisk(self) -> None:
        """Gives memory back: free files always, and the checkpoints too when the job has ended and a slower tier has
        them."""
        self._remover.drop_free_files()
        if not self._alone or not self._finished.issuperset(self.config.local_ranks):
            return
        committed = [step.committed for step in self._steps.values() if step.committed is not None]
        newest = max((step.id for step in committed), default=None)
        if newest is None or any(uploader.holds(newest) for uploader in self._uploaders):
            self._remover.drop_run([name for step in committed for name in step.names])

    # -- messages -----------------------------------------------------------------------------------------------

    def handle(self, rank: int, message: Request) -> None:
        """Takes one message of a rank. Returns at once.

        Raises:
            AgentError: the message is about another start of the job, or does not add up.
        """
        if isinstance(message, Seal):
            faultpoints.hit("agent.seal.received", rank=rank)
            record = self._record(rank, message)
            self._commits.submit(partial(self._commit, record, message.path, message.inode))
        elif isinstance(message, Delete):
            self._delete(message)
        elif isinstance(message, Complete):
            self._check_attempt(rank, message.id)
            self._commits.submit(partial(self._complete, message.id, all_recorded=True))
        elif isinstance(message, Rescan):
            self._commits.submit(self._rescan)
        elif isinstance(message, Bye):
            self._finished.add(rank)

    def _check_attempt(self, rank: int, step: StepId) -> None:
        if not self._is_ours(step):
            raise AgentError(
                f"rank {rank} speaks of {step}, but this agent serves attempt {self.config.attempt}"
                f" ({self.config.token}); it is ignored"
            )

    def _delete(self, message: Delete) -> None:
        # Before the first save of this attempt the names mean what earlier attempts left.
        upto = message.after or StepId(0, self.config.attempt, "")
        requests = dict.fromkeys(message.names, DeleteRequest(upto=upto, after=message.after))
        with self._lock:
            self._deletes.update(requests)
        for uploader in self._uploaders:
            uploader.delete(requests)
        self._commits.submit(self._prune)

    # -- commit -------------------------------------------------------------------------------------------------

    def _path(self, step: StepId, file: str) -> str:
        return os.path.join(self.config.local.address, step_prefix(self.config.run, step), file)

    def _record(self, rank: int, seal: Seal) -> ShardRecord:
        self._check_attempt(rank, seal.id)
        if len(seal.digests) != Blocks(seal.nbytes, BLOCK_BYTES).count:
            raise AgentError(
                f"rank {rank} sent {len(seal.digests)} digests for {seal.nbytes} bytes in blocks of {BLOCK_BYTES}"
            )
        return ShardRecord(
            id=seal.id,
            run=self.config.run,
            rank=rank,
            world_size=self.config.world_size,
            node=self.config.node,
            nbytes=seal.nbytes,
            block_bytes=BLOCK_BYTES,
            digests=seal.digests,
            plan=seal.plan,
            names=seal.names,
            supersedes=seal.supersedes,
            created=seal.created,
            info=seal.info,
            tiers=seal.tiers,
            exact=seal.exact,
        )

    def _commit(self, record: ShardRecord, path: str, inode: int) -> None:
        """Moves a sealed shard file into its step and writes its record."""
        target, prefix = self._path(record.id, record.file), step_prefix(self.config.run, record.id)
        try:
            faultpoints.hit("agent.shard.rename", rank=record.rank)
            if _is_file(path, inode, record.nbytes):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(path, target)
            elif not _is_file(
                target, inode, record.nbytes
            ):  # where an agent before this one, which then died, may have put it
                raise FileNotFoundError(errno.ENOENT, "the sealed file is gone or was changed", path)
            faultpoints.hit("agent.record.write", rank=record.rank)
            self._tier.put_bytes(prefix + record_file(record.rank), json.dumps(record.to_dict()).encode())
        except (OSError, TierError) as error:
            self._undo(path, inode, target, record.nbytes)
            self._failed(record, path, inode, f"cannot commit to {self.config.local.address}: {error}")
            return
        with self._lock:
            step = self._steps.setdefault(record.id, _Step(record.id))
            step.records[record.rank] = record
            step.began = min(step.began, time.monotonic() - max(0.0, time.time() - record.created))
        self._report.notify(record.rank, Recorded(id=record.id))
        self._complete(record.id)

    def _undo(self, path: str, inode: int, target: str, nbytes: int) -> None:
        """Puts the shard file back into the arena after a commit that failed."""
        try:
            if _is_file(target, inode, nbytes):
                os.rename(target, path)
        except OSError:
            logger.warning("%s could not be moved back to %s; it is pruned with its step", target, path, exc_info=True)

    def _failed(self, record: ShardRecord, path: str, inode: int, reason: str) -> None:
        tier = self.config.local.name
        self._report.tell_failed(record.id, tier, reason, ranks=(record.rank,))
        self._report.notify(record.rank, FileFreed(inode=inode, path=path))
        self._report.log_failed(record.id, Stage.RECORDED, tier, reason, will_retry=True, shard=record.rank)
        self._report.warn_once(
            "commit",
            "checkpoint of step %d failed on rank %d: %s; training goes on, the next save tries again",
            record.id.step,
            record.rank,
            reason,
        )

    def _complete(self, step_id: StepId, *, all_recorded: bool = False) -> None:
        """Commits the step when every shard's record can be seen, or ``all_recorded`` says that every rank has one."""
        with self._lock:
            step = self._steps.get(step_id)
            if step is None or step.committed is not None:
                return
            records = dict(step.records)
        if self.config.shared and not self._read_other_records(step_id, records):
            return  # whoever writes the last record commits
        found = gather_records(records.values())
        if found is None:
            if len({record.plan for record in records.values()}) > 1 and len(records) == self.config.world_size:
                self._refuse_plans(step_id)
            return
        if isinstance(found, UnfinishedStep) and (self.config.shared or not all_recorded):
            return
        try:
            self._write_commit(found)
        except (OSError, TierError) as error:
            tier = self.config.local.name
            self._report.log_failed(step_id, Stage.COMMITTED, tier, str(error), will_retry=True)
            self._report.warn_once(
                "commit",
                "checkpoint of step %d failed: %s; training goes on, the next save tries again",
                step_id.step,
                error,
            )
            self._report.tell_failed(step_id, tier, str(error))
            return
        with self._lock:
            step.records, step.committed = records, found
        self._report.recovered("commit")
        self._report.log_reached(
            step_id,
            Stage.COMMITTED,
            self.config.local.name,
            duration_s=time.monotonic() - step.began,
            nbytes=found.nbytes,
            names=found.names,
        )
        faultpoints.hit("agent.committed")
        self._after_commit(step)

    def _read_other_records(self, step_id: StepId, records: dict[int, ShardRecord]) -> bool:
        """Adds the records other agents wrote into the shared folder; False when one is not there yet."""
        prefix = step_prefix(self.config.run, step_id)
        for rank in range(self.config.world_size):
            if rank not in records:
                where = prefix + record_file(rank)
                try:
                    records[rank] = ShardRecord.from_dict(json.loads(self._tier.read(where)), where=where)
                except (FileNotFoundError, TierError, CorruptShard, ValueError):
                    return False
        return True

    def _write_commit(self, step: Manifest | UnfinishedStep) -> None:
        """Writes the manifest (not for one host's part: no folder holds the whole), then the names."""
        faultpoints.hit("agent.manifest.write")
        if isinstance(step, Manifest):
            self._tier.put_bytes(step_prefix(self.config.run, step.id) + MANIFEST, step.to_json().encode())
        faultpoints.hit("agent.name.write")
        for name in step.names:
            self._tier.put_bytes(name, NameFile(run=self.config.run, id=step.id).to_json().encode())

    def _after_commit(self, step: _Step) -> None:
        """Tells the ranks, and passes the step on to fsync and to the tiers it is due for."""
        assert step.committed is not None
        self._report.tell_reached(step.id, Stage.COMMITTED, self.config.local.name)
        for uploader in self._uploaders:
            if uploader.spec.name in step.committed.tiers:
                self._pin(step.id)
                uploader.submit(step.id, self._own_records(step))
        self._syncs.submit(partial(self._sync, step))

    def _refuse_plans(self, step_id: StepId) -> None:
        reason = (
            "ranks saved different sets of tensors; every rank must pass the same state"
            " (what differs belongs into per_rank)"
        )
        tier = self.config.local.name
        self._report.tell_failed(step_id, tier, reason)
        self._report.log_failed(step_id, Stage.COMMITTED, tier, reason, will_retry=False)
        self._report.warn_once("plan", "checkpoint of step %d cannot be committed: %s", step_id.step, reason)

    def _own_records(self, step: _Step) -> list[ShardRecord]:
        return [record for rank, record in sorted(step.records.items()) if self._remover.owns(rank)]

    # -- durability and uploads ----------------------------------------------------------------------------------

    def _sync(self, step: _Step) -> None:
        folder = os.path.dirname(self._path(step.id, MANIFEST))
        if self.config.durable:
            try:
                faultpoints.hit("agent.fsync")
                for record in self._own_records(step):
                    fsync_file(os.path.join(folder, record.file))
                    fsync_file(os.path.join(folder, record_file(record.rank)))
                manifest = os.path.join(folder, MANIFEST)
                if os.path.exists(manifest):
                    fsync_file(manifest)
                for place in (folder, os.path.dirname(folder), self.config.local.address):
                    fsync_dir(place)
                faultpoints.hit("agent.durable")
            except OSError as error:
                # Not durable: older steps stay (they are pruned after a later step's fsync), training goes on.
                reason = f"fsync of {folder} failed: {error}"
                tier = self.config.local.name
                self._report.log_failed(step.id, Stage.DURABLE, tier, reason, will_retry=True)
                self._report.warn_once(
                    "sync", "step %d is committed but may not survive a power loss: %s", step.id.step, reason
                )
                self._report.tell_failed(step.id, tier, reason)
                return
        with self._lock:
            step.durable = True
        if not self._is_ours(step.id):
            if self._deletes:  # asked for before this was known to be safe
                self._commits.submit(self._prune)
            return  # unasked nothing is deleted at a start: the ranks may be reading it
        if self.config.durable:
            self._report.log_reached(
                step.id,
                Stage.DURABLE,
                self.config.local.name,
                duration_s=time.monotonic() - step.began,
                nbytes=sum(record.nbytes for record in self._own_records(step)),
            )
        self._commits.submit(partial(self._after_sync, step.id))

    def _after_sync(self, step_id: StepId) -> None:
        # Recycled files are handed back first: a rank that saves as soon as it hears of this step finds one.
        self._prune()
        if self.config.durable:
            self._report.tell_reached(step_id, Stage.DURABLE, self.config.local.name)

    def _pin(self, step_id: StepId) -> None:
        with self._lock:
            self._steps[step_id].pins += 1

    def _uploaded(self, spec: TierSpec, step_id: StepId, outcome: UploadOutcome, reason: str) -> None:
        """Called by an uploader when it is done with a step, one way or the other."""
        with self._lock:
            step = self._steps.get(step_id)
            if step is not None and outcome is not UploadOutcome.RETRYING:
                step.pins -= 1
        if outcome is UploadOutcome.DURABLE:
            self._report.tell_reached(step_id, Stage.DURABLE, spec.name)
        elif outcome is not UploadOutcome.PARTIAL:
            retrying = outcome is UploadOutcome.RETRYING
            self._report.tell_failed(step_id, spec.name, reason, retrying=retrying)
        if outcome is not UploadOutcome.RETRYING:
            self._commits.submit(self._prune)

    # -- pruning -------------------------------------------------------------------------------------------------

    def _deletes_due(self, newest: StepId) -> dict[str, StepId]:
        """Names whose deletion was asked for and may be done, now that ``newest`` is safe."""
        return {name: request.upto for name, request in self._deletes.items() if request.is_due(newest)}

    def _find_commits_of_others(self) -> None:
        """Takes note of steps that another agent on the same folder has committed (another host, or a rank on its
        own)."""
        with self._lock:
            waiting = [step for step in self._steps.values() if step.committed is None and step.records]
        for step in waiting:
            where = step_prefix(self.config.run, step.id) + MANIFEST
            try:
                manifest = Manifest.from_json(self._tier.read(where), where=where)
            except (FileNotFoundError, TierError, CorruptShard):
                continue
            with self._lock:
                step.committed = manifest
                step.records.update({record.rank: record for record in manifest.shards})
            self._after_commit(step)

    def _prune(self) -> None:
        if self.config.shared:
            self._find_commits_of_others()
        with self._lock:
            safe = [s.committed for s in self._steps.values() if s.committed is not None and s.durable]
            if not safe:
                return
            newest = max(step.id for step in safe)
            deletes = self._deletes_due(newest)
            busy = {s.id for s in self._steps.values() if s.pins > 0}
            unsafe = {s.id for s in self._steps.values() if s.committed is not None and not s.durable}
            doomed = steps_to_delete(
                safe,
                [s.id for s in self._steps.values() if s.committed is None],
                keep=self.config.local.keep,
                keep_named=self.config.local.keep_named,
                deleted=deletes,
                busy=busy | unsafe,
            )
        for step_id in doomed:
            try:
                step = self._steps[step_id]
                self._remover.delete(step_id, step.committed.names if step.committed is not None else ())
            except (OSError, TierError) as error:
                self._report.warn_once(
                    "prune",
                    "step %d could not be deleted from %s: %s; it is tried again after the next commit",
                    step_id.step,
                    self.config.local.address,
                    error,
                )
                return
            with self._lock:
                self._steps.pop(step_id, None)
            self._report.log_deleted(step_id, self.config.local.name)
        try:
            self._drop_dead_names(newest, deletes)
        except TierError as error:
            self._report.warn_once("prune", "a name could not be removed from %s: %s", self.config.local.address, error)

    def _drop_dead_names(self, newest: StepId, deletes: Mapping[str, StepId]) -> None:
        """Removes name files that point to no step any more although the step is kept (pinned, or under another
        name)."""
        with self._lock:
            known = [s.committed for s in self._steps.values() if s.committed is not None]
            safe = [s.committed for s in self._steps.values() if s.committed is not None and s.durable]
        live = live_names(safe, deleted=deletes)
        listed = {name for step in safe for name in step.names}
        for name in listed - live.keys():
            pointer = read_name(self._tier, name)
            if pointer is not None and pointer.run == self.config.run and pointer.id < newest:
                self._tier.delete(name)
        with self._lock:
            for name, upto in deletes.items():
                if not any(name in step.names and step.id <= upto for step in known):
                    self._deletes.pop(name, None)


def _is_file(path: str, inode: int, nbytes: int) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return found.st_ino == inode and found.st_size == nbytes
