"""The last event of a process, written when its interpreter ends: what a rank does after its fit is time of the job."""

from __future__ import annotations

import atexit
import os

from resiliency.events import Event, EventKind, EventWriter, JsonlSink
from resiliency.settings import environment

__all__ = ["tell_end"]

#: Logs of this process, with what their last event says.
_logs: dict[str, Event] = {}
_pid = 0


def tell_end(path: str | os.PathLike[str], writer: EventWriter) -> None:
    """At the end of this process the log at ``path`` gets ``process_ended``. The latest call for a log counts.

    Does nothing where no launcher has started the process: a notebook may go on for days. Blocks: no.
    """
    global _pid
    if not environment().launch.job:
        return
    if _pid != os.getpid():  # a forked child has the functions of its parent, too
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
        if os.path.exists(path):  # else the folder was deleted, and stays so
            sink = JsonlSink(path)
            sink.emit(event.at_once())
            sink.close()
