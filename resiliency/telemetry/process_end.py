"""Writes the last event of a process when its interpreter ends, because what a rank does after its fit is time of the
job, too."""

from __future__ import annotations

import atexit
import os

from resiliency.events import Event, EventKind, EventWriter, JsonlSink
from resiliency.settings import environment

__all__ = ["tell_end"]

#: Paths of this process's logs, each with the event that is written at the end.
_logs: dict[str, Event] = {}
_pid = 0


def tell_end(path: str | os.PathLike[str], writer: EventWriter) -> None:
    """Has ``process_ended`` written to the log at ``path`` when this process ends. The latest call for a log counts.

    Does nothing when no launcher has started the process, because a notebook may go on for days. Blocks: no.
    """
    global _pid
    if not environment().launch.job:
        return
    if _pid != os.getpid():  # a forked child inherits the paths and atexit functions of its parent
        _logs.clear()
        _pid = os.getpid()
        atexit.register(_write)
    _logs[os.fspath(path)] = Event(
        kind=EventKind.PROCESS_ENDED,
        time=0.0,
        monotonic_s=0.0,
        run=writer.run,
        attempt=writer.attempt,
        rank=writer.rank,
        host=writer.host,
        fields={"pid": os.getpid()},
    )


def _write() -> None:
    if _pid != os.getpid():
        return
    logs = dict(_logs)
    _logs.clear()
    for path, event in logs.items():
        if os.path.exists(path):  # else the folder was deleted, and must not be made again
            sink = JsonlSink(path)
            sink.emit(event.at_once())
            sink.close()
