"""Who leads, of several supervisors with one state: the holder of a lease, which it renews and otherwise loses.

Nobody compares clocks. What is stored counts renewals; each process measures on its own monotonic clock for how long
that count has stood still. The holder stops acting one duration after it *began* its last renewal; another takes the
lease one duration after it *saw* that renewal, which is later. Jumps of a wall clock change nothing.

What a lease cannot exclude (a holder that is stopped between its last look at the clock and what it does) the term
does: the store and the monitors refuse a lower one than they have seen.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.faultpoints import hit
from resiliency.supervisor.sqlite_store import SqliteStore
from resiliency.supervisor.store import LeadershipLost

__all__ = ["Lease", "SqliteLease"]

logger = logging.getLogger(__name__)

#: How many times within its duration a lease is renewed by its holder, and looked at by others.
_LOOKS = 5


class Lease(Protocol):
    """This process's part in the election. All but :meth:`is_held` may block for the disk or the network, and raise
    :class:`~resiliency.supervisor.store.StateUnavailable` when it cannot be reached now.
    """

    @property
    def looks_every_s(self) -> float:
        """Seconds between two calls of :meth:`renew`, or of :meth:`acquire`."""
        ...

    @property
    def holder(self) -> str:
        """Who held it at the last call of :meth:`acquire`; "": nobody."""
        ...

    def acquire(self) -> int | None:
        """Takes the lease if it is free or was not renewed for its duration, and returns the term: a number that grows
        with each holder (a fencing token). None while another one holds it."""
        ...

    def renew(self) -> None:
        """Holds the lease for one more duration, also after it has run out if nobody took it.

        Raises:
            LeadershipLost: another one has taken it.
        """
        ...

    def is_held(self) -> bool:
        """Whether this process may act now. To be asked right before anything is sent or started. Blocks: never."""
        ...

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the last try to renew it, less than its duration ago, met nobody who could have told that another
        one has taken it. Then a supervisor may go on that has most hosts of its jobs, see
        :meth:`~resiliency.supervisor.service.Service.leads`."""
        ...

    def release(self) -> None:
        """Lets another one take the lease at once. Raises nothing: the lease runs out by itself. Idempotent."""
        ...


class _Row(NamedTuple):
    term: int
    holder: str
    lease_s: float
    renewals: int


class SqliteLease:
    """A lease in one row of the state file. Thread: any.

    Args:
        lease_s: its duration in seconds, which the others learn from the row.
        clock: monotonic seconds.
    """

    def __init__(self, store: SqliteStore, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._lease_s, self._clock = store, lease_s, clock
        self._me = f"process {os.getpid()} on {socket.gethostname()}"
        self._lock = threading.Lock()
        self._seen, self._seen_s = _Row(-1, "", 0.0, 0), 0.0
        self._term, self._until_s = 0, float("-inf")

    @property
    def looks_every_s(self) -> float:
        return self._lease_s / _LOOKS

    @property
    def holder(self) -> str:
        return self._seen.holder

    def acquire(self) -> int | None:
        with self._lock:
            seen = self._read()
            # After the row was read: a clock that was read before it would begin the duration too early.
            now_s = self._clock()
            if seen != self._seen:
                self._seen, self._seen_s = seen, now_s
            if seen.holder and now_s - self._seen_s < seen.lease_s:
                return None
            # At least the seconds of the wall clock, because a new file, or a copy that was put back, may be older
            # than the terms that hosts have obeyed.
            term = max(seen.term + 1, int(time.time()))
            row = _Row(term, self._me, self._lease_s, 0)
            if not self._set(
                "term = ?, holder = ?, lease_s = ?, renewals = ? WHERE term = ? AND renewals = ?",
                (*row, seen.term, seen.renewals),
            ):
                return None
            self._term, self._until_s = term, now_s + self._lease_s
            return term

    def renew(self) -> None:
        with self._lock:
            began_s = self._clock()
            if self._set("renewals = renewals + 1 WHERE term = ? AND holder = ?", (self._term, self._me)):
                self._until_s = began_s + self._lease_s
                return
            self._until_s = float("-inf")
            found = self._read()
            raise LeadershipLost(f"{found.holder or 'nobody'} leads, in term {found.term}; this was {self._term}")

    def is_held(self) -> bool:
        return self._clock() < self._until_s

    @property
    def is_out_of_reach(self) -> bool:
        return False  # without the state file nothing can be decided

    def release(self) -> None:
        with self._lock:
            self._until_s = float("-inf")
            try:
                self._set("holder = '' WHERE term = ? AND holder = ?", (self._term, self._me))
            except ResiliencyError as error:
                logger.info("the lease is not given back, and runs out in %.1f s: %s", self._lease_s, error)

    def _read(self) -> _Row:
        with self._store.reading() as db:
            row = db.execute("SELECT term, holder, lease_s, renewals FROM lease").fetchone()
        if row is None:
            raise ConfigError(self._store.damaged("it has no lease"))
        return _Row(*row)

    def _set(self, what: str, values: tuple[object, ...]) -> bool:
        """Changes the row if it is still as expected; False when it is not."""
        with self._store.writing() as db:
            hit("supervisor.lease.write")
            return db.execute(f"UPDATE lease SET {what}", values).rowcount == 1
