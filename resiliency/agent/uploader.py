"""Sends committed steps of this host to one remote tier, in order, and prunes there.

Every block is checked against its digest while it is read, so damage in RAM or on the local disk is not carried on.
A tier that is down is retried with growing pauses for as long as the agent lives; training never waits for it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resiliency import faultpoints
from resiliency.agent._worker import Worker
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.errors import ConfigError, CorruptShard, TierError
from resiliency.events import EventKind, EventWriter
from resiliency.storage.catalog import block_digest, read_name, scan, step_prefix
from resiliency.storage.manifest import (
    MANIFEST,
    Manifest,
    NameFile,
    ShardRecord,
    StepId,
    gather_records,
    record_file,
)
from resiliency.storage.retention import DeleteRequest, steps_to_delete
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers._address import local_path
from resiliency.storage.tiers.base import Tier

__all__ = ["Uploader"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

#: ``(tier, step, outcome, reason)``; outcome: "durable" the step is whole there, "partial" this host's part is,
#: "retrying" the tier failed and will be tried again, "failed" given up.
Report = Callable[[TierSpec, StepId, str, str], None]


class Uploader:
    """One remote tier. Thread: submit from any; the work is done on ``resiliency-agent-upload-<tier>``."""

    def __init__(
        self,
        config: AgentConfig,
        spec: TierSpec,
        path: Callable[[StepId, str], str],
        report: Report,
        events: EventWriter,
    ) -> None:
        self.spec = spec
        self._config = config
        self._path = path
        self._report = report
        self._events = events
        self._worker = Worker(f"resiliency-agent-upload-{spec.name}")
        self._closing = threading.Event()
        self._tier: Tier | None = None
        self._down_since: float | None = None
        self._deletes: dict[str, DeleteRequest] = {}

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def wait_idle(self, deadline: float) -> bool:
        return self._worker.wait_idle(deadline)

    def close(self) -> None:
        """Gives up waiting for the tier and ends the thread."""
        self._closing.set()
        self._worker.close()
        close = getattr(self._tier, "close", None)
        if close is not None:
            close()

    def submit(self, step: StepId, records: Sequence[ShardRecord], *, only_if_missing: bool = False) -> None:
        """Queues this host's shards of a committed step. The step must stay on the local tier until reported."""
        self._worker.submit(lambda: self._run(step, records, only_if_missing))

    def delete(self, requests: Mapping[str, DeleteRequest]) -> None:
        """Names to be deleted here too."""
        self._deletes.update(requests)

    def _run(self, step: StepId, records: Sequence[ShardRecord], only_if_missing: bool) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                tier = self._open()
                if only_if_missing and self._has_manifest(tier, step):
                    self._report(self.spec, step, "partial", "")
                    return
                outcome = self._send(tier, step, records)
            except (TierError, OSError) as error:
                if isinstance(error, TierError) and not error.retryable:
                    self._give_up(step, str(error))
                    return
                self._tell_down(step, error, pause)
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            except (CorruptShard, ConfigError) as error:
                self._give_up(step, str(error))
                return
            if self._down_since is not None:
                logger.warning(
                    "tier %s answers again after %.0f s", self.spec.address, time.monotonic() - self._down_since
                )
                self._down_since = None
            if outcome == "durable":
                self._events.emit(
                    EventKind.CHECKPOINT_DURABLE,
                    step=step.step,
                    tier=self.spec.name,
                    duration_s=round(time.monotonic() - began, 6),
                    bytes=sum(record.nbytes for record in records),
                )
            self._report(self.spec, step, outcome, "")
            self._prune(tier)
            return
        self._report(self.spec, step, "failed", "the agent is ending; the upload is resumed at the next start")

    def _open(self) -> Tier:
        if self._tier is None:
            options: dict[str, Any] = {}
            if local_path(self.spec.address) is None:
                # The tier's own pauses end when the agent does.
                options = {"storage_options": dict(self.spec.storage_options or {}), "pause": self._closing.wait}
            self._tier = open_tier(self.spec.address, name=self.spec.name, **options)
        return self._tier

    def _give_up(self, step: StepId, reason: str) -> None:
        self._events.emit(
            EventKind.CHECKPOINT_FAILED, step=step.step, reason=reason, tier=self.spec.name, will_retry=False
        )
        logger.error("step %d is not stored on %s: %s; the local copy stays", step.step, self.spec.address, reason)
        self._report(self.spec, step, "failed", reason)

    def _tell_down(self, step: StepId, error: Exception, pause: float) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            self._events.emit(
                EventKind.CHECKPOINT_FAILED, step=step.step, reason=str(error), tier=self.spec.name, will_retry=True
            )
            logger.warning(
                "tier %s failed at step %d: %s; it is tried again in %.0f s and then with growing pauses",
                self.spec.address,
                step.step,
                error,
                pause,
            )
            self._report(self.spec, step, "retrying", str(error))

    def holds(self, step: StepId) -> bool:
        """True when the tier has the whole step. Blocks: one read, with the tier's own retries."""
        try:
            return self._has_manifest(self._open(), step)
        except (TierError, OSError) as error:
            logger.warning(
                "%s cannot be asked for step %d (%s); the local copy stays", self.spec.address, step.step, error
            )
            return False

    def _has_manifest(self, tier: Tier, step: StepId) -> bool:
        try:
            Manifest.from_json(tier.read(step_prefix(self._config.run, step) + MANIFEST), where=tier.root)
        except (FileNotFoundError, CorruptShard):
            return False
        return True

    def _send(self, tier: Tier, step: StepId, records: Sequence[ShardRecord]) -> str:
        prefix = step_prefix(self._config.run, step)
        for record in records:
            faultpoints.hit("agent.upload.shard", rank=record.rank)
            tier.put_file(prefix + record.file, self._path(step, record.file), check=_checker(record))
            faultpoints.hit("agent.upload.record", rank=record.rank)
            tier.put_bytes(prefix + record_file(record.rank), json.dumps(record.to_dict()).encode())
        known = {record.rank: record for record in records}
        # The job may have another size now than when this step was saved.
        world_size = records[0].world_size if records else self._config.world_size
        for rank in range(world_size):
            if rank not in known:
                where = prefix + record_file(rank)
                try:
                    known[rank] = ShardRecord.from_dict(json.loads(tier.read(where)), where=where)
                except (FileNotFoundError, CorruptShard, ValueError):
                    return "partial"  # another host is still sending; the last one writes the manifest
        manifest = gather_records(known.values())
        if not isinstance(manifest, Manifest):
            raise CorruptShard(f"the records of step {step.step} on {tier.root} do not belong together", path=prefix)
        faultpoints.hit("agent.upload.manifest")
        tier.put_bytes(prefix + MANIFEST, manifest.to_json().encode())
        for name in manifest.names:
            tier.put_bytes(name, NameFile(run=self._config.run, id=step).to_json().encode())
        faultpoints.hit("agent.upload.done")
        return "durable"

    def _prune(self, tier: Tier) -> None:
        """Deletes what retention lets go. Only the host of rank 0 does, after a manifest is safely there."""
        if 0 not in self._config.local_ranks:
            return
        try:
            listings = scan(tier, self._config.run)
            complete = [listing.manifest for listing in listings if listing.manifest is not None and listing.committed]
            incomplete = [listing.id for listing in listings if not listing.committed]
            by_id = {listing.id: listing for listing in listings}
            newest = max((manifest.id for manifest in complete), default=None)
            deletes = {
                name: request.upto
                for name, request in self._deletes.items()
                if newest is not None and request.is_due(newest)
            }
            # Another host may still be sending its part of the newest steps: what is unfinished goes with the step
            # after it.
            for step in steps_to_delete(
                complete, incomplete, keep=self.spec.keep, keep_named=self.spec.keep_named, deleted=deletes
            ):
                listing = by_id[step]
                prefix = step_prefix(self._config.run, step)
                for name in listing.manifest.names if listing.manifest is not None else ():
                    pointer = read_name(tier, name)
                    if pointer is not None and pointer.id == step and pointer.run == self._config.run:
                        tier.delete(name)
                for file in sorted(listing.sizes, key=_deletion_order):
                    tier.delete(prefix + file)
                self._events.emit(EventKind.CHECKPOINT_DELETED, step=step.step, tier=self.spec.name)
        except TierError as error:
            logger.warning(
                "old steps on %s could not be deleted: %s; tried again after the next upload", self.spec.address, error
            )


def _deletion_order(file: str) -> tuple[int, str]:
    return (0 if file == MANIFEST else 1 if file.endswith(".json") else 2, file)


def _checker(record: ShardRecord) -> Callable[[bytes], None]:
    position = 0

    def check(block: bytes) -> None:
        nonlocal position
        index = position // record.block_bytes
        if index >= len(record.digests) or block_digest(block) != record.digests[index]:
            raise CorruptShard(
                f"{record.file} of step {record.id.step} changed after it was digested, bytes {position} to"
                f" {position + len(block)};"
                " the copy is not sent on",
                path=record.file,
                ranges=((position, position + len(block)),),
            )
        position += len(block)

    return check
