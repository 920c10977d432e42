"""The watchdogs of a host: makes them by name, and runs them together."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from resiliency.errors import ConfigError
from resiliency.monitor.state import Fault, MonitorState, boot_id
from resiliency.monitor.watchdogs.base import Finding, Watchdog, WatchdogRunner
from resiliency.monitor.watchdogs.disk import DiskWatchdog
from resiliency.monitor.watchdogs.ecc import EccWatchdog
from resiliency.monitor.watchdogs.kernel_log import has_kernels_pids
from resiliency.monitor.watchdogs.memory import MemoryWatchdog
from resiliency.monitor.watchdogs.notice import NoticeWatchdog
from resiliency.monitor.watchdogs.xid import XidWatchdog
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.runtime.tasks import end_tasks

__all__ = ["ENTRY_POINTS", "WatchdogSettings", "Watchdogs", "make_watchdogs"]

logger = logging.getLogger(__name__)

#: Group of entry points: name -> a class, or a function without arguments, that returns a watchdog.
ENTRY_POINTS = "resiliency.watchdogs"
_LONGEST_DETAIL = 1000
#: How many killed processes are remembered; the oldest are forgotten.
_MOST_KILLED = 100
#: Seconds between two writes of the watchdogs' cursors while nothing is found.
_KEEP_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """Settings of the watchdogs that come with the library.

    Attributes:
        xid_source: file that kernel messages are read from; "": the kernel's own log.
        ecc_source: file of counters, for tests; "": the driver's.
        folders: must be writable.
        min_free_bytes: of each folder.
        min_available_bytes: of memory, for the host and its control group.
        notice_file: path that exists while the host is to go; "": none.
        metadata_server: see :class:`~resiliency.monitor.watchdogs.notice.NoticeWatchdog`.
    """

    xid_source: str = ""
    ecc_source: str = ""
    folders: tuple[str, ...] = ()
    min_free_bytes: int = 1 << 30
    min_available_bytes: int = 1 << 28
    notice_file: str = ""
    metadata_server: str = "auto"


def _builtin(settings: WatchdogSettings) -> dict[str, Callable[[], Watchdog]]:
    return {
        "xid": lambda: XidWatchdog(settings.xid_source),
        "ecc": lambda: EccWatchdog(settings.ecc_source),
        "disk": lambda: DiskWatchdog(settings.folders, min_free_bytes=settings.min_free_bytes),
        "memory": lambda: MemoryWatchdog(min_available_bytes=settings.min_available_bytes),
        "notice": lambda: NoticeWatchdog(settings.notice_file, settings.metadata_server),
    }


def make_watchdogs(names: Sequence[str], settings: WatchdogSettings) -> list[Watchdog]:
    """Makes the named watchdogs; without names, all that come with the library.

    Raises:
        ConfigError: no watchdog has that name, or it cannot be made.
    """
    builtin = _builtin(settings)
    return [_make(name, builtin) for name in names or builtin]


def _make(name: str, builtin: Mapping[str, Callable[[], Watchdog]]) -> Watchdog:
    try:
        if name in builtin:
            made: Any = builtin[name]()
        elif ":" in name:
            module, _, attribute = name.partition(":")
            made = getattr(importlib.import_module(module), attribute)()
        else:
            points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
            if name not in points:
                known = ", ".join(sorted({*builtin, *points}))
                raise ConfigError(f"there is no watchdog {name!r}; there are {known}, and module:Class")
            made = points[name].load()()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"watchdog {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Watchdog):
        raise ConfigError(f"watchdog {name!r} is a {type(made).__name__}; derive it from Watchdog")
    return made


class Watchdogs:
    """Runs the watchdogs of a host. Thread: one, with an event loop.

    Args:
        observed: called with each observation for the supervisor.
        save: makes ``state`` durable.
    """

    def __init__(
        self,
        watchdogs: Sequence[Watchdog],
        *,
        host: str,
        state: MonitorState,
        save: Callable[[], object],
        observed: Callable[[Observation], None],
    ) -> None:
        self._host, self._state, self._save, self._observed = host, state, save, observed
        self._runners = [WatchdogRunner(each, self._passed_on, self._looked) for each in watchdogs]
        self._keep_now, self._kept_s = False, time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._killed: dict[int, str] = {}
        for each in watchdogs:
            each.resume(state.cursors.get(each.name, ""))

    def start(self) -> None:
        self._tasks = [asyncio.create_task(runner.run()) for runner in self._runners]

    def _looked(self) -> None:
        """Stores the cursors after a finding, and once a minute otherwise: a finding that was passed on must not be
        read again, and other lines may be."""
        new = any(
            runner.watchdog.cursor() and runner.watchdog.name not in self._state.cursors for runner in self._runners
        )
        if self._keep_now or new or time.monotonic() - self._kept_s > _KEEP_EVERY_S:
            self.keep_cursors()

    def put_in(self, finding: Finding) -> None:
        """Handles a finding as if a watchdog had just found it for the first time."""
        self._passed_on(finding)

    def _passed_on(self, finding: Finding) -> None:
        self._keep_now = True
        detail = finding.detail[:_LONGEST_DETAIL]
        if finding.killed:  # said when it is known to be a rank
            self._killed.pop(finding.killed, None)
            self._killed[finding.killed] = detail
            if len(self._killed) > _MOST_KILLED:
                del self._killed[next(iter(self._killed))]
            return
        if finding.warning or finding.device_class is DeviceClass.IGNORE:
            logger.warning("%s%s", f"device {finding.device}: " if finding.device else "", detail)
            return
        logger.error("%s%s", f"device {finding.device} ({finding.device_class}): " if finding.device else "", detail)
        if finding.is_lasting:
            assert finding.device_class is not None
            self._state.add_fault(
                Fault(
                    boot=boot_id(),
                    device=finding.device,
                    code=finding.code,
                    device_class=finding.device_class.value,
                    detail=detail,
                )
            )
            self._save()
        kind = ObservationKind.HOST_UNHEALTHY if finding.device_class is None else ObservationKind.DEVICE_FAULT
        self._observed(
            Observation(
                kind=kind,
                host=self._host,
                device=finding.device,
                device_class=finding.device_class,
                detail=detail,
            )
        )

    @property
    def hear_of_kills(self) -> bool:
        """Whether a watchdog tells which processes the kernel has killed."""
        return any(runner.watchdog.hears_of_kills for runner in self._runners)

    async def why_killed(self, process: int, within_s: float) -> str:
        """The line in which the kernel says that it has killed this process for lack of memory; "" when it has not, or
        when that is not known. Blocks: up to ``within_s``."""
        looks = [runner.look_now(within_s) for runner in self._runners if runner.watchdog.hears_of_kills]
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*looks), within_s)
        # The kernel counts processes in its own namespace.
        return self._killed.pop(process, "") if has_kernels_pids() else ""

    async def look_all(self, within_s: float) -> list[str]:
        """Has all watchdogs look at once. Returns the problems of those that did not end in time. Blocks: up to
        ``within_s``."""
        late = await asyncio.gather(*(runner.look_now(within_s) for runner in self._runners))
        return [problem for problem in late if problem]

    def problems(self, *, resettable: bool = True) -> list[str]:
        """What takes the host out now: findings of the last looks, and faults that last until the host or device is
        restarted.

        Args:
            resettable: includes faults that a reset of the device mends.
        """
        now = [
            finding.detail
            for runner in self._runners
            for finding in runner.findings
            if finding.takes_host_out and not finding.is_lasting
        ]
        lasting = (fault for fault in self._state.faults if resettable or not _asks_for_reset(fault))
        return [
            *now,
            *(f"device {fault.device}: {fault.detail}" if fault.device else fault.detail for fault in lasting),
        ]

    def asking_for_reset(self) -> list[Observation]:
        """Faults that a reset of the device mends, as they were observed first."""
        return [self._fault_seen(fault) for fault in self._state.faults if _asks_for_reset(fault)]

    def _fault_seen(self, fault: Fault) -> Observation:
        return Observation(
            kind=ObservationKind.DEVICE_FAULT,
            host=self._host,
            device=fault.device,
            device_class=DeviceClass(fault.device_class),
            detail=fault.detail,
        )

    def faulty(self) -> list[str]:
        """Devices that need a reset; empty: all of the host do, or none does."""
        devices = {fault.device for fault in self._state.faults if _asks_for_reset(fault)}
        return [] if "" in devices else sorted(devices)

    def were_reset(self, devices: Sequence[str]) -> None:
        """Forgets the faults that a reset mends, of these devices, or of all when there are none. The links between
        devices are reset with any of them."""
        self._state.faults = [
            fault
            for fault in self._state.faults
            if not (_asks_for_reset(fault) and (not devices or fault.device in ("", *devices)))
        ]
        self._save()

    def keep_cursors(self) -> None:
        """Stores how far the watchdogs have read, if that has changed."""
        self._keep_now, self._kept_s = False, time.monotonic()
        cursors = {runner.watchdog.name: runner.watchdog.cursor() for runner in self._runners}
        cursors = {name: cursor for name, cursor in cursors.items() if cursor}
        if any(self._state.cursors.get(name) != cursor for name, cursor in cursors.items()):
            self._state.cursors.update(cursors)
            self._save()

    async def close(self) -> None:
        """Stops all watchdogs. Blocks: up to 1 s for each watchdog that hangs. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await end_tasks(tasks)
        for runner in self._runners:
            runner.close()
        self.keep_cursors()


def _asks_for_reset(fault: Fault) -> bool:
    return fault.device_class == DeviceClass.RESET.value
