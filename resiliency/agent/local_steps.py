"""The agent's table of the steps on the local tier, shared by its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from resiliency.storage.catalog import StepListing
from resiliency.storage.manifest import Manifest, ShardRecord, UnfinishedStep
from resiliency.storage.step_id import StepId

__all__ = ["LocalStep", "LocalSteps"]


@dataclass
class LocalStep:
    """One step. Changed under the lock of :class:`LocalSteps`.

    Attributes:
        records: known records, by rank.
        committed: the step, once committed here; on a tier that each host has for itself, this host's part of it.
        durable: all its files were fsynced; on a ramdisk: it is committed.
        pins: number of uploads in progress; a pinned step is not deleted.
        began: monotonic seconds when the save began.
    """

    id: StepId
    records: dict[int, ShardRecord] = field(default_factory=dict)
    committed: Manifest | UnfinishedStep | None = None
    durable: bool = False
    pins: int = 0
    began: float = field(default_factory=time.monotonic)


class LocalSteps:
    """The steps, by identity. Thread: any."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._steps: dict[StepId, LocalStep] = {}

    def get(self, step: StepId) -> LocalStep | None:
        with self.lock:
            return self._steps.get(step)

    def select(self, wanted: Callable[[LocalStep], bool] = lambda _: True) -> list[LocalStep]:
        """Steps for which ``wanted`` is true, oldest first."""
        with self.lock:
            return sorted(filter(wanted, self._steps.values()), key=lambda step: step.id)

    def add_record(self, record: ShardRecord) -> LocalStep:
        """Adds a shard's record, and returns its step."""
        with self.lock:
            step = self._steps.setdefault(record.id, LocalStep(record.id))
            step.records[record.rank] = record
            step.began = min(step.began, time.monotonic() - max(0.0, time.time() - record.created))
            return step

    def add_listed(
        self,
        listings: Iterable[StepListing],
        *,
        in_parts: bool = False,
        keep_open: Callable[[StepId], bool] = lambda _: False,
    ) -> list[LocalStep]:
        """Adds the steps of a listing and removes committed steps that it does not contain.

        Args:
            in_parts: the tier holds only this host's part of a step; then records of all ranks do not make a committed
                step, because another host has its own copy of shard 0.
            keep_open: returns True for a step that the listing does not make a committed one.

        Returns:
            Steps that were not known to be committed before.
        """
        found = {listing.id: listing for listing in listings}
        fresh = []
        with self.lock:
            for step in [s for s in self._steps.values() if s.committed is not None and s.pins == 0]:
                if step.id not in found:
                    del self._steps[step.id]
            for listing in found.values():
                if not listing.readable:
                    continue  # facts already known may still be right, and an unknown step is not deleted
                known = self._steps.setdefault(listing.id, LocalStep(listing.id))
                known.records.update(listing.records)
                counts = listing.committed or not in_parts
                committed = listing.manifest if listing.manifest is not None and counts else listing.part
                if committed is not None and known.committed is None and not keep_open(listing.id):
                    known.committed = committed
                    fresh.append(known)
        return fresh

    def commit(self, step: LocalStep, committed: Manifest | UnfinishedStep) -> None:
        """Marks a step as committed."""
        with self.lock:
            step.committed = committed
            step.records.update({record.rank: record for record in committed.shards})

    def pin(self, step: StepId, amount: int) -> None:
        """Adds ``amount`` to the step's uploads in progress; ignores a step that was removed."""
        with self.lock:
            if step in self._steps:
                self._steps[step].pins += amount

    def remove(self, step: StepId) -> None:
        with self.lock:
            self._steps.pop(step, None)
