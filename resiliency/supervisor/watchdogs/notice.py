"""Notices that the machine was told to go: by a file, or by the metadata server of Google's cloud."""

from __future__ import annotations

import http.client
import logging
import os

from resiliency.preemption.sources import metadata_address, notice_of
from resiliency.supervisor.watchdogs.base import Finding, Watchdog

__all__ = ["NoticeWatchdog"]

logger = logging.getLogger(__name__)


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
        self._unheard = False

    def look(self) -> list[Finding]:
        words = [f"the file {self._file}"] if self._file and os.path.lexists(self._file) else []
        if said := self._ask():
            words.append(said)
        return [Finding(code=word, detail=f"the machine is told to go: {word}") for word in words]

    def _ask(self) -> str:
        if self._server is None:
            return ""
        try:
            said = notice_of(self._server)
        except (OSError, http.client.HTTPException) as error:
            if not self._unheard:  # it is asked as often as before, because notices are short
                logger.warning(
                    "the metadata server %s does not answer (%r): its notices are not seen", self._server, error
                )
            self._unheard = True
            return ""
        self._unheard = False
        return said
