"""Writes the last event of a process when its interpreter ends, because what a rank does after its fit, and a launcher
until torch is torn down, is time of the job, too."""

from __future__ import annotations

import atexit
import gc
import os

from resiliency.events import Event, EventKind, EventWriter, JsonlSink
from resiliency.settings import environment

__all__ = ["begin_last", "end_with", "tell_end"]

#: Paths of this process's logs, each with the event that is written at the end.
_logs: dict[str, Event] = {}
_pid = 0


def tell_end(path: str | os.PathLike[str], writer: EventWriter) -> None:
    """Has ``process_ended`` written to the log at ``path`` when this process ends. The latest call for a log counts.

    Does nothing when no launcher has started the process, because a notebook may go on for days. Blocks: no.
    """
    if environment().launch.job:
        end_with(
            os.fspath(path),
            Event(
                kind=EventKind.PROCESS_ENDED,
                time=0.0,
                monotonic_s=0.0,
                run=writer.run,
                attempt=writer.attempt,
                rank=writer.rank,
                host=writer.host,
                fields={"pid": os.getpid()},
            ),
        )


def begin_last() -> None:
    """Has the events written after all that is registered from now on: atexit calls what was registered first last."""
    global _pid
    if _pid != os.getpid():  # a forked child inherits the paths and atexit functions of its parent
        _logs.clear()
        _pid = os.getpid()
        atexit.register(_write)


def end_with(path: str, event: Event) -> None:
    """Has this event written to the log at ``path`` when this process ends, with the time of then."""
    begin_last()
    _logs[path] = event


def _write() -> None:
    if _pid != os.getpid():
        return
    logs = dict(_logs)
    _logs.clear()
    if any(event.rank < 0 for event in logs.values()):
        # Else the interpreter of a launcher searches torch's objects for garbage, for half a second of the job's time.
        gc.freeze()
    for path, event in logs.items():
        if os.path.exists(path):  # else the log was deleted, and is not made again
            sink = JsonlSink(path)
            sink.emit(event.at_once())
            sink.close()
