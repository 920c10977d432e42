"""Writes what is decided to the store, on a thread of its own, again and again while the disk fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from resiliency.supervisor.history import History
from resiliency.supervisor.model import Host
from resiliency.supervisor.records import Changes
from resiliency.supervisor.store import HistoryEvent, StateStore, StateUnavailable, Stored
from resiliency.telemetry.plain_text import plain_line

__all__ = ["Journal"]

logger = logging.getLogger(__name__)

#: Seconds between two tries to write to a disk that fails: the first, doubled up to the longest.
_RETRY_S, _MOST_RETRY_S = 0.2, 5.0


class Journal:
    """Collects what has changed until it is written. Thread: the event loop's.

    Args:
        stopped: set when the supervisor ends; then a disk that fails is given up.
        watch_commit: called with the seconds that a transaction took.

    Attributes:
        dirty: set when there is something to write.
        problem: why it cannot be written; "": it can.
        writes_since_s: since when a transaction has been written, on the clock; None: none is.
        failures: how many transactions have failed.
    """

    def __init__(
        self,
        store: StateStore,
        term: int,
        *,
        stopped: asyncio.Event,
        clock: Callable[[], float],
        watch_commit: Callable[[float], None],
    ) -> None:
        self._store, self._term, self._stopped, self._clock = store, term, stopped, clock
        self._watch_commit = watch_commit
        self._history = History()
        self._changes, self._hosts, self._said = Changes(), set[str](), list[HistoryEvent]()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="supervisor-store")
        self.dirty = asyncio.Event()
        self.problem, self.failures = "", 0
        self.writes_since_s: float | None = None

    def load(self) -> Stored:
        """Reads everything, which no lower term can change any more. Blocks: for the disk.

        Raises:
            ConfigError: the stored state cannot be used.
            LeadershipLost: a higher term has begun.
            StateUnavailable: the state cannot be read or written now.
        """
        self._store.fence(self._term)
        stored = self._store.load()
        self._history.begin(stored.workloads, stored.incidents, stored.hosts)
        return stored

    def add(self, changes: Changes, hosts: set[str]) -> None:
        for name in ("workloads", "incidents", "plans"):
            getattr(self._changes, name).update(getattr(changes, name))
        self._hosts |= hosts
        if self.has_more:
            self.dirty.set()

    def say(self, kind: str, text: str, *, workload: str = "", host: str = "", **fields: Any) -> None:
        """Adds a line to the history."""
        at, text = time.time(), plain_line(text)
        self._said.append(HistoryEvent(at=at, kind=kind, text=text, workload=workload, host=host, fields=fields))
        self.dirty.set()

    @property
    def has_more(self) -> bool:
        return bool(self._changes or self._hosts or self._said)

    async def write(self, host: Callable[[str], Host | None]) -> tuple[Changes, list[HistoryEvent]]:
        """Writes what was collected. Returns it once it is on disk.

        Args:
            host: returns a host as it is now; None: it is forgotten.
        """
        changes, self._changes = self._changes, Changes()
        hosts = {name: host(name) for name in self._hosts}
        self._hosts = set()
        said, self._said = self._said, []
        events = [*said, *self._history.of(changes, hosts, time.time())]
        await self._write(changes, hosts, events)
        return changes, events

    async def _write(self, changes: Changes, hosts: Mapping[str, Host | None], events: Sequence[HistoryEvent]) -> None:
        loop, delay_s = asyncio.get_running_loop(), _RETRY_S
        self.writes_since_s = self._clock()
        while True:
            began_s = time.monotonic()
            try:
                await loop.run_in_executor(self._executor, self._store.commit, self._term, changes, hosts, events)
            except StateUnavailable as error:
                self.failures += 1
                if not self.problem:
                    logger.error("%s; what is decided waits until it can be written", error)
                self.problem = str(error)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), delay_s)
                    raise
                delay_s = min(2 * delay_s, _MOST_RETRY_S)
            else:
                if self.problem:
                    logger.warning("the state file is written again")
                self.problem, self.writes_since_s = "", None
                self._watch_commit(time.monotonic() - began_s)
                return

    def close(self) -> None:
        self._executor.shutdown(wait=False)
