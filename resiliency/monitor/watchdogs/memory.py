"""Watches the memory of the host and of this process's control group, and how long tasks wait for memory."""

from __future__ import annotations

import re
from pathlib import Path

from resiliency.monitor.watchdogs.base import Finding, Watchdog

__all__ = ["MemoryWatchdog"]

_UNLIMITED = 1 << 60
_PRESSURE = re.compile(r"^full .*?avg60=([0-9.]+)", re.MULTILINE)


class MemoryWatchdog(Watchdog):
    """Too little available memory takes the host out, because the kernel would soon kill a rank. Memory pressure is
    only a warning, because the job goes on, slowly.

    Args:
        min_available_bytes: of the host, and of the control group where it has a limit.
        most_pressure: percent of the last minute in which all tasks waited for memory.
        root: root of the file system, for tests.
    """

    name = "memory"
    interval_s = 10.0
    cooldown_s = 600.0

    def __init__(self, *, min_available_bytes: int = 1 << 28, most_pressure: float = 40.0, root: str = "/") -> None:
        self._min, self._most_pressure, self._root = min_available_bytes, most_pressure, Path(root)

    def look(self) -> list[Finding]:
        found = []
        for where, available in (("the host", self._of_host()), ("the control group", self._of_group())):
            if available is not None and available < self._min:
                detail = (
                    f"{where} has {available / 2**20:.0f} MB of memory left, and {self._min / 2**20:.0f} are needed"
                )
                found.append(Finding(code=f"memory of {where}", detail=detail))
        pressure = self._pressure()
        if pressure is not None and pressure > self._most_pressure:
            detail = f"all tasks have waited for memory in {pressure:.0f} % of the last minute"
            found.append(Finding(code="pressure", detail=detail, warning=True))
        return found

    def _text(self, path: str) -> str:
        """The content of a file; "" when this kernel does not have it."""
        try:
            return (self._root / path).read_text()
        except OSError:
            return ""

    def _of_host(self) -> int | None:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", self._text("proc/meminfo"), re.MULTILINE)
        return None if found is None else int(found[1]) * 1024

    def _of_group(self) -> int | None:
        """Available bytes of this process's control group and those above it, the least of them; None without a limit.
        Pages of files that were not used lately count as available, because the kernel can free them at once."""
        least: int | None = None
        for line in self._text("proc/self/cgroup").splitlines():
            _, kinds, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
            if kinds == "":
                base, limit, used, back = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
            elif "memory" in kinds.split(","):
                base, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
                used, back = "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts) + 1):
                folder = "/".join([base, *parts[:depth]])
                left = self._left(folder, limit, used, back)
                if left is not None and (least is None or left < least):
                    least = left
        return least

    def _left(self, folder: str, limit: str, used: str, back: str) -> int | None:
        most, now = self._text(f"{folder}/{limit}").strip(), self._text(f"{folder}/{used}").strip()
        if not most.isdecimal() or not now.isdecimal() or int(most) >= _UNLIMITED:
            return None
        found = re.search(rf"^{back} (\d+)", self._text(f"{folder}/memory.stat"), re.MULTILINE)
        return int(most) - int(now) + (int(found[1]) if found is not None else 0)

    def _pressure(self) -> float | None:
        found = _PRESSURE.search(self._text("proc/pressure/memory"))
        return None if found is None else float(found[1])
