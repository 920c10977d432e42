"""Tells the rank monitor of NVRx's ``ft_launcher`` what this rank does: heartbeats and sections.

A call of ``RankMonitorClient`` is a round trip to another process, a few tenths of a millisecond. The training thread
only notes where it is; a thread of its own makes the calls, at once when the section changes, and at intervals while
steps follow each other. It says nothing while the training thread notes nothing, so a rank that hangs is seen to.
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
from resiliency.launch.heartbeat_page import Phase

__all__ = ["RankMonitor", "Watched", "make_client", "next_calls", "section_of", "watched_by"]

logger = logging.getLogger(__name__)

#: Between two heartbeats, or two ends of the section "step", where the timeouts are not so short that it must be less.
_EVERY_S = 1.0
#: So many times in the shortest timeout.
_PER_TIMEOUT = 10
#: For the monitor to answer the first time, and for the thread to end.
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
    """Under the names that NVRx's own callback uses; None: out of all sections."""
    return _SECTIONS.get(phase)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a rank monitor watches, by its configuration.

    Attributes:
        sections: that have a timeout. (NVRx 0.4.1 answers another name with an error.)
        out_of_section: the time between sections has one.
        heartbeats: they have one.
        every_s: seconds between two words of progress.
    """

    sections: frozenset[str]
    out_of_section: bool
    heartbeats: bool
    every_s: float

    @property
    def nothing(self) -> bool:
        return not (self.sections or self.out_of_section or self.heartbeats)


def watched_by(config: Any) -> Watched:
    """From NVRx's ``FaultToleranceConfig``."""
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
    """Which methods of the client are due, with their arguments.

    Args:
        opened: the section that is open.
        wanted: the one that the rank is in.
        progressed: it has ended a batch since the calls before.
    """
    target = wanted if wanted in watched.sections else None
    calls: list[tuple[str, ...]] = []
    if opened != target or (progressed and opened == "step"):  # a new time for a new step
        if opened is not None:
            calls.append(("end_section", opened))
        if target is not None:
            calls.append(("start_section", target))
    elif progressed and target is None and watched.out_of_section:
        calls.append(("end_all_sections",))  # a new time for the time between sections
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


#: Of this process, by its id; connected as long as its rank is to be watched.
_clients: dict[int, Any] = {}


class RankMonitor:
    """The way to the rank monitor. Thread: the training thread, which never waits for an answer but in ``__init__`` and
    ``close``, ten seconds each at most.

    Never raises; what fails is logged once, and the monitor is told nothing any more.

    Args:
        make: makes the client, in this thread (an import must not run in another one while workers are forked).

    Raises:
        ConfigError: from ``make``.
    """

    def __init__(self, make: Callable[[], Any] = make_client) -> None:
        known = _clients.get(os.getpid())
        self._client: Any = make() if known is None else known
        self._wanted: str | None = None
        self._progress = 0
        self._closing = self._shutdown = False
        #: There is something to say; it is due at once; the first answer has come.
        self._news, self._urgent, self._ready = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="resiliency-rank-monitor", daemon=True)
        self._thread.start()
        if not self._ready.wait(_DEADLINE.total_seconds()):
            logger.warning("NVRx's rank monitor has not answered for %.0f s", _DEADLINE.total_seconds())

    def enter(self, section: str | None) -> None:
        """The rank is in this section from now on. Blocks: no."""
        if section != self._wanted:
            self._wanted = section
            self._urgent.set()
            self._news.set()

    def progressed(self) -> None:
        """The rank has ended a batch. Blocks: no."""
        self._progress += 1
        if not self._news.is_set():
            self._news.set()

    def close(self, *, shutdown: bool) -> None:
        """Ends what is open. Idempotent.

        Args:
            shutdown: the monitor watches this rank no longer; otherwise it does, until the process has ended.
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
        except Exception as error:  # Boundary: of another library's client. Training goes on.
            logger.warning(
                "NVRx's rank monitor is told nothing any more, and may take this rank for hung: %s: %s",
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
