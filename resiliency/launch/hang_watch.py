"""Looks at the heartbeats of ranks, and ends those that hang; see :mod:`resiliency.launch.hangs` for which."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from resiliency.launch.hangs import hang_text, hung
from resiliency.launch.processes import is_stopped
from resiliency.launch.rank_handlers import kill_group
from resiliency.launch.rank_links import RankLinks
from resiliency.launch.rank_sights import STACKS_S, RankSights, ask_for_stacks

__all__ = ["HangWatch"]

logger = logging.getLogger(__name__)

#: Seconds that must lie between two looks that find the same.
_BETWEEN_S = 1.0


class HangWatch:
    """Thread: one.

    Args:
        links: to the ranks.
        floor_s: see :func:`~resiliency.launch.hangs.threshold`; 0: nothing is watched.
        report: takes the rank that is about to be killed, and for how many seconds it was quiet.
    """

    def __init__(self, links: RankLinks, *, floor_s: float, report: Callable[[int, float], None]) -> None:
        self._links = links
        self._floor_s = floor_s
        self._report = report
        #: When the ranks that hung at the last look were found first, and which they were.
        self._suspects: tuple[float, set[int]] = 0.0, set()
        self._sights = RankSights(links)

    def look(self, processes: Mapping[int, Any]) -> None:
        """Kills ranks that hang, after the stacks of all were written. Blocks: for that, a second.

        Args:
            processes: of this host that run, by rank.
        """
        if not self._floor_s:
            return
        now = time.monotonic()
        seen, pids = self._sights.look(processes)
        found = hung(seen, floor_s=self._floor_s)
        # Twice in a row: when this process, and perhaps the whole host, did not run for a time, no rank has beaten.
        when, before = self._suspects
        self._suspects = (when if before and set(found) == before else now), set(found)
        if not found or set(found) != before or now - when < _BETWEEN_S:
            return
        ask_for_stacks(self._links, processes)
        threading.Event().wait(STACKS_S)
        self._links.serve()
        for rank in found:
            heartbeat = self._links.heartbeat_of(processes[rank].pid)
            if (heartbeat is not None and heartbeat[1].beats != seen[rank].beats) or (
                seen[rank].stopped_s and not is_stopped(pids[rank])
            ):
                logger.warning("rank %d seemed to hang, but goes on since its stacks were written", rank)
                continue
            logger.error("%s", hang_text(rank, pids[rank], seen[rank], seen))
            self._report(rank, seen[rank].quiet_s)
            kill_group(processes[rank])
