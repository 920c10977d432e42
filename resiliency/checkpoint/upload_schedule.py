"""Decides which saves go to which remote tier: intervals in steps on each rank, intervals in time by rank 0's clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import RemoteTierOptions
from resiliency.storage.interval import crossed

__all__ = ["RemoteSchedule"]

logger = logging.getLogger(__name__)


class RemoteSchedule:
    """Schedules saves for the remote tiers. Thread: training.

    Args:
        remotes: the tiers.
        coordinator: its counters carry rank 0's decisions for intervals in time; no rank waits for another one.
    """

    def __init__(self, remotes: Sequence[RemoteTierOptions], coordinator: Coordinator) -> None:
        self._remotes = tuple(remotes)
        self._coordinator = coordinator
        self._began = 0
        self._last_sent: dict[str, int | None] = {}
        self._last_sent_at: dict[str, float] = {}
        self._saves = 0

    def due(self, step: int, *, everywhere: bool = False) -> tuple[list[str], Callable[[], None]]:
        """Names of the tiers the save of ``step`` goes to, and a function that undoes scheduling it there.

        ``everywhere``: the save goes to all tiers, whatever their intervals.
        """
        before = dict(self._last_sent)
        due = [remote.name for remote in self._remotes if everywhere or self._wanted(remote, step)]
        self._last_sent.update(dict.fromkeys(due, step))
        return due, lambda: self._last_sent.update({tier: before.get(tier) for tier in due})

    def loaded(self, step: int) -> None:
        """A step was loaded. Before the first save it is the one that the job goes on from: what was due for a tier up
        to there was sent when it was saved."""
        if not self._saves:
            self._began = step

    def count_save(self) -> None:
        """Counts a save: rank 0's next decision applies to the following save."""
        self._saves += 1

    def _wanted(self, remote: RemoteTierOptions, step: int) -> bool:
        interval = remote.interval
        if interval.time is None:
            last = self._last_sent.get(remote.name)
            return not interval.steps or crossed(self._began if last is None else last, step, interval.steps)
        # Rank 0 decided at the previous save, and every rank reads the decision now, at least one step later.
        topic = f"clock/{remote.name}/"
        try:
            wanted = self._saves == 0 or self._coordinator.count(f"{topic}{self._saves}", 0) > 0
            if self._coordinator.rank == 0:
                now = time.monotonic()
                if wanted:
                    self._last_sent_at[remote.name] = now
                if now - self._last_sent_at.get(remote.name, now) >= interval.time.total_seconds():
                    self._coordinator.count(f"{topic}{self._saves + 1}", 1)
        except RuntimeError as error:  # what every torch store raises when rank 0 has exited
            logger.info(
                "rank %d: cannot read whether this save is due for tier %s (%s); it is not uploaded there",
                self._coordinator.rank,
                remote.name,
                error,
            )
            return False
        return wanted
