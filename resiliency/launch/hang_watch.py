"""Looks at the heartbeats of ranks, and ends those that hang; see :mod:`resiliency.launch.hangs` for which."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from resiliency.launch.hangs import Seen, hang_text, hung
from resiliency.launch.heartbeat import STACKS_SIGNAL
from resiliency.launch.processes import is_stopped
from resiliency.launch.rank_handlers import kill_group
from resiliency.launch.rank_links import RankLinks

__all__ = ["HangWatch"]

logger = logging.getLogger(__name__)

#: Seconds that must lie between two looks that find the same.
_BETWEEN_S = 1.0
#: Of the seconds between two looks, so many at most count.
_LONGEST_LOOK_S = 2.0
#: For ranks to write their stacks; nothing tells when they have.
_STACKS_S = 1.0


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
        #: For how long processes were seen stopped, by their ids, and when it was looked last.
        self._stopped_s: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def look(self, processes: Mapping[int, Any]) -> None:
        """Kills ranks that hang, after the stacks of all were written. Blocks: for that, a second.

        Args:
            processes: of this host that run, by rank.
        """
        if not self._floor_s:
            return
        now = time.monotonic()
        seen: dict[int, Seen] = {}
        pids: dict[int, int] = {}
        for rank, process in processes.items():
            heartbeat = self._links.heartbeat_of(process.pid)
            pids[rank], page = heartbeat if heartbeat is not None else (process.pid, None)
            quiet_s = now - page.last_s if page is not None else 0.0
            seen[rank] = Seen(page=page, quiet_s=quiet_s, stopped_s=self._seen_stopped(pids[rank], now))
        self._stopped_s = {pid: self._stopped_s[pid] for pid in pids.values() if pid in self._stopped_s}
        self._looked_s = now
        found = hung(seen, floor_s=self._floor_s)
        # Twice in a row: when this process, and perhaps the whole host, did not run for a time, no rank has beaten.
        when, before = self._suspects
        self._suspects = (when if before and set(found) == before else now), set(found)
        if not found or set(found) != before or now - when < _BETWEEN_S:
            return
        self._ask_for_stacks(processes)
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

    def _seen_stopped(self, pid: int, now: float) -> float:
        """For how long a process was seen stopped at every look. What lies between two looks counts little: this
        process may have been stopped, too."""
        if is_stopped(pid):
            self._stopped_s[pid] = self._stopped_s.get(pid, 0.0) + min(now - self._looked_s, _LONGEST_LOOK_S)
        else:
            self._stopped_s.pop(pid, None)
        return self._stopped_s.get(pid, 0.0)

    def _ask_for_stacks(self, processes: Mapping[int, Any]) -> None:
        for process in processes.values():
            heartbeat = self._links.heartbeat_of(process.pid)
            if heartbeat is None:  # it has no handler, and the signal would end it
                continue
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(heartbeat[0]) == process.pid:  # its number was not given to another
                    os.kill(heartbeat[0], STACKS_SIGNAL)
        threading.Event().wait(_STACKS_S)
        self._links.serve()
