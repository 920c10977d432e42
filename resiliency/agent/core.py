"""The agent's work: commit, make durable, upload, prune. Runs in the agent process or in a thread of a trainer.

One instance serves the ranks of one host in one attempt. Whether a step can be committed is decided from files. So the
agents of several hosts can work on a shared folder at the same time, and the next agent can finish or delete what a
killed one leaves.

The file operations of a commit are in :mod:`resiliency.agent.commit`. Older steps are deleted only after a newer one
was fsynced (:mod:`resiliency.agent.local_pruner`).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from resiliency.agent._fence import Fence
from resiliency.agent._removal import Remover
from resiliency.agent._reporter import Notify, Reporter
from resiliency.agent._worker import Worker
from resiliency.agent.commit import (
    check_in_place,
    check_share,
    fsync_step,
    read_records_of_others,
    records_of,
    write_commit,
    write_mark,
    write_names,
    write_record,
)
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.file_pool import SMALL_FILE, FilePool
from resiliency.agent.join import cut_back, join_shards
from resiliency.agent.local_pruner import LocalPruner
from resiliency.agent.local_steps import LocalStep, LocalSteps
from resiliency.agent.messages import (
    Bye,
    Complete,
    Delete,
    GiveUp,
    Heard,
    Prepare,
    Recorded,
    Request,
    Rescan,
    Seal,
    Trace,
)
from resiliency.agent.uploader import Uploader, UploadOutcome
from resiliency.errors import AgentError, CorruptShard, TierError
from resiliency.events import EventKind, EventWriter
from resiliency.faultpoints import hit
from resiliency.storage.attempts import attempt_file, write_attempt
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.claims import claim_attempt
from resiliency.storage.fetch import remove_dead_fetches
from resiliency.storage.known_files import remember
from resiliency.storage.manifest import (
    COMMIT_MARK,
    MANIFEST,
    Manifest,
    ShardRecord,
    UnfinishedStep,
    gather_records,
    part_of,
    record_file,
    shard_file,
)
from resiliency.storage.names import is_taken_since, missing_names
from resiliency.storage.plan_groups import different_plans
from resiliency.storage.retention import DeleteRequest, Hold
from resiliency.storage.shard_file import Identity
from resiliency.storage.single_files import drop_folders, restore_folders
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.stock_folder import put_stock_files
from resiliency.storage.tiers.local import LocalTier

__all__ = ["HostAgent"]

logger = logging.getLogger(__name__)

#: Seconds that a commit on a full disk waits for the prepared files to be deleted.
_MAKE_ROOM_S = 5.0
#: Number of failed steps whose reason is remembered; a rank may seal its part of such a step later.
_FAILURES = 16


class HostAgent:
    """One host's agent; see the module.

    Args:
        config: of this attempt.
        notify: sends a message to a rank; must not block.
        events: the agent's event log.
        heard: what an earlier agent of the attempt has told a rank of this host. Steps that were reported have been
            given their names, and what of these is missing now, somebody has deleted. Those that were reported failed
            are not finished within the attempt: a user may have put something else under their names since.

    Threads: :meth:`handle` from any; the work is done on own threads, all named ``resiliency-agent-*``.
    """

    def __init__(
        self,
        config: AgentConfig,
        notify: Notify,
        events: EventWriter,
        *,
        heard: Heard | None = None,
    ) -> None:
        self.config = config
        self._events = events
        self._report = Reporter(config.local_ranks, notify, events)
        # A commit must be quick and survive a kill, not a power loss: fsync is the next stage.
        self._fence = Fence(config)
        self._tier = LocalTier(
            config.local.address,
            durable=False,
            name=config.local.name,
            staging=lambda: self._fence.staging,
        )
        self._steps = LocalSteps()
        self._commits = Worker("resiliency-agent-commit")
        self._syncs = Worker("resiliency-agent-sync")
        heard = heard or Heard()
        newest = {save.tier: save.id for save in heard.newest}
        self._named = newest.get(config.local.name)  # the newest step known to have its names on the local tier
        self._uploaders = [
            Uploader(config, spec, self._path, self._uploaded, self._report, self._fence, named=newest.get(spec.name))
            for spec in config.remotes
        ]
        self._finished: set[int] = set()
        self._left: set[int] = set()
        self._failures: dict[StepId, str] = {}  # step -> why a rank could not save it; the newest ones
        self._awaited = heard.awaited
        self._told_failed = frozenset(heard.failed)
        # Step that may have a manifest -> why it failed; the newest ones.
        self._commit_failures = dict.fromkeys(heard.failed, "an earlier agent could not commit it")
        self._given_up: dict[
            StepId, set[int]
        ] = {}  # of these, those to be deleted -> ranks that no longer write to the step
        self._closed = False
        self._traces = self._report.traces
        self._files = FilePool(config, notify, traces=self._traces)
        self._remover = Remover(config, self._tier, self._files, self._fence)
        self._pruner = LocalPruner(config, self._tier, self._steps, self._remover, self._report, self._fence)

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads, takes the attempt's number, ends earlier attempts, lists the local tier, and resumes
        uploads that an earlier agent did not finish.

        Blocks: for one listing.

        Raises:
            AgentError: another job has the attempt's number, or a thread cannot be started.
            TierError: the local tier cannot be listed.
        """
        # All of them, and before the first rank is welcomed: no later message then fails for want of a thread.
        self._commits.start()
        self._syncs.start()
        self._files.start()
        for uploader in self._uploaders:
            uploader.start()
        self._end_earlier_attempts()
        self._take_leftover_files()
        try:
            # An earlier attempt's agent may have removed the folders since the ranks looked; from now on it cannot.
            restore_folders(self._tier, self.config.run)
        except OSError as error:
            logger.warning("cannot find out which files are checkpoints of run %r: %s", self.config.run, error)
        fresh = self._list_steps(finish=True)
        for uploader in self._uploaders:
            self._resume_upload(uploader)  # before anything is synced: after that, steps not to be sent are pruned
        self._sync_again(fresh)
        self._syncs.submit(self._delete_partial_files)

    def _resume_upload(self, uploader: Uploader) -> None:
        committed = self._steps.select(lambda step: step.committed is not None and step.id not in self._commit_failures)
        due = [step for step in committed if _is_due(step, uploader)]
        # What the store lacks of an earlier attempt, other than the newest step, the user may have deleted there.
        if due and due[-1] is not committed[-1]:
            due = [step for step in due if self._is_of_this_attempt(step.id)]
        # In a shared folder another host, which has sent its part, may have deleted a step's manifest since; or this
        # host's part is sent and deleted, too.
        awaited = {save.id for save in self._awaited if save.tier == uploader.spec.name} - {step.id for step in due}
        left = [step for step in self._steps.select(lambda step: step.id in awaited) if self._is_here(step)]
        due = sorted([*due, *left], key=lambda step: step.id)
        gone = sorted(awaited - {step.id for step in left})
        for step_id in gone:
            self._steps.pin(step_id, 1)
        uploader.look_for(gone)
        if not due:
            return
        older = {step.id: self._sent_records(step) for step in due[:-1] if self._is_of_this_attempt(step.id)}
        for step in older:
            self._steps.pin(step, 1)
        uploader.resume(older, due[-1].id)
        self._submit(due[-1], uploader, only_if_missing=True)

    def _is_here(self, step: LocalStep) -> bool:
        """True when this host still has all that it sends of a step."""
        records = self._sent_records(step)
        paths = [self._path(step.id, record.file) for record in records]
        return bool(records) and all(map(os.path.exists, paths))

    def _end_earlier_attempts(self) -> None:
        """Claims this attempt before anything is listed, so that an earlier attempt's agent commits nothing after the
        listing."""
        config = self.config
        try:
            if not claim_attempt(config.run_folder, config.attempt, config.token):
                raise AgentError(
                    f"another job took attempt {config.attempt} of run {config.run!r} in {config.local.address} at the"
                    " same moment; end one of the two and start again, or give this job its own RESILIENCY_RUN or"
                    " directory"
                )
            write_attempt(config.run_folder, config.attempt)
        except OSError as error:
            # From the first save on, the step's folder name has the attempt too.
            logger.warning(
                "%s cannot be written (%s); the attempt is counted from the checkpoints",
                attempt_file(config.run_folder),
                error,
            )
        try:
            self._fence.end_earlier()
        except OSError as error:
            logger.warning("what an earlier attempt of run %r has begun cannot be deleted: %s", config.run, error)

    def _take_leftover_files(self) -> None:
        """Before any rank asks for a file, because what is left once enough files are ready is deleted."""
        try:
            self._files.take_leftovers()
        except (OSError, AgentError) as error:
            logger.info("prepared files of earlier attempts cannot be taken over: %s", error)

    def _delete_partial_files(self) -> None:
        """Deletes partial files of killed writers and restores: no listing shows them, but they take space."""
        try:
            self._fence.check()
            remove_dead_fetches(self.config.run_folder, self.config.node)
            self._tier.sweep()
        except (TierError, OSError, AgentError) as error:
            logger.info("partial files in %s could not be deleted: %s", self.config.local.address, error)

    def announce(self, rank: int) -> None:
        """Notifies a rank that has just connected of the stages its attempt's saves have reached: an earlier agent may
        have been killed after reaching a stage and before notifying the rank."""

        def announce_steps() -> None:
            self._files.announce(rank)
            ours = self._steps.select(lambda step: self._is_of_this_attempt(step.id) and step.committed is not None)
            for step in ours:
                if step.id in self._told_failed and step.id in self._commit_failures:
                    continue
                if step.id in self._commit_failures:
                    reason = self._commit_failures[step.id]
                    self._report.notify_failed(step.id, self.config.local.name, reason, ranks=(rank,))
                    continue
                self._report.notify_reached(step.id, Stage.COMMITTED, self.config.local.name, ranks=(rank,))
                if step.durable and self.config.durable:
                    self._report.notify_reached(step.id, Stage.DURABLE, self.config.local.name, ranks=(rank,))

        self._commits.submit(announce_steps)

    @property
    def _serves_all(self) -> bool:
        """True when all ranks of the job are on this host."""
        return len(self.config.local_ranks) == self.config.world_size

    @property
    def _in_parts(self) -> bool:
        """True when the local tier shows only what this host has of a step."""
        return not self.config.shared and len(self.config.local_ranks) < self.config.world_size

    def _is_of_this_attempt(self, step: StepId) -> bool:
        return step.of_attempt(self.config.attempt, self.config.token)

    def _rescan(self, loaded: StepId | None) -> None:
        fresh, marked = self._list_steps(finish=False), self._mark_loaded(loaded)
        for step in marked:
            for uploader in self._uploaders:
                if _is_due(step, uploader):
                    self._submit(step, uploader, only_if_missing=True)
        self._sync_again([*fresh, *marked])

    def _mark_loaded(self, loaded: StepId | None) -> list[LocalStep]:
        """Marks this host's part of the step that the ranks have loaded, which therefore is whole: it has no mark when
        an agent was killed before that, or when its shards were fetched for the load.

        Returns:
            The step, if it was not known to be committed.
        """
        step = self._steps.get(loaded) if loaded is not None and self._in_parts else None
        if step is None or step.committed is not None or self._is_of_this_attempt(step.id):
            return []
        found = gather_records(step.records.values())
        if found is None:
            return []
        try:
            self._fence.check()
            write_mark(self._tier, part_of(found))
        except (TierError, AgentError) as error:
            logger.info("step %d, which was loaded, could not be marked as committed: %s", step.id.step, error)
            return []
        self._steps.commit(step, part_of(found))
        return [step]

    def _list_steps(self, *, finish: bool) -> list[LocalStep]:
        """Lists the local tier, and returns the committed steps that were not known before.

        Args:
            finish: finish what an earlier agent has left of the newest step.
        """
        listings = scan(self._tier, self.config.run)
        if 0 in self.config.local_ranks:  # a longer file must be cut before its manifest is written
            for listing in listings:
                cut_back(self._tier, listing, self._fence)
        # What is saved in this attempt is in progress, once this agent has started.
        keep_open = (lambda _: False) if finish else self._is_of_this_attempt
        fresh = self._steps.add_listed(listings, in_parts=self._in_parts, keep_open=keep_open)
        if not finish and self.config.shared:
            self._find_commits_of_others()
        if finish:
            self._finish_newest()
        return fresh

    def _sync_again(self, steps: Sequence[LocalStep]) -> None:
        """Queues fsyncs of steps whose agent may have been killed before it, because deleting older steps waits for
        one."""
        for step in steps:
            self._syncs.submit(partial(self._sync, step))

    def _finish_newest(self) -> None:
        """Writes the newest step's manifest and names, if an agent was killed after the last record and before
        these."""
        committed = self._steps.select(lambda step: step.committed is not None)
        if not committed:
            return
        step = committed[-1]
        found = step.committed
        # In a shared folder all agents of an attempt do the same, whichever of them was killed.
        ours = self._serves_all or self._is_of_this_attempt(step.id)
        if found is None or not ours or step.id in self._commit_failures:
            return
        try:
            if isinstance(found, UnfinishedStep) or os.path.lexists(self._path(step.id, MANIFEST)):
                put_stock_files(self._tier, found, before=self._fence.check)
                # Names that it has had, or may have had in an earlier attempt, are not given again: they were deleted.
                had = not self._is_of_this_attempt(step.id) or (self._named is not None and step.id <= self._named)
                missing, taken = ([], {}) if had else self._names_to_finish(found)
                refused = write_names(self._tier, found, missing, self._fence) if missing else {}
            else:
                # A mark says that it was committed, as one host's part, when the job had more hosts.
                had = os.path.lexists(self._path(step.id, COMMIT_MARK))
                missing, taken = ([], {}) if had else self._names_to_finish(found)
                found, refused = self._write_commit(found, names=missing)
                self._steps.commit(step, found)
        except (OSError, TierError, AgentError) as error:
            logger.info("step %d could not be given its manifest and names: %s", step.id.step, error)
            self._commit_failures[step.id] = f"cannot commit to {self.config.local.address}: {self._fence.cause(error)}"
            return
        self._report_refused(step.id, {**taken, **refused})

    def _names_to_finish(self, step: Manifest | UnfinishedStep) -> tuple[list[str], dict[str, str]]:
        """The names that a step is to have and does not; and name -> reason for those that it does not get, because
        somebody who was not told of the save has put another file there since."""
        missing = missing_names(self._tier, step)
        taken = {
            name: f"another file was put at {self._tier.location(name)} after the save of {step.id} began"
            for name in missing
            if is_taken_since(self._tier, step, name)
        }
        return [name for name in missing if name not in taken], taken

    def _report_refused(self, step: StepId, refused: Mapping[str, str]) -> None:
        for name, reason in refused.items():
            self._report.report_refused(step, self.config.local.name, name, reason)

    def _write_commit(
        self, found: Manifest | UnfinishedStep, names: Sequence[str] | None = None
    ) -> tuple[Manifest | UnfinishedStep, dict[str, str]]:
        """Commits a step whose records are all there. Returns the committed step, and name -> reason for names refused.

        Args:
            names: those to give; None: all of the step.

        Raises:
            OSError, TierError, AgentError: the step is not committed.
        """
        with self._traces.span("commit", found.id):
            check_in_place(self._tier, found, self.config.local_ranks)
            if isinstance(found, Manifest) and self._serves_all:
                with self._traces.span("join", found.id):
                    found = join_shards(self._tier, found, self._fence)
                self._steps.add_record(found.shards[0])
            if found.replicated and not os.path.lexists(self._path(found.id, MANIFEST)):
                self._remember(found)  # not at a second try: under its names a user may have written into the file
            with self._traces.span("manifest", found.id):
                given = found.names if names is None else names
                return found, write_commit(self._tier, found, given, self._fence, self.config.local_ranks)

    def _remember(self, step: Manifest | UnfinishedStep) -> None:
        identity = Identity(
            id=step.id, run=step.run, rank=0, world_size=step.world_size, replicated=True, version=step.version
        )
        remember(self._path(step.id, shard_file(0, step.version)), identity)

    def wait(self, stage: Stage, *, tier: str | None = None, timeout_s: float) -> bool:
        """Blocks until everything sealed so far has reached a stage, see :class:`~resiliency.agent.messages.Flush`;
        False when ``timeout_s`` passes first."""
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
        """True when no work is queued or running."""
        return self._commits.idle and self._syncs.idle and all(uploader.idle for uploader in self._uploaders)

    def has_left(self, rank: int) -> bool:
        """True once the rank has said Bye. Thread: any."""
        return rank in self._left

    def tell_lost(self, rank: int, pid: int) -> None:
        """Writes the event that a rank's process has died. Thread: any."""
        self._events.emit(EventKind.WORKER_LOST, worker=rank, lost_pid=pid)

    def close(self) -> None:
        """Stops all threads; as configured, frees memory on a ramdisk, or leaves only the checkpoints' files. The next
        start resumes unfinished uploads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            with ExitStack() as last_first:  # all of it, also when Ctrl-C ends one of these early
                last_first.callback(self._files.close)
                last_first.callback(self._discard_all_given_up)
                last_first.callback(self._commits.close)
                last_first.callback(self._syncs.close)
                for uploader in self._uploaders:
                    last_first.callback(uploader.close)
            self._clean_up()
        finally:
            self._fence.release()

    def _discard_all_given_up(self) -> None:
        for step in self._given_up:
            self._discard(step)

    def _clean_up(self) -> None:
        if self.config.only_files:
            self._leave_only_files()
        elif not self.config.durable:
            try:
                self._free_ramdisk()
            except AgentError as error:
                logger.info("checkpoints on the ramdisk %s stay: %s", self.config.local.address, error)
            except (OSError, TierError):
                # Boundary: the agent ends; the next start uses or deletes what is left.
                logger.warning(
                    "memory of the ramdisk %s could not be freed; the next start tries again",
                    self.config.local.address,
                    exc_info=True,
                )

    def _leave_only_files(self) -> None:
        """Removes the run's folder when all ranks have left in order and every step is a file that needs nothing
        else."""
        if not self._serves_all or not self._left.issuperset(self.config.local_ranks):
            return
        folder = self.config.run_folder
        # A step whose folder the user has deleted can no longer become durable.
        steps = self._steps.select(lambda step: step.committed is not None and os.path.isdir(self._path(step.id, "")))
        try:
            self._fence.check()
            if not all(step.durable and step.pins == 0 for step in steps):
                reason = "not every step is durable yet"
            else:
                reason = drop_folders(self._tier, self.config.run, through=self._tier.location(self._fence.staging))
            if reason:
                logger.info("%s stays: %s", folder, reason)
        except AgentError as error:
            logger.info("%s stays: %s", folder, error)
        except (OSError, TierError):
            if not os.path.lexists(folder):
                return  # the whole directory was deleted meanwhile, as a user's temporary directory is
            # Boundary: the agent ends; the next start uses or removes what is left.
            logger.warning("%s could not be removed", folder, exc_info=True)

    def _free_ramdisk(self) -> None:
        """Deletes the checkpoints when the job has finished and a slower tier has the newest one, or there is none."""
        if not self._finished.issuperset(self.config.local_ranks):
            return
        committed = [step.committed for step in self._steps.select() if step.committed is not None]
        newest = max((step.id for step in committed), default=None)
        self._fence.check()
        if newest is None or any(uploader.holds(newest) for uploader in self._uploaders):
            self._remover.drop_run([name for step in committed for name in step.names])

    # -- messages -----------------------------------------------------------------------------------------------

    def handle(self, rank: int, message: Request) -> None:
        """Handles one message of a rank. Returns at once.

        Raises:
            AgentError: the message is about another attempt, or is inconsistent.
        """
        if isinstance(message, Seal):
            hit("agent.seal.received", rank=rank)
            self._check_attempt(rank, message.id)
            records = records_of(self.config, rank, message)
            self._commits.submit(partial(self._commit, rank, message, records))
        elif isinstance(message, GiveUp):
            self._check_attempt(rank, message.id)
            self._commits.submit(partial(self._gave_up, rank, message))
        elif isinstance(message, Prepare):
            self._files.expect(message.nbytes, message.count)
            self._files.refill()
        elif isinstance(message, Delete):
            self._delete(message)
        elif isinstance(message, Complete):
            self._check_attempt(rank, message.id)
            self._commits.submit(partial(self._complete_recorded, message.id))
        elif isinstance(message, Rescan):
            self._hold(message)
            self._commits.submit(partial(self._rescan, message.loaded))
        elif isinstance(message, Trace):
            self._check_attempt(rank, message.id)
            self._trace(rank, message)
        elif isinstance(message, Bye):
            self._left.add(rank)
            if message.finished:
                self._finished.add(rank)

    def _trace(self, rank: int, message: Trace) -> None:
        if not message.end:
            self._traces.begin(rank, message.id)
            return
        # Queued behind the fsyncs that are pending, and the pruning that follows each.
        end = partial(self._traces.end, rank, message.id)
        self._syncs.submit(partial(self._commits.submit, end))

    def _check_attempt(self, rank: int, step: StepId) -> None:
        if not self._is_of_this_attempt(step):
            raise AgentError(
                f"rank {rank} sent a message about {step}, but this agent serves attempt {self.config.attempt}"
                f" ({self.config.token}); the message is ignored"
            )

    def _hold(self, message: Rescan) -> None:
        if message.loaded is None:
            return
        hold = Hold(step=message.loaded, line=message.line, attempt=self.config.attempt, token=self.config.token)
        self._pruner.hold(hold)
        for uploader in self._uploaders:
            uploader.hold(hold)

    def _delete(self, message: Delete) -> None:
        # Before the first save of this attempt there is no ``after``; the names then point to steps of earlier
        # attempts.
        request = DeleteRequest(upto=message.after, after=message.after, attempt=self.config.attempt)
        requests = dict.fromkeys(message.names, request)
        self._pruner.request(requests)
        for uploader in self._uploaders:
            uploader.delete(requests)
        self._commits.submit(self._prune)

    # -- commit -------------------------------------------------------------------------------------------------

    def _path(self, step: StepId, file: str) -> str:
        return self._tier.location(step_prefix(self.config.run, step) + file)

    def _commit(self, rank: int, seal: Seal, records: list[ShardRecord]) -> None:
        """Writes the records of what a rank has sealed; after the last record of a step it commits the step."""
        known = self._steps.get(seal.id)
        if known is not None and known.committed is not None:
            # An earlier agent did it and died before it could notify. The file has more in it now than the rank has
            # sealed.
            self._report.notify(rank, Recorded(id=seal.id))
            return
        if seal.id in self._failures:
            self._report.notify(rank, Recorded(id=seal.id))  # so that the rank may begin its next save
            self._report.notify_failed(seal.id, self.config.local.name, self._failures[seal.id], ranks=(rank,))
            self._discard_given_up(rank, seal.id)
            return
        try:
            with self._traces.span("record", seal.id, rank=rank):
                check_share(seal, self._path(seal.id, shard_file(0)))
                for record, file in zip(records, seal.files, strict=True):
                    target = self._path(record.id, record.file)
                    write_record(self._tier, record, file.path, file.inode, target, self._fence)
                    if record.nbytes >= SMALL_FILE:
                        self._files.watch(target)
        except (OSError, TierError, ValueError, AgentError) as error:  # ValueError: a path that no file can have
            # If its record exists, an earlier agent wrote it, and another host's agent may have committed the step. A
            # file that is not the sealed one belongs to somebody else. In both cases nothing is deleted.
            keep = isinstance(error, FileNotFoundError) or os.path.lexists(self._path(seal.id, record_file(rank)))
            reason = f"cannot commit to {self.config.local.address}: {self._fence.cause(error)}"
            self._failed(seal.id, rank, reason, keep=keep)
            return
        for record in records:
            self._steps.add_record(record)
            if record.rank == 0 or not record.replicated:
                self._files.saved(record.nbytes)
        self._report.notify(rank, Recorded(id=seal.id))
        self._complete(seal.id)
        # After the commit, for which ranks wait. Once the step is durable, an earlier one may be deleted.
        self._files.refill(more_to_come=True)
        self._discard_given_up(rank, seal.id)

    def _failed(self, step: StepId, rank: int, reason: str, *, keep: bool) -> None:
        """Notifies the rank, and the ranks that wait for the commit because they have recorded, or will record, their
        part."""
        tier = self.config.local.name
        self._report.notify_failed(step, tier, reason, ranks=(rank,))
        self._report.log_failed(step, Stage.RECORDED, tier, reason, will_retry=True, shard=rank)
        self._will_not_be_whole(step, rank, reason, keep=keep)
        self._discard_given_up(rank, step)

    def _gave_up(self, rank: int, message: GiveUp) -> None:
        """A rank has said that its part of a save will not come. The rank has already reported the failure itself."""
        known = self._steps.get(message.id)
        if message.id not in self._failures and (known is None or known.committed is None):
            self._will_not_be_whole(message.id, rank, message.reason)
        self._discard_given_up(rank, message.id)

    def _will_not_be_whole(self, step: StepId, rank: int, reason: str, *, keep: bool = False) -> None:
        known = self._steps.get(step)
        recorded = set(known.records) if known is not None else set()
        self._failures[step] = for_others = f"rank {rank}: {reason}"
        others = recorded.intersection(self.config.local_ranks) - {rank}
        self._report.notify_failed(step, self.config.local.name, for_others, ranks=others)
        while len(self._failures) > _FAILURES:
            del self._failures[next(iter(self._failures))]
        logger.info("checkpoint of step %d failed on rank %d: %s", step.step, rank, reason)
        if not keep:
            self._given_up[step] = recorded

    def _discard_given_up(self, rank: int, step: StepId) -> None:
        """Notes that ``rank`` no longer writes to ``step``, and deletes given-up steps that no rank writes to any more.

        A rank that is at a later step is done with the earlier ones; ranks may be behind each other. This agent does
        not hear about ranks of other agents: those are assumed done once one of its own ranks is at a later step.
        """
        for other, done in list(self._given_up.items()):
            if step >= other:
                done.add(rank)
            if done.issuperset(self.config.local_ranks) if self._serves_all else step > other:
                del self._given_up[other]
                self._discard(other)

    def _discard(self, step: StepId, *, never_whole: bool = False) -> None:
        """Deletes the files of a step that will not be whole, including those that a rank still writes to.

        It would be deleted anyway once a later step is committed, but a disk that this step has filled may have no room
        for one.

        Args:
            never_whole: delete it even when all records are there.
        """
        ranks = range(self.config.world_size)
        if not never_whole and all(os.path.lexists(self._path(step, record_file(rank))) for rank in ranks):
            return
        try:
            if not os.path.lexists(self._path(step, MANIFEST)):
                self._remover.delete(step, (), all_ranks=True)
                self._steps.remove(step)
        except (OSError, TierError, AgentError) as error:
            logger.info("step %d stays until a later one is committed: %s", step.step, error)

    def _complete_recorded(self, step: StepId) -> None:
        """A rank reports that all ranks have recorded a step; an agent of another host may have committed it."""
        if self.config.shared:
            self._find_commits_of_others()
        self._complete(step, all_recorded=True)

    def _complete(self, step_id: StepId, *, all_recorded: bool = False) -> None:
        """Commits the step when every shard has a record, as seen in this folder or, across hosts, as ``all_recorded``
        says."""
        with self._steps.lock:
            step = self._steps.get(step_id)
            if step is None or step.committed is not None:
                return
            records = dict(step.records)
        config = self.config
        if config.shared and not read_records_of_others(self._tier, config.run, step_id, records, config.world_size):
            return  # the agent that writes the last record commits
        if self._in_parts and not all_recorded:
            return  # this folder does not show the records of other hosts; only the ranks know
        found = gather_records(records.values())
        if found is None:
            ranks_of: dict[str, list[int]] = {}
            for rank, record in records.items():
                ranks_of.setdefault(record.plan, []).append(rank)
            if len(ranks_of) > 1 and len(records) == self.config.world_size:
                self._refuse_plans(step_id, different_plans(ranks_of.values()))
            return
        if self._in_parts:
            found = part_of(found)
        elif isinstance(found, UnfinishedStep):
            return
        try:
            try:
                found, refused = self._write_commit(found)
            except (OSError, TierError) as error:
                if not _is_no_room(error):
                    raise
                # Manifest and names are small: deleting the files prepared for the next saves makes room for them.
                self._files.make_room(timeout_s=_MAKE_ROOM_S)
                found, refused = self._write_commit(found)
        except (OSError, TierError, AgentError) as error:
            self._commit_failed(step_id, error)
            return
        self._commit_failures.pop(step_id, None)
        self._steps.commit(step, found)
        self._report.log_reached(
            step_id,
            Stage.COMMITTED,
            self.config.local.name,
            duration_s=time.monotonic() - step.began,
            nbytes=found.nbytes,
            names=found.names,
        )
        self._report_refused(step_id, refused)
        hit("agent.committed")
        self._after_commit(step)

    def _commit_failed(self, step: StepId, found: OSError | TierError | AgentError) -> None:
        error = self._fence.cause(found)
        tier, reason = self.config.local.name, f"cannot commit to {self.config.local.address}: {error}"
        self._commit_failures[step] = reason
        while len(self._commit_failures) > _FAILURES:
            del self._commit_failures[next(iter(self._commit_failures))]
        if _is_no_room(error) and self._serves_all:
            # It would take up space until a later step is committed, and there may be no space for one.
            self._discard(step, never_whole=True)
        if not isinstance(error, AgentError) and os.path.lexists(self._path(step, record_file(0))):
            reason += (
                "; all its shards are recorded: the step is deleted once a later one is durable, else the next start"
                " commits it"
            )
        self._report.log_failed(step, Stage.COMMITTED, tier, reason, will_retry=True)
        logger.info("checkpoint of step %d failed: %s", step.step, reason)
        self._report.notify_failed(step, tier, reason)

    def _after_commit(self, step: LocalStep) -> None:
        """Notifies the ranks, and queues the step for fsync and for the tiers it is due for."""
        if step.id not in self._commit_failures:  # else the ranks have been told that it failed
            self._report.notify_reached(step.id, Stage.COMMITTED, self.config.local.name)
        self._upload(step)
        self._syncs.submit(partial(self._sync, step))

    def _upload(self, step: LocalStep) -> None:
        """Queues this host's part of a committed step for every tier it is due for."""
        for uploader in self._uploaders:
            if _is_due(step, uploader):
                self._submit(step, uploader)

    def _submit(self, step: LocalStep, uploader: Uploader, *, only_if_missing: bool = False) -> None:
        self._steps.pin(step.id, 1)
        uploader.submit(step.id, self._sent_records(step), only_if_missing=only_if_missing)

    def _refuse_plans(self, step_id: StepId, reason: str) -> None:
        tier = self.config.local.name
        self._report.notify_failed(step_id, tier, reason)
        self._report.log_failed(step_id, Stage.COMMITTED, tier, reason, will_retry=False)
        logger.info("checkpoint of step %d cannot be committed: %s", step_id.step, reason)
        self._discard(step_id, never_whole=True)

    def _sent_records(self, step: LocalStep) -> list[ShardRecord]:
        """Records of the shards that this host uploads: without its copy of shard 0, which rank 0's host uploads."""
        return [
            record
            for record in self._own_records(step)
            if record.rank or 0 in self.config.local_ranks or not record.replicated
        ]

    def _own_records(self, step: LocalStep) -> list[ShardRecord]:
        return [record for rank, record in sorted(step.records.items()) if self._remover.owns(rank)]

    # -- durability and uploads ----------------------------------------------------------------------------------

    def _sync(self, step: LocalStep) -> None:
        folder = os.path.dirname(self._path(step.id, MANIFEST))
        if self.config.durable:
            try:
                with self._traces.span("fsync", step.id):
                    fsync_step(self.config.local.address, folder, self._own_records(step))
            except OSError as error:
                # Not durable: older steps stay until a later step is fsynced.
                # After an I/O error no further try counts: the kernel reports a failed write once.
                reason = f"fsync of {folder} failed: {error}"
                tier = self.config.local.name
                self._report.log_failed(step.id, Stage.DURABLE, tier, reason, will_retry=True)
                logger.info("step %d is committed but may not survive a power loss: %s", step.id.step, reason)
                self._report.notify_failed(step.id, tier, reason)
                return
        with self._steps.lock:
            step.durable = True
        if not self._is_of_this_attempt(step.id):
            if self._pruner.has_requests:  # the requests waited until this step was durable
                self._commits.submit(self._prune)
            return  # after a start nothing is deleted without a request: ranks may be reading it
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
        # Pool files are returned before the notice, so that a rank that saves right after it finds a free one.
        self._prune()
        waiting = self._steps.select(lambda step: step.committed is not None and not step.durable)
        self._files.refill(more_to_come=bool(waiting), unless_taken=True)
        if self.config.durable and step_id not in self._commit_failures:
            self._report.notify_reached(step_id, Stage.DURABLE, self.config.local.name)

    def _uploaded(self, spec: TierSpec, step_id: StepId, outcome: UploadOutcome, reason: str) -> None:
        """Handles each outcome of a step's upload; an uploader calls it on its own thread."""
        if outcome is not UploadOutcome.RETRYING:
            self._steps.pin(step_id, -1)
        if outcome is UploadOutcome.DURABLE:
            self._report.notify_reached(step_id, Stage.DURABLE, spec.name)
        elif outcome not in (UploadOutcome.PARTIAL, UploadOutcome.INTERRUPTED):
            self._report.notify_failed(
                step_id,
                spec.name,
                reason,
                retrying=outcome is UploadOutcome.RETRYING,
                gave_way=outcome is UploadOutcome.GAVE_WAY,
            )
        if outcome is not UploadOutcome.RETRYING:
            self._commits.submit(self._prune)

    # -- pruning -------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        try:
            self._fence.check()
            if self.config.shared:
                self._find_commits_of_others()
            with self._traces.span("prune"):
                self._pruner.prune()
        except AgentError as error:
            self._report.warn_once("superseded", "no checkpoints are deleted any more by this agent: %s", error)

    def _find_commits_of_others(self) -> None:
        """Notices the steps that the agent of another host has committed in the same folder."""
        found: list[tuple[LocalStep, Manifest]] = []
        for step in self._steps.select(lambda step: step.committed is None and bool(step.records)):
            where = step_prefix(self.config.run, step.id) + MANIFEST
            try:
                found.append((step, Manifest.from_json(self._tier.read(where), where=where)))
            except (FileNotFoundError, TierError, CorruptShard):
                continue
        if not found:
            return
        committed = self._steps.select(lambda step: step.committed is not None)
        newest = max(step.id for step in [*committed, *(step for step, _ in found)])
        for step, manifest in found:
            try:
                # That agent may be gone; then this one gives the step its names. Not a sharded one's: of many hosts
                # each would link all its shards while that agent does.
                asks = step.id == newest and manifest.replicated
                whole = not (asks or step.id in self._commit_failures) or not missing_names(self._tier, manifest)
            except TierError:
                continue
            if whole:
                self._commit_failures.pop(step.id, None)
            elif asks:
                continue
            self._steps.commit(step, manifest)
            self._after_commit(step)


def _is_due(step: LocalStep, uploader: Uploader) -> bool:
    return step.committed is not None and uploader.spec.name in step.committed.tiers


def _is_no_room(error: BaseException | None) -> bool:
    """True when the error, or a cause of it, is a full disk or an exceeded quota."""
    return error is not None and (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _is_no_room(error.__cause__)
    )
