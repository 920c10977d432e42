"""Reports heartbeats and sections of this rank to the rank monitor of NVRx's ``ft_launcher``.

A call of ``RankMonitorClient`` is a round trip to another process and takes a few tenths of a millisecond. So the
training thread only notes its section and its progress; a separate thread makes the calls, at once when the section
changes, and at intervals while steps follow each other. It makes no calls while the training thread notes nothing, so
that the monitor detects a rank that hangs.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from resiliency.errors import ConfigError
from resiliency.runtime.heartbeat_page import Phase

__all__ = ["RankMonitor", "Watched", "make_client", "next_calls", "section_of", "watched_by"]

logger = logging.getLogger(__name__)

#: Longest time in seconds between two heartbeats, or two ends of the section "step", while steps follow each other.
_EVERY_S = 1.0
#: At least so many reports within the shortest timeout.
_PER_TIMEOUT = 10
#: Time limit for the monitor's first answer, and for the end of the thread.
_DEADLINE = timedelta(seconds=10)

_SECTIONS = {
    Phase.SETUP: "setup",
    Phase.LOADING: "setup",
    Phase.TRAINING: "step",
    Phase.VALIDATION: "step",
    Phase.TESTING: "step",
    Phase.PREDICTION: "step",
    Phase.SAVING: "checkpointing",
}


def section_of(phase: Phase) -> str | None:
    """The section of a phase, named as in NVRx's own callback; None: outside all sections."""
    return _SECTIONS.get(phase)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a rank monitor watches, according to its configuration.

    Attributes:
        sections: names of the sections with a timeout. (NVRx 0.4.1 answers another name with an error.)
        out_of_section: the time between sections has a timeout.
        heartbeats: the time between heartbeats has a timeout.
        every_s: seconds between two reports of progress.
    """

    sections: frozenset[str]
    out_of_section: bool
    heartbeats: bool
    every_s: float

    @property
    def nothing(self) -> bool:
        return not (self.sections or self.out_of_section or self.heartbeats)


def watched_by(config: Any) -> Watched:
    """What a monitor with this configuration watches. ``config``: NVRx's ``FaultToleranceConfig``."""
    listed = getattr(config, "rank_section_timeouts", None) or {}
    sections = {name: limit for name, limit in listed.items() if limit is not None}
    between = getattr(config, "rank_out_of_section_timeout", None)
    beats = [getattr(config, f"{name}rank_heartbeat_timeout", None) for name in ("initial_", "")]
    limits = [float(one) for one in (*sections.values(), between, *beats) if one is not None]
    return Watched(
        sections=frozenset(sections),
        out_of_section=between is not None,
        heartbeats=any(one is not None for one in beats),
        every_s=min([_EVERY_S, *(limit / _PER_TIMEOUT for limit in limits)]),
    )


def next_calls(opened: str | None, wanted: str | None, *, progressed: bool, watched: Watched) -> list[tuple[str, ...]]:
    """The client's methods to call now, with their arguments.

    Args:
        opened: the section that is open at the monitor, or None.
        wanted: the section that the rank is in, or None.
        progressed: the rank has ended a batch since the previous calls.
    """
    target = wanted if wanted in watched.sections else None
    calls: list[tuple[str, ...]] = []
    if opened != target or (progressed and opened == "step"):  # reopened, so that the timeout starts anew for each step
        if opened is not None:
            calls.append(("end_section", opened))
        if target is not None:
            calls.append(("start_section", target))
    elif progressed and target is None and watched.out_of_section:
        calls.append(("end_all_sections",))  # starts the timeout of the time between sections anew
    if progressed and watched.heartbeats:
        calls.append(("send_heartbeat",))
    return calls


def make_client() -> Any:
    """A ``RankMonitorClient``, not connected yet.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        module = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
    except ImportError as error:
        raise ConfigError(
            "FT_RANK_MONITOR_IPC_SOCKET is set, so a rank monitor waits for this rank, but nvidia-resiliency-ext cannot"
            f" be imported ({error}); pip install 'resiliency[nvrx]'"
        ) from error
    return module.RankMonitorClient()


#: The connected client of this process, by process id; kept as long as the monitor watches the rank.
_clients: dict[int, Any] = {}


class RankMonitor:
    """Connects this rank to the rank monitor.

    Thread: the training thread. Blocks: only ``__init__`` and ``close``, up to ten seconds each. When a call to the
    monitor fails, that is logged once, and the monitor gets no further reports; training goes on.

    Args:
        make: makes the client, in the calling thread, because an import must not run in another thread while workers
            are forked.

    Raises:
        ConfigError: from ``make``.
    """

    def __init__(self, make: Callable[[], Any] = make_client) -> None:
        known = _clients.get(os.getpid())
        self._client: Any = make() if known is None else known
        self._wanted: str | None = None
        self._progress = 0
        self._closing = self._shutdown = False
        #: Events: something has changed; it must be reported at once; the monitor has answered for the first time.
        self._news, self._urgent, self._ready = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="resiliency-rank-monitor", daemon=True)
        self._thread.start()
        if not self._ready.wait(_DEADLINE.total_seconds()):
            logger.warning("NVRx's rank monitor has not answered for %.0f s", _DEADLINE.total_seconds())

    def enter(self, section: str | None) -> None:
        """Notes that the rank is in this section from now on; None: outside all sections. Blocks: no."""
        if section != self._wanted:
            self._wanted = section
            self._urgent.set()
            self._news.set()

    def progressed(self) -> None:
        """Notes that the rank has ended a batch. Blocks: no."""
        self._progress += 1
        if not self._news.is_set():
            self._news.set()

    def close(self, *, shutdown: bool) -> None:
        """Ends the open section and the thread. Idempotent. Blocks: up to ten seconds.

        Args:
            shutdown: True: the monitor stops watching this rank. False: it watches until the process has ended.
        """
        if self._closing:
            return
        self._wanted, self._closing, self._shutdown = None, True, shutdown
        self._urgent.set()
        self._news.set()
        self._thread.join(_DEADLINE.total_seconds())
        if self._thread.is_alive():
            logger.warning("NVRx's rank monitor does not answer")

    # -- the thread that calls

    def _run(self) -> None:
        try:
            self._tell()
        except Exception as error:  # Boundary: another library's client may raise anything. Training goes on.
            logger.warning(
                "reporting to NVRx's rank monitor has failed and stopped; it may take this rank for hung: %s: %s",
                type(error).__name__,
                error,
            )
            _clients.pop(os.getpid(), None)
        finally:
            self._ready.set()

    def _tell(self) -> None:
        client = self._client
        if _clients.get(os.getpid()) is not client:
            client.init_workload_monitoring()
            _clients.clear()
            _clients[os.getpid()] = client
        watched = watched_by(client.cfg)
        if watched.nothing:
            logger.warning(
                "NVRx's rank monitor has no timeouts and will notice no hang: pass ft_launcher"
                " --ft-rank-heartbeat-timeout and --ft-initial-rank-heartbeat-timeout"
            )
        self._ready.set()
        opened: str | None = None
        told = 0
        while not self._closing:
            self._news.wait()
            self._news.clear()
            self._urgent.clear()
            wanted, progress = self._wanted, self._progress
            for name, *arguments in next_calls(opened, wanted, progressed=progress != told, watched=watched):
                getattr(client, name)(*arguments)
                opened = arguments[0] if name == "start_section" else None if name == "end_section" else opened
            told = progress
            if not self._closing:
                self._urgent.wait(watched.every_s)
        if opened is not None:
            client.end_section(opened)
        if self._shutdown:
            client.shutdown_workload_monitoring()
            _clients.clear()
