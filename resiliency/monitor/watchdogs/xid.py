"""Watches the kernel's log: for XIDs and SXIDs, the errors that NVIDIA's drivers report, and for other lines that cost
a job its host."""

from __future__ import annotations

import logging
import re

from resiliency.monitor.watchdogs.base import Finding, Watchdog
from resiliency.monitor.watchdogs.kernel_lines import kernel_finding
from resiliency.monitor.watchdogs.kernel_log import KernelLog, open_kernel_log
from resiliency.monitor.watchdogs.sxid_codes import sxid_finding
from resiliency.monitor.watchdogs.xid_codes import XID_CODES, meaning
from resiliency.runtime.messages.observations import DeviceClass

__all__ = ["XidWatchdog", "parse_xid", "xid_finding"]

logger = logging.getLogger(__name__)

#: Matches "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", also without a text, and without
#: "PCI:" as older drivers write it. The code stands before any text that a program can influence.
_LINE = re.compile(r"\bNVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\): (\d{1,4})\b[,:]?\s*(.*)")


def parse_xid(line: str) -> tuple[str, int, str] | None:
    """Device, code and the rest of a line; None when the line is no XID."""
    found = _LINE.search(line)
    return None if found is None else (found[1].lower(), int(found[2]), found[3].strip())


def xid_finding(device: str, code: int, text: str) -> Finding:
    """The finding of an XID, with the class of its code."""
    known = meaning(code, text)
    return Finding(
        code=f"xid-{code}/{known.device_class}",  # XID 154 can have several classes
        device=device,
        device_class=known.device_class,
        detail=f"XID {code}, {known.name}: {text or '(no text)'} [{known.device_class}: {known.reason}]",
    )


class XidWatchdog(Watchdog):
    """Reads the kernel's log.

    Args:
        source: see :func:`~resiliency.monitor.watchdogs.kernel_log.open_kernel_log`.
    """

    name = "xid"
    interval_s = 1.0
    cooldown_s = 60.0
    hears_of_kills = True

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._log: KernelLog | None = None
        self._cursor = ""
        self._unknown: set[int] = set()

    def resume(self, cursor: str) -> None:
        self._cursor = cursor

    def look(self) -> list[Finding]:
        if self._log is None:
            self._log = open_kernel_log(self._source)
            self._log.resume(self._cursor)
        found: list[Finding] = []
        for line in self._log.lines():
            finding = self._finding(line)
            if finding is not None:
                found.append(finding)
        self._cursor = self._log.cursor()
        # The worst first, because further XIDs of a device are often consequences of it.
        return sorted(found, key=lambda one: -_ORDER.index(one.device_class or DeviceClass.IGNORE))

    def _finding(self, line: str) -> Finding | None:
        parsed = parse_xid(line)
        if parsed is None:
            return sxid_finding(line) or kernel_finding(line)
        device, code, text = parsed
        if code not in XID_CODES and code not in self._unknown:
            self._unknown.add(code)
            logger.warning("XID %d is not known to this version, and is ignored: %s", code, line[:300])
        return xid_finding(device, code, text)

    def cursor(self) -> str:
        return self._cursor

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


_ORDER = list(DeviceClass)
