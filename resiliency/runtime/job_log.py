"""Writes the launcher's events into the event log of the job that it runs.

The log lies below the job's checkpoints, so only a rank knows its folder and the number of the attempt, and tells the
launcher. Events from before that are kept in memory until then.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from contextlib import suppress
from typing import Any

from resiliency.events import Event, EventKind, JsonlSink, boot_id, boot_seconds
from resiliency.runtime.channel import send
from resiliency.runtime.process_end import begin_last, end_with
from resiliency.runtime.start_times import process_age_s
from resiliency.settings import LAUNCHER_VARIABLE, all_variables, environment

__all__ = ["JobLog", "tell_launcher"]

logger = logging.getLogger(__name__)

#: Most events kept in memory; a job whose ranks never name a folder has no log.
_MOST_KEPT = 1000


class JobLog:
    """Writes ``launcher-HOST.jsonl``. Thread: one. Never raises.

    After ``launcher_ended`` the interpreter runs on for a second or so, to tear down torch; the last event that it
    writes is ``process_ended``.
    """

    def __init__(self) -> None:
        begin_last()
        self._host = environment().node
        self._sink: JsonlSink | None = None
        self._run, self._attempt = "", 0
        self._kept: list[Event] = []

    def is_at(self, folder: str, *, run: str, attempt: int) -> None:
        """Sets the log's folder, and the run and attempt of the following events; a rank has reported them."""
        path = os.path.join(folder, f"launcher-{self._host}.jsonl")
        if self._sink is None or self._sink.path != path:
            self.close()
            self._sink = JsonlSink(path)
        self._run, self._attempt = run, attempt
        for event in self._kept:
            self._sink.emit(dataclasses.replace(event, run=run, attempt=attempt))
        self._kept.clear()

    def emit(self, kind: str, **fields: Any) -> None:
        """Writes an event under the attempt reported last, or keeps it until a folder is known."""
        if kind == EventKind.LAUNCHER_STARTED:  # the launcher's imports were time of the job, too
            fields.setdefault("since_process_s", round(process_age_s(), 6))
            fields.setdefault("boot", boot_id())
        event = Event(
            kind=kind,
            time=time.time(),
            monotonic_s=boot_seconds(),
            run=self._run,
            attempt=self._attempt,
            rank=-1,
            host=self._host,
            fields=fields,
        )
        if self._sink is not None:
            self._sink.emit(event)
            if kind == EventKind.LAUNCHER_ENDED:
                end_with(self._sink.path, dataclasses.replace(event, kind=EventKind.PROCESS_ENDED, fields={}))
        elif len(self._kept) < _MOST_KEPT:
            self._kept.append(event)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


def tell_launcher(folder: str, *, run: str, attempt: int) -> None:
    """Called in a rank: tells its launcher the folder of the job's event log. Does nothing without a launcher. Blocks:
    no."""
    address = all_variables().get(LAUNCHER_VARIABLE, "")
    if not address:
        return
    message = {"kind": "log", "number": 0, "folder": os.path.abspath(folder), "run": run, "attempt": attempt}
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + address)
        send(connection, message)
