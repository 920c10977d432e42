"""Notices that the machine was told to go: by a file, or by the metadata server of Google's cloud."""

from __future__ import annotations

import os

from resiliency.monitor.watchdogs.base import Finding, Watchdog
from resiliency.preemption.sources import METADATA_KEYS, UnheardKeys, metadata_address, notices_of

__all__ = ["NoticeWatchdog"]


class NoticeWatchdog(Watchdog):
    """Takes the host out while the notice stands, because ranks that save and leave would be started there again, and
    leave again. When a maintenance is over, or the file is removed, the host can have ranks again.

    Args:
        file: path that exists while the host is to go; "": none.
        metadata_server: its address; "auto": Google's, on a machine of Google's; "": none.
    """

    name = "notice"
    interval_s = 2.0
    deadline_s = 10.0
    cooldown_s = 60.0

    def __init__(self, file: str = "", metadata_server: str = "auto") -> None:
        self._file, self._server = file, metadata_address(metadata_server)
        self._unheard = UnheardKeys(self._server or "")

    def look(self) -> list[Finding]:
        words = [f"the file {self._file}"] if self._file and os.path.lexists(self._file) else []
        return [Finding(code=word, detail=f"the machine is told to go: {word}") for word in (*words, *self._ask())]

    def _ask(self) -> list[str]:
        if self._server is None:
            return []
        said, failed = notices_of(self._server)  # as often also when it fails, because notices are short
        for key in METADATA_KEYS:
            if key in failed:
                self._unheard.failed(key, failed[key])
            else:
                self._unheard.answered(key)
        return said
