"""``RankMonitorClientDouble``: stands in for NVRx's ``RankMonitorClient``, and is as strict about the order of
calls."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["RankMonitorClientDouble"]


class RankMonitorClientDouble:
    """Behaves like the client and monitor of NVRx 0.4.1: each call before ``init_workload_monitoring`` and after
    ``shutdown_workload_monitoring`` is an error; a section may be opened only once and closed only when it is open, and
    its name must be one with a timeout.

    Thread: one, as for the client; ``calls`` may be read from any.

    Attributes:
        calls: the calls that were made, with their arguments.
        open: open sections, in the order they were opened.
        errors: the calls that raised, as text.
        threads: names of the threads that called.

    Args:
        config: of the monitor, with the fields of NVRx's ``FaultToleranceConfig``.
        seconds: duration of each call.
        fails_at: name of a method that raises; "": none.
    """

    def __init__(self, config: Any, *, seconds: float = 0.0, fails_at: str = "") -> None:
        self.cfg: Any = None
        self.calls: list[tuple[str, ...]] = []
        self.open: list[str] = []
        self.errors: list[str] = []
        self.threads: set[str] = set()
        self._config, self._seconds, self._fails_at = config, seconds, fails_at

    @property
    def names(self) -> list[str]:
        """Names of the methods that were called, in order."""
        return [call[0] for call in self.calls]

    def _called(self, *call: str, right: bool) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)
        threading.Event().wait(self._seconds)
        if not right or call[0] == self._fails_at:
            self.errors.append(" ".join(call))
            raise RuntimeError(f"RankMonitorClientError: {' '.join(call)}")

    def init_workload_monitoring(self) -> None:
        self._called("init_workload_monitoring", right=self.cfg is None)
        self.cfg = self._config

    def shutdown_workload_monitoring(self) -> None:
        self._called("shutdown_workload_monitoring", right=self.cfg is not None)
        self.cfg = None

    def send_heartbeat(self) -> None:
        self._called("send_heartbeat", right=self.cfg is not None)

    def start_section(self, section: str) -> None:
        known = self.cfg is not None and section in self.cfg.rank_section_timeouts
        self._called("start_section", section, right=known and section not in self.open)
        self.open.append(section)

    def end_section(self, section: str) -> None:
        self._called("end_section", section, right=self.cfg is not None and section in self.open)
        self.open.remove(section)

    def end_all_sections(self) -> None:
        self._called("end_all_sections", right=self.cfg is not None)
        self.open.clear()
