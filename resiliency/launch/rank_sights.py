"""Observes ranks from outside, without their cooperation: their heartbeats, and whether a signal has stopped them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from resiliency.launch.hangs import Seen
from resiliency.launch.rank_links import RankLinks
from resiliency.runtime.heartbeat import STACKS_SIGNAL
from resiliency.runtime.processes import is_stopped

__all__ = ["STACKS_S", "RankSights", "ask_for_stacks"]

#: Most seconds that one interval between two looks adds to the time a process counts as stopped.
_LONGEST_LOOK_S = 2.0
#: Seconds that ranks get to write their stacks; nothing tells when they have.
STACKS_S = 1.0


class RankSights:
    """Observes the same ranks repeatedly. Thread: one.

    Args:
        links: to the ranks.
    """

    def __init__(self, links: RankLinks) -> None:
        self._links = links
        #: Process id -> seconds for which it was seen stopped; and the monotonic time of the last look.
        self._stopped_s: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def look(self, processes: Mapping[int, Any]) -> tuple[dict[int, Seen], dict[int, int]]:
        """What was found of each rank, and the id of the process that beats for it, by global rank. Blocks: no.

        Args:
            processes: running processes of this host, by global rank.
        """
        now = time.monotonic()
        seen: dict[int, Seen] = {}
        pids: dict[int, int] = {}
        for rank, process in processes.items():
            heartbeat = self._links.heartbeat_of(process.pid)
            pids[rank], page = heartbeat if heartbeat is not None else (process.pid, None)
            quiet_s = now - page.last_s if page is not None else 0.0
            own_s, own_steps = self._links.own_work(process.pid)
            seen[rank] = Seen(
                page=page,
                quiet_s=quiet_s,
                stopped_s=self._seen_stopped(pids[rank], now),
                saved=self._links.newest_committed(process.pid),
                own_s=own_s,
                own_steps=own_steps,
            )
        self._stopped_s = {pid: self._stopped_s[pid] for pid in pids.values() if pid in self._stopped_s}
        self._looked_s = now
        return seen, pids

    def _seen_stopped(self, pid: int, now: float) -> float:
        """Seconds for which a process was found stopped at every look. One interval between looks adds 2 s at most,
        because this process may have been stopped, too."""
        if is_stopped(pid):
            self._stopped_s[pid] = self._stopped_s.get(pid, 0.0) + min(now - self._looked_s, _LONGEST_LOOK_S)
        else:
            self._stopped_s.pop(pid, None)
        return self._stopped_s.get(pid, 0.0)


def ask_for_stacks(links: RankLinks, processes: Mapping[int, Any]) -> None:
    """Makes ranks write the stacks of their threads to their standard error. Blocks: no; they take up to a second."""
    for process in processes.values():
        heartbeat = links.heartbeat_of(process.pid)
        if heartbeat is None:  # it has no handler for the signal, which would end it
            continue
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(heartbeat[0]) == process.pid:  # the process id was not reused
                os.kill(heartbeat[0], STACKS_SIGNAL)
