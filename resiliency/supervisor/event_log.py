"""The supervisor's lines in a job's event log, beside those of its launchers and ranks."""

from __future__ import annotations

import os
import re

from resiliency.events import BackgroundSink, EventKind, EventWriter, JsonlSink
from resiliency.settings import environment
from resiliency.supervisor.store import HistoryEvent

__all__ = ["EventLog"]

#: Kinds that launchers write themselves, with more detail.
_NOT_OURS = frozenset({EventKind.WORKER_LOST})


class EventLog:
    """Writes the supervisor's events. Thread: the event loop's. Blocks: never; a thread writes the lines.

    Args:
        folder: where the log lies; "": nothing is written.
    """

    def __init__(self, folder: str) -> None:
        self._writer: EventWriter | None = None
        if folder:
            host = environment().node
            name = re.sub(r"[^A-Za-z0-9._-]", "_", host)
            sink = BackgroundSink(JsonlSink(os.path.join(folder, f"supervisor-{name}.jsonl")))
            self._writer = EventWriter(run="", attempt=0, rank=-1, host=host, sinks=(sink,))

    def write(self, event: HistoryEvent, generation: int) -> None:
        """Writes one event. Ignores kinds that launchers write, and events of no workload.

        Args:
            generation: of the event's workload; 0: none.
        """
        if self._writer is None or event.kind in _NOT_OURS or not event.workload:
            return
        self._writer.run, self._writer.attempt = event.workload, generation
        self._writer.emit(event.kind, text=event.text, **event.fields)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
