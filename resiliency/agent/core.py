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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from resiliency import faultpoints
from resiliency.agent._removal import Remover
from resiliency.agent._worker import Worker
from resiliency.agent.protocol import AgentConfig, TierSpec
from resiliency.agent.uploader import Uploader
from resiliency.errors import AgentError, CorruptShard, TierError
from resiliency.events import EventKind, EventWriter
from resiliency.storage.catalog import read_name, scan, step_prefix
from resiliency.storage.fetch import remove_dead_fetches
from resiliency.storage.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Manifest,
    NameFile,
    ShardRecord,
    StepId,
    manifest_from_records,
    record_file,
)
from resiliency.storage.retention import live_names, steps_to_delete
from resiliency.storage.tiers.local import LocalTier, fsync_dir, fsync_file

__all__ = ["HostAgent"]

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """What the agent knows of a step on the local tier."""

    id: StepId
    records: dict[int, ShardRecord] = field(default_factory=dict)
    manifest: Manifest | None = None
    durable: bool = False
    pins: int = 0
    began: float = field(default_factory=time.monotonic)
    tiers: tuple[str, ...] = ()


class HostAgent:
    """See the module docstring.

    Args:
        config: of this attempt.
        notify: called with ``(rank, message)`` from the agent's threads; must not block.
        events: where facts go.
        alone: no other agent works in the same folder of this host.

    Threads: :meth:`handle` from any; the work is done on threads of its own, all named ``resiliency-agent-*``.
    """

    def __init__(
        self,
        config: AgentConfig,
        notify: Callable[[int, dict[str, Any]], None],
        events: EventWriter,
        *,
        alone: bool = True,
    ) -> None:
        self.config = config
        self._alone = alone
        self._notify = notify
        self._events = events
        # Commits must be quick and survive a kill, not a power loss: fsync follows in its own stage.
        self._tier = LocalTier(config.local.address, durable=False, name=config.local.name)
        self._lock = threading.RLock()
        self._steps: dict[StepId, _Step] = {}
        self._deletes: dict[str, tuple[StepId, int]] = {}
        self._commits = Worker("resiliency-agent-commit")
        self._syncs = Worker("resiliency-agent-sync")
        self._uploaders = [Uploader(config, spec, self._path, self._uploaded, events) for spec in config.remotes]
        self._warned: set[str] = set()
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
            newest = max((s for s in self._steps.values() if s.manifest is not None), key=lambda s: s.id, default=None)
        if newest is not None:
            for uploader in self._uploaders:
                if uploader.spec.name in newest.tiers:
                    self._pin(newest.id)
                    uploader.submit(newest.id, self._own_records(newest), only_if_missing=True)

    def _sweep(self) -> None:
        """Removes what killed writers and killed restores left half done; no listing shows it, but it takes room."""
        try:
            remove_dead_fetches(self.config.local.address, self.config.run, self.config.node)
            self._tier.sweep()
        except TierError as error:
            logger.info("%s could not be swept: %s", self.config.local.address, error)

    def greet(self, rank: int) -> None:
        """Tells a rank that has just connected what is known of the saves of its attempt: an agent before this one may
        have died between doing something and saying so."""

        def tell() -> None:
            with self._lock:
                ours = [s for s in self._steps.values() if self._is_ours(s.id) and s.manifest is not None]
            for step in sorted(ours, key=lambda s: s.id):
                self._notify(rank, {"t": "committed", **_about(step.id), "tier": self.config.local.name})
                if step.durable and self.config.durable:
                    self._notify(rank, {"t": "durable", **_about(step.id), "tier": self.config.local.name})

        self._commits.submit(tell)

    def _is_ours(self, step: StepId) -> bool:
        return step.attempt == self.config.attempt and step.token.startswith(self.config.token)

    def _rescan(self) -> None:
        found = {listing.id: listing for listing in scan(self._tier, self.config.run)}
        with self._lock:
            for step in list(self._steps):
                if step not in found and self._steps[step].manifest is not None and self._steps[step].pins == 0:
                    del self._steps[step]
            for listing in found.values():
                known = self._steps.setdefault(listing.id, _Step(listing.id))
                known.records.update(listing.records)
                if listing.manifest is not None and known.manifest is None:
                    # Whoever committed it may have died before its fsync: nothing older is deleted before ours.
                    known.manifest = listing.manifest
                    self._syncs.submit(partial(self._sync, known))
                    known.tiers = tuple(listing.manifest.info.get("tiers", ()))

    def wait(self, level: str, *, timeout_s: float) -> bool:
        """Waits until everything sealed so far has reached ``level`` ("committed", "durable" or "uploaded")."""
        deadline = time.monotonic() + timeout_s
        workers = [self._commits]
        if level in ("durable", "uploaded"):
            workers += [self._syncs, self._commits]
        done = all(worker.wait_idle(deadline) for worker in workers)
        if done and level == "uploaded":
            done = all(uploader.wait_idle(deadline) for uploader in self._uploaders) and self._commits.wait_idle(
                deadline
            )
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
        manifests = [step.manifest for step in self._steps.values() if step.manifest is not None]
        newest = max((manifest.id for manifest in manifests), default=None)
        if newest is None or any(uploader.holds(newest) for uploader in self._uploaders):
            self._remover.drop_run([name for manifest in manifests for name in manifest.names])

    # -- messages -----------------------------------------------------------------------------------------------

    def handle(self, rank: int, message: Mapping[str, Any]) -> None:
        """Takes one message of a rank. Returns at once."""
        kind = message["t"]
        if kind == "seal":
            faultpoints.hit("agent.seal.received", rank=rank)
            record = self._record(rank, message)
            self._commits.submit(partial(self._commit, record, str(message["path"]), int(message["inode"])))
        elif kind == "delete":
            self._delete([str(name) for name in message["names"]], message)
        elif kind == "complete":
            self._commits.submit(lambda: self._complete(self.config.step_id(message), told=True))
        elif kind == "rescan":
            self._commits.submit(self._rescan)
        elif kind == "bye":
            self._finished.add(rank)
        else:
            logger.warning("rank %d sent a message of unknown kind %r; it is ignored", rank, kind)

    def _delete(self, names: list[str], message: Mapping[str, Any]) -> None:
        after = int(message["after"])
        # What is meant is what the name means up to the newest save so far; before the first save, all that is on disk.
        older = (
            self.config.step_id({"step": after, "serial": message["serial"]})
            if after >= 0
            else StepId(0, self.config.attempt, "")
        )
        with self._lock:
            for name in names:
                self._deletes[name] = (older, after)
        for uploader in self._uploaders:
            uploader.delete({name: (older, after) for name in names})
        self._commits.submit(self._prune)

    # -- commit -------------------------------------------------------------------------------------------------

    def _path(self, step: StepId, file: str) -> str:
        return os.path.join(self.config.local.address, step_prefix(self.config.run, step), file)

    def _record(self, rank: int, seal: Mapping[str, Any]) -> ShardRecord:
        nbytes, digests = int(seal["nbytes"]), tuple(str(digest) for digest in seal["digests"])
        if len(digests) != -(-nbytes // BLOCK_BYTES):
            raise AgentError(f"rank {rank} sent {len(digests)} digests for {nbytes} bytes in blocks of {BLOCK_BYTES}")
        return ShardRecord(
            id=self.config.step_id(seal),
            run=self.config.run,
            rank=rank,
            world_size=self.config.world_size,
            node=self.config.node,
            nbytes=nbytes,
            block_bytes=BLOCK_BYTES,
            digests=digests,
            plan=str(seal["plan"]),
            names=tuple(seal["names"]),
            supersedes=tuple(seal["supersedes"]),
            created=float(seal["created"]),
            info={**seal["info"], "tiers": list(seal["tiers"])},
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
            step.tiers = tuple(record.info["tiers"])
            step.began = min(step.began, time.monotonic() - max(0.0, time.time() - record.created))
        self._notify(record.rank, {"t": "recorded", **_about(record.id)})
        self._complete(record.id)

    def _undo(self, path: str, inode: int, target: str, nbytes: int) -> None:
        """Puts the shard file back into the arena after a commit that failed."""
        try:
            if _is_file(target, inode, nbytes):
                os.rename(target, path)
        except OSError:
            logger.warning("%s could not be moved back to %s; it is pruned with its step", target, path, exc_info=True)

    def _failed(self, record: ShardRecord, path: str, inode: int, reason: str) -> None:
        name = self.config.local.name
        self._notify(record.rank, {"t": "failed", **_about(record.id), "reason": reason, "tier": name})
        self._notify(record.rank, {"t": "free", "inode": inode, "path": path})
        self._events.emit(
            EventKind.CHECKPOINT_FAILED,
            step=record.id.step,
            reason=reason,
            tier=name,
            shard=record.rank,
            will_retry=True,
        )
        self._warn_once(
            "commit",
            "checkpoint of step %d failed on rank %d: %s; training goes on, the next save tries again",
            record.id.step,
            record.rank,
            reason,
        )

    def _warn_once(self, about: str, text: str, *args: object) -> None:
        level = logging.DEBUG if about in self._warned else logging.WARNING
        self._warned.add(about)
        logger.log(level, text, *args)

    def _complete(self, step_id: StepId, *, told: bool = False) -> None:
        """Commits the step when every shard's record can be seen (or the ranks have told that all are recorded)."""
        with self._lock:
            step = self._steps.get(step_id)
            if step is None or step.manifest is not None:
                return
            records = dict(step.records)
        prefix = step_prefix(self.config.run, step_id)
        if self.config.shared:
            for rank in range(self.config.world_size):
                if rank in records:
                    continue
                where = prefix + record_file(rank)
                try:
                    records[rank] = ShardRecord.from_dict(json.loads(self._tier.read(where)), where=where)
                except (FileNotFoundError, TierError, CorruptShard, ValueError):
                    return  # not there yet: whoever writes the last record commits
        manifest = manifest_from_records(records.values())
        if manifest is None:
            plans = {record.plan for record in records.values()}
            if len(records) == self.config.world_size and len(plans) > 1:
                self._plan_differs(step_id)
            if not (told and not self.config.shared):
                return
            # Node-local tier of a job over several hosts: this host's part of a step that is whole elsewhere.
            manifest = Manifest(
                id=step_id,
                run=self.config.run,
                world_size=self.config.world_size,
                shards=tuple(records[rank] for rank in sorted(records)),
            )
        try:
            faultpoints.hit("agent.manifest.write")
            if len(manifest.shards) == manifest.world_size:
                self._tier.put_bytes(prefix + MANIFEST, manifest.to_json().encode())
            faultpoints.hit("agent.name.write")
            for name in manifest.names:
                self._tier.put_bytes(name, NameFile(run=self.config.run, id=step_id).to_json().encode())
        except (OSError, TierError) as error:
            self._events.emit(
                EventKind.CHECKPOINT_FAILED,
                step=step_id.step,
                reason=str(error),
                tier=self.config.local.name,
                will_retry=True,
            )
            self._warn_once(
                "commit",
                "checkpoint of step %d failed: %s; training goes on, the next save tries again",
                step_id.step,
                error,
            )
            for rank in self.config.local_ranks:
                self._notify(
                    rank, {"t": "failed", **_about(step_id), "reason": str(error), "tier": self.config.local.name}
                )
            return
        with self._lock:
            step.records, step.manifest = records, manifest
            self._warned.discard("commit")
        seconds = time.monotonic() - step.began
        self._events.emit(
            EventKind.CHECKPOINT_SAVED,
            step=step_id.step,
            tier=self.config.local.name,
            duration_s=round(seconds, 6),
            bytes=manifest.nbytes,
            names=list(manifest.names),
        )
        faultpoints.hit("agent.committed")
        for rank in self.config.local_ranks:
            self._notify(rank, {"t": "committed", **_about(step_id), "tier": self.config.local.name})
        self._send_on(step)
        self._syncs.submit(lambda: self._sync(step))

    def _send_on(self, step: _Step) -> None:
        """Uploads a complete step to every tier that any rank found due: after a failure ranks may differ about
        that."""
        assert step.manifest is not None
        step.tiers = tuple(sorted({tier for shard in step.manifest.shards for tier in shard.info.get("tiers", ())}))
        for uploader in self._uploaders:
            if uploader.spec.name in step.tiers:
                self._pin(step.id)
                uploader.submit(step.id, self._own_records(step))

    def _plan_differs(self, step_id: StepId) -> None:
        reason = (
            "ranks saved different sets of tensors; every rank must pass the same state"
            " (what differs belongs into per_rank)"
        )
        for rank in self.config.local_ranks:
            self._notify(rank, {"t": "failed", **_about(step_id), "reason": reason, "tier": self.config.local.name})
        self._events.emit(
            EventKind.CHECKPOINT_FAILED, step=step_id.step, reason=reason, tier=self.config.local.name, will_retry=False
        )
        self._warn_once("plan", "checkpoint of step %d cannot be committed: %s", step_id.step, reason)

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
                self._events.emit(
                    EventKind.CHECKPOINT_FAILED,
                    step=step.id.step,
                    reason=reason,
                    tier=self.config.local.name,
                    will_retry=True,
                )
                self._warn_once(
                    "sync", "step %d is committed but may not survive a power loss: %s", step.id.step, reason
                )
                for rank in self.config.local_ranks:
                    self._notify(
                        rank, {"t": "failed", **_about(step.id), "reason": reason, "tier": self.config.local.name}
                    )
                return
        with self._lock:
            step.durable = True
        if not self._is_ours(step.id):
            if self._deletes:  # asked for before this was known to be safe
                self._commits.submit(self._prune)
            return  # unasked nothing is deleted at a start: the ranks may be reading it
        if self.config.durable:
            seconds = time.monotonic() - step.began
            self._events.emit(
                EventKind.CHECKPOINT_DURABLE,
                step=step.id.step,
                tier=self.config.local.name,
                duration_s=round(seconds, 6),
            )

        def announce() -> None:
            # Recycled files are handed back first: a rank that saves as soon as it hears of this step finds one.
            self._prune()
            for rank in self.config.local_ranks if self.config.durable else ():
                self._notify(rank, {"t": "durable", **_about(step.id), "tier": self.config.local.name})

        self._commits.submit(announce)

    def _pin(self, step_id: StepId) -> None:
        with self._lock:
            self._steps[step_id].pins += 1

    def _uploaded(self, spec: TierSpec, step_id: StepId, outcome: str, reason: str) -> None:
        """Called by an uploader when it is done with a step, one way or the other."""
        with self._lock:
            step = self._steps.get(step_id)
            if step is not None and outcome != "retrying":
                step.pins -= 1
        message = {"durable": "durable", "partial": None}.get(outcome, "failed")
        if message is not None:
            about = {**_about(step_id), "tier": spec.name, "reason": reason, "retrying": outcome == "retrying"}
            for rank in self.config.local_ranks:
                self._notify(rank, {"t": message, **about})
        if outcome != "retrying":
            self._commits.submit(self._prune)

    # -- pruning -------------------------------------------------------------------------------------------------

    def _effective_deletes(self, newest: StepId) -> dict[str, StepId]:
        """Deletions whose condition (a step at least as new as ``after`` is safe) holds."""
        return {name: upto for name, (upto, after) in self._deletes.items() if newest.step >= after}

    def _notice_others(self) -> None:
        """Takes note of steps that another agent on the same folder has committed (another host, or a rank on its
        own)."""
        with self._lock:
            waiting = [step for step in self._steps.values() if step.manifest is None and step.records]
        for step in waiting:
            where = step_prefix(self.config.run, step.id) + MANIFEST
            try:
                manifest = Manifest.from_json(self._tier.read(where), where=where)
            except (FileNotFoundError, TierError, CorruptShard):
                continue
            with self._lock:
                step.manifest = manifest
                step.records.update({record.rank: record for record in manifest.shards})
            for rank in self.config.local_ranks:
                self._notify(rank, {"t": "committed", **_about(step.id), "tier": self.config.local.name})
            self._send_on(step)
            self._syncs.submit(partial(self._sync, step))

    def _prune(self) -> None:
        if self.config.shared:
            self._notice_others()
        with self._lock:
            safe = [s.manifest for s in self._steps.values() if s.manifest is not None and s.durable]
            if not safe:
                return
            newest = max(m.id for m in safe)
            deletes = self._effective_deletes(newest)
            busy = {s.id for s in self._steps.values() if s.pins > 0}
            unsafe = {s.id for s in self._steps.values() if s.manifest is not None and not s.durable}
            doomed = steps_to_delete(
                safe,
                [s.id for s in self._steps.values() if s.manifest is None],
                keep=self.config.local.keep,
                keep_named=self.config.local.keep_named,
                deleted=deletes,
                busy=busy | unsafe,
            )
        for step_id in doomed:
            try:
                step = self._steps[step_id]
                self._remover.delete(step_id, step.manifest.names if step.manifest is not None else ())
            except (OSError, TierError) as error:
                self._warn_once(
                    "prune",
                    "step %d could not be deleted from %s: %s; it is tried again after the next commit",
                    step_id.step,
                    self.config.local.address,
                    error,
                )
                return
            with self._lock:
                self._steps.pop(step_id, None)
            self._events.emit(EventKind.CHECKPOINT_DELETED, step=step_id.step, tier=self.config.local.name)
        try:
            self._drop_dead_names(newest, deletes)
        except TierError as error:
            self._warn_once("prune", "a name could not be removed from %s: %s", self.config.local.address, error)

    def _drop_dead_names(self, newest: StepId, deletes: Mapping[str, StepId]) -> None:
        """Removes name files that mean nothing any more although their step lives on (pinned, or under another
        name)."""
        with self._lock:
            known = [s.manifest for s in self._steps.values() if s.manifest is not None]
            safe = [s.manifest for s in self._steps.values() if s.manifest is not None and s.durable]
        live = live_names(safe, deleted=deletes)
        listed = {name for manifest in safe for name in manifest.names}
        for name in listed - live.keys():
            pointer = read_name(self._tier, name)
            if pointer is not None and pointer.run == self.config.run and pointer.id < newest:
                self._tier.delete(name)
        with self._lock:
            for name, upto in deletes.items():
                if not any(name in manifest.names and manifest.id <= upto for manifest in known):
                    self._deletes.pop(name, None)


def _about(step: StepId) -> dict[str, int]:
    return {"step": step.step, "serial": int(step.token[-2:], 16)}


def _is_file(path: str, inode: int, nbytes: int) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return found.st_ino == inode and found.st_size == nbytes
