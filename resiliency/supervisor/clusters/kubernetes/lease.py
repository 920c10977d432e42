"""Leadership by a Lease of Kubernetes (coordination.k8s.io/v1), of which each term is a fencing token."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import datetime, timezone
from typing import Any, NamedTuple

from resiliency.errors import ResiliencyError
from resiliency.supervisor.clusters.kubernetes.api import ApiError, ApiUnavailable, KubernetesApi
from resiliency.supervisor.store import LeadershipLost, StateUnavailable

__all__ = ["KubernetesLease"]

logger = logging.getLogger(__name__)

#: How many times within its duration a lease is renewed by its holder, and looked at by others.
_LOOKS = 5
_TERM = "resiliency/term"


class _Found(NamedTuple):
    """The Lease as the server has it."""

    version: str = ""
    holder: str = ""
    term: int = 0
    lease_s: float = 0.0


class KubernetesLease:
    """See :class:`~resiliency.supervisor.lease.Lease`. Thread: any but the event loop's, which does the talking.

    As with the lease in a file no clock of another process is read: what counts is how long the object has stood still
    on this one's. Every write carries the version that it was decided on, so of two that take it one is refused. One
    that somebody has deleted may be held until its holder finds out; whoever has known it waits for its duration.

    Args:
        name: of the Lease, in this process's own namespace. The chart makes it; one that is missing is made here.
        me: this holder's name, for people: the pod's.
        lease_s: its duration in seconds.
        loop: the event loop that the API is used on.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        api: KubernetesApi,
        *,
        name: str,
        me: str,
        lease_s: float,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._name, self._me, self._lease_s = api, name, me, lease_s
        self._loop, self._clock = loop, clock
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{api.access.namespace}/leases"
        self._path = f"{self._all}/{name}"
        self._lock = threading.Lock()
        self._seen, self._seen_s = _Found(), float("-inf")
        self._mine = _Found()
        #: The highest that was seen: terms grow also when the Lease is deleted, and while the clocks of two differ.
        self._term = 0
        self._until_s = self._failed_s = float("-inf")

    @property
    def looks_every_s(self) -> float:
        return self._lease_s / _LOOKS

    @property
    def holder(self) -> str:
        return self._seen.holder

    def acquire(self) -> int | None:
        with self._lock:
            seen = self._read()
            now_s = self._clock()
            if seen != self._seen:
                self._sees(seen, now_s)
            may_be_held = seen.holder or not seen.version
            if may_be_held and now_s - self._seen_s < max(seen.lease_s, self._lease_s):
                return None
            # At least the seconds of the wall clock: a Lease that somebody deleted must not begin with terms that hosts
            # have obeyed already.
            mine = self._write(seen, term=max(self._term + 1, int(time.time())), holder=self._me)
            if mine is None:
                return None
            self._sees(mine, now_s)
            self._mine, self._until_s = mine, now_s + self._lease_s
            return mine.term

    def renew(self) -> None:
        with self._lock:
            began_s = self._clock()
            try:
                renewed = self._write(self._mine, term=self._mine.term, holder=self._me)
            except StateUnavailable as error:
                self._failed_s = self._clock() if isinstance(error.__cause__, ApiUnavailable) else float("-inf")
                raise
            self._failed_s = float("-inf")
            if renewed is None:  # somebody has changed it: another holder, or a person who has annotated it
                found = self._read()
                if (found.holder, found.term) == (self._me, self._mine.term):
                    renewed = self._write(found, term=found.term, holder=self._me)
                if renewed is None:
                    self._until_s = float("-inf")
                    raise LeadershipLost(
                        f"{found.holder or 'nobody'} leads, in term {found.term}; this was {self._mine.term}"
                    )
            self._mine, self._until_s = renewed, began_s + self._lease_s

    def is_held(self) -> bool:
        return self._clock() < self._until_s

    @property
    def is_out_of_reach(self) -> bool:
        return self._clock() - self._failed_s < self._lease_s

    def release(self) -> None:
        with self._lock:
            held, self._until_s = self.is_held(), float("-inf")
            if not held:
                return
            try:
                self._write(self._mine, term=self._mine.term, holder="")
            except ResiliencyError as error:
                logger.info("the lease is not given back, and runs out in %.1f s: %s", self._lease_s, error)

    def _sees(self, found: _Found, now_s: float) -> None:
        self._seen, self._seen_s = found, now_s
        self._term = max(self._term, found.term)

    # -- the object ---------------------------------------------------------------------------------------------------

    def _read(self) -> _Found:
        return _found(self._ask("GET", self._path) or {})

    def _write(self, before: _Found, *, term: int, holder: str) -> _Found | None:
        """Changes the Lease if it is still as ``before``; None when it is not."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body: dict[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "annotations": {_TERM: str(term)}},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": math.ceil(self._lease_s),
                "leaseTransitions": term % (1 << 31),
                "renewTime": now,
            },
        }
        if not before.version:
            made = self._ask("POST", self._all, body)
        else:
            body["metadata"]["resourceVersion"] = before.version
            made = self._ask("PATCH", self._path, body)  # labels and annotations of others stay
        return None if made is None else _found(made)

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The server's answer; None when there is no such object, or it has changed meanwhile."""
        kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        try:
            return self._on_loop(self._api.request(verb, path, body, kind=kind, give_up_s=self._lease_s / 2))
        except ApiUnavailable as error:
            raise StateUnavailable(str(error)) from error
        except ApiError as error:
            if error.status in (404, 409):
                return None
            advice = "; the supervisor's Role must allow it" if error.status == 403 else ""
            raise StateUnavailable(f"{error}{advice}") from error

    def _on_loop(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError as error:  # the loop has been closed
            work.close()
            raise StateUnavailable(str(error)) from error


def _found(item: dict[str, Any]) -> _Found:
    spec, metadata = item.get("spec") or {}, item.get("metadata") or {}
    term = (metadata.get("annotations") or {}).get(_TERM, "")
    return _Found(
        version=metadata.get("resourceVersion", ""),
        holder=spec.get("holderIdentity") or "",
        term=int(term) if term.isdecimal() else 0,
        lease_s=float(spec.get("leaseDurationSeconds") or 0),
    )
