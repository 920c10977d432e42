"""The base class of watchdogs, and how one is run: on a thread of its own with a deadline, so that it can do no
harm."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from resiliency.runtime.messages.observations import DeviceClass

__all__ = ["Finding", "Watchdog", "WatchdogRunner"]

logger = logging.getLogger(__name__)

#: Longest time, in seconds, until a watchdog that raises is asked again: its interval, doubled with each failure.
_LONGEST_BACKOFF_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: short name of what is wrong. The same code of the same device is not passed on again for a while.
        detail: for people.
        device: PCI address or index; "": it concerns the host.
        device_class: what is needed to mend a fault of a device; None: it is a fault of the host, which then cannot
            have ranks.
        warning: for a fault of the host: the host goes on; the monitor logs it and does not tell the supervisor.
        killed: a process that the kernel has killed for lack of memory; 0: none. It says why a rank was lost, and
            nothing when the process was no rank.
    """

    code: str
    detail: str
    device: str = ""
    device_class: DeviceClass | None = None
    warning: bool = False
    killed: int = 0

    @property
    def is_lasting(self) -> bool:
        """Whether it lasts until the device or the host is restarted."""
        return self.device_class in (DeviceClass.RESET, DeviceClass.SWAP)

    @property
    def takes_host_out(self) -> bool:
        return not self.warning and self.device_class in (None, DeviceClass.RESET, DeviceClass.SWAP)


class Watchdog:
    """Base class. All methods are called one at a time.

    Attributes:
        name: for ``--watchdog``.
        interval_s: seconds between two looks.
        deadline_s: seconds that a look may take.
        cooldown_s: seconds until a finding of the same code and device is passed on again.
        hears_of_kills: whether its findings tell which processes the kernel has killed.
    """

    name: str = "custom"
    interval_s: float = 10.0
    deadline_s: float = 10.0
    cooldown_s: float = 600.0
    hears_of_kills: bool = False

    def look(self) -> Sequence[Finding]:
        """Returns what is wrong now, or has happened since the last look. Thread: this watchdog's own. Blocks: up to
        ``deadline_s``. An exception is logged, and the watchdog is asked again later."""
        raise NotImplementedError

    def reported(self, finding: Finding) -> None:
        """The finding was passed on, and not suppressed by the cooldown."""

    def resume(self, cursor: str) -> None:
        """Called once before the first look with the last value of :meth:`cursor`, perhaps of an earlier process."""

    def cursor(self) -> str:
        """How far it has read, as text; "" when it keeps no position."""
        return ""

    def close(self) -> None:
        """Called once after the last look."""


class WatchdogRunner:
    """Runs one watchdog. Thread: one, with an event loop.

    Args:
        passed_on: called with each finding that the cooldown does not suppress.
        looked: called after each look that has ended in time without an exception.
    """

    def __init__(
        self, watchdog: Watchdog, passed_on: Callable[[Finding], None], looked: Callable[[], None] = lambda: None
    ) -> None:
        self.watchdog = watchdog
        self._passed_on, self._looked = passed_on, looked
        self._lock = asyncio.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: asyncio.Future[Sequence[Finding]] | None = None
        self._said_s: dict[tuple[str, str], float] = {}
        self._failures = 0
        #: Findings of the last look.
        self.findings: tuple[Finding, ...] = ()

    async def run(self) -> None:
        """Looks again and again until it is cancelled."""
        while True:
            await self.look_now()
            wait_s = self.watchdog.interval_s
            if self._failures:
                wait_s = min(_LONGEST_BACKOFF_S, wait_s * 2 ** min(self._failures, 16))
            await asyncio.sleep(wait_s)

    async def look_now(self, within_s: float | None = None) -> str:
        """Looks once. Returns why the look did not end in time; "" when it did, also when it raised."""
        deadline_s = self.watchdog.deadline_s if within_s is None else min(within_s, self.watchdog.deadline_s)
        async with self._lock:
            if self._late is None:
                self._late = self._begin()
            elif within_s is None and not self._late.done():
                return ""  # this was logged already
            looking = self._late
            try:
                found = await asyncio.wait_for(asyncio.shield(looking), deadline_s)
            except asyncio.TimeoutError:
                problem = f"watchdog {self.watchdog.name} has not answered within {deadline_s:.1f} s"
                if not self._failures:
                    logger.error("%s; it is not asked again before it does", problem)
                self._failures += 1
                return problem
            except Exception:
                self._late = None
                if not self._failures:
                    logger.exception(
                        "watchdog %s fails; it is asked again later, and this is not said again", self.watchdog.name
                    )
                self._failures += 1
                return ""
            self._late = None
            if self._failures:
                logger.info("watchdog %s answers again", self.watchdog.name)
                self._failures = 0
            self._sort(found)
            self._looked()
            return ""

    def _begin(self) -> asyncio.Future[Sequence[Finding]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Finding]] = loop.create_future()

        def done(found: Sequence[Finding] | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
                future.exception()  # marks it as retrieved, because nobody may be waiting for it
            else:
                future.set_result(found or ())

        def work() -> None:
            found: Sequence[Finding] | None = None
            failed: Exception | None = None
            try:
                found = tuple(self.watchdog.look())
                strange = [one for one in found if not isinstance(one, Finding)]
                if strange:
                    raise TypeError(f"look() returns findings, not {type(strange[0]).__name__}")
            except Exception as error:
                failed = error
            with suppress(RuntimeError):  # the monitor has ended meanwhile
                loop.call_soon_threadsafe(done, found, failed)

        if self._thread is None:
            name = f"resiliency-watchdog-{self.watchdog.name}"
            self._thread = threading.Thread(target=_run, args=(self._work,), name=name, daemon=True)
            self._thread.start()
        self._work.put(work)
        return future

    def _sort(self, found: Sequence[Finding]) -> None:
        self.findings = tuple(found)
        now_s = time.monotonic()
        cooldown_s = self.watchdog.cooldown_s
        self._said_s = {key: said_s for key, said_s in self._said_s.items() if now_s - said_s < cooldown_s}
        for finding in found:
            if (finding.device, finding.code) in self._said_s:
                continue
            self._said_s[finding.device, finding.code] = now_s
            self._passed_on(finding)
            try:
                self.watchdog.reported(finding)
            except Exception:
                logger.exception("watchdog %s fails after a finding was passed on", self.watchdog.name)

    def close(self) -> None:
        """Ends the thread; one that hangs ends with the process. Blocks: up to 1 s. Idempotent."""
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            with suppress(Exception):
                self.watchdog.close()
        self._thread = None


def _run(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (each := work.get()) is not None:
        each()
