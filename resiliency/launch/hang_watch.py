"""Kills ranks whose heartbeats show that they hang; :mod:`resiliency.launch.hangs` decides which."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from resiliency.launch.hangs import hang_text, hung
from resiliency.launch.rank_handlers import kill_group
from resiliency.launch.rank_links import RankLinks
from resiliency.launch.rank_sights import STACKS_S, RankSights, ask_for_stacks
from resiliency.runtime.processes import is_stopped

__all__ = ["HangKiller"]

logger = logging.getLogger(__name__)

#: Least seconds between the first look that finds a rank hung and the one that confirms it.
_BETWEEN_S = 1.0


class HangKiller:
    """Checks the ranks of this host for hangs. Thread: one.

    Args:
        links: to the ranks.
        floor_s: least seconds without progress, see :func:`~resiliency.launch.hangs.threshold`; 0: nothing is watched.
        report: called before a rank is killed, with its number and the seconds it was quiet.
    """

    def __init__(self, links: RankLinks, *, floor_s: float, report: Callable[[int, float], None]) -> None:
        self._links = links
        self._floor_s = floor_s
        self._report = report
        #: (monotonic seconds when these ranks were first found hung, their numbers).
        self._suspects: tuple[float, set[int]] = 0.0, set()
        self._sights = RankSights(links)

    def look(self, processes: Mapping[int, Any]) -> None:
        """Kills hung ranks, after all ranks have written their stacks. Blocks: a second while ranks hang, else no.

        Args:
            processes: running processes of this host, by global rank.
        """
        if not self._floor_s:
            return
        now = time.monotonic()
        seen, pids = self._sights.look(processes)
        found = hung(seen, floor_s=self._floor_s)
        # Found twice in a row: after a pause of this process, and perhaps of the whole host, all ranks look quiet once.
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
