"""The launcher's lines in the event log of the job that it runs.

Where that log is, and which attempt it is, a rank tells: it lies below the job's checkpoints. What happens before is
kept until then.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import socket
import time
from contextlib import suppress
from typing import Any

from resiliency.events import Event, EventKind, JsonlSink, boot_id, boot_seconds
from resiliency.launch.channel import send
from resiliency.launch.start_times import process_age_s
from resiliency.settings import LAUNCHER_VARIABLE, all_variables, environment

__all__ = ["JobLog", "tell_launcher"]

logger = logging.getLogger(__name__)

#: A job whose ranks never tell is one without a log.
_MOST_KEPT = 1000
#: Logs of launchers of this process that have ended, with what their last event says.
_ends: dict[str, Event] = {}
_pid = 0


class JobLog:
    """Writes ``launcher-HOST.jsonl``. Thread: one. Never raises.

    After ``launcher_ended`` the interpreter goes on for a second or so, to let go of torch: ``process_ended`` is the
    last that it does.
    """

    def __init__(self) -> None:
        _tell_end_of_process()
        self._host = environment().node
        self._sink: JsonlSink | None = None
        self._run, self._attempt = "", 0
        self._kept: list[Event] = []

    def is_at(self, folder: str, *, run: str, attempt: int) -> None:
        """A rank has told where the log is, and which attempt has begun."""
        path = os.path.join(folder, f"launcher-{self._host}.jsonl")
        if self._sink is None or self._sink.path != path:
            self.close()
            self._sink = JsonlSink(path)
        self._run, self._attempt = run, attempt
        for event in self._kept:
            self._sink.emit(dataclasses.replace(event, run=run, attempt=attempt))
        self._kept.clear()

    def emit(self, kind: str, **fields: Any) -> None:
        """Something happened in, or after, the attempt that was told last."""
        if kind == EventKind.LAUNCHER_STARTED:  # its imports were time of the job, too
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
                _ends[self._sink.path] = dataclasses.replace(event, kind=EventKind.PROCESS_ENDED, fields={})
        elif len(self._kept) < _MOST_KEPT:
            self._kept.append(event)

    def close(self) -> None:
        """Idempotent."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


def _tell_end_of_process() -> None:
    """At the end of this process, as late as Python allows: what was registered first is called last."""
    global _pid
    if _pid != os.getpid():  # a forked child has the functions of its parent, too
        _ends.clear()
        _pid = os.getpid()
        atexit.register(_write_ends)


def _write_ends() -> None:
    if _pid != os.getpid():
        return
    ends = dict(_ends)
    _ends.clear()
    if ends:
        # The interpreter would look for garbage among all that torch has made, for half a second of the job's time.
        gc.freeze()
    for path, event in ends.items():
        if os.path.exists(path):  # else the folder was deleted, and stays so
            sink = JsonlSink(path)
            sink.emit(event.at_once())
            sink.close()


def tell_launcher(folder: str, *, run: str, attempt: int) -> None:
    """Tells the launcher of this rank where the job's event log is. Does nothing where there is none. Blocks: no."""
    address = all_variables().get(LAUNCHER_VARIABLE, "")
    if not address:
        return
    message = {"kind": "log", "number": 0, "folder": os.path.abspath(folder), "run": run, "attempt": attempt}
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + address)
        send(connection, message)
