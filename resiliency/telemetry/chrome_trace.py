"""Traces of saves as JSON in the Chrome trace event format, which Perfetto and ``chrome://tracing`` open.

Times are microseconds of the host's monotonic clock. Pieces of work are complete events (``ph`` "X"), moments are
instants ("i"), names of processes and threads are metadata ("M").
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resiliency.telemetry.text_file import replace_text

__all__ = ["TraceEvents", "TraceFiles", "trace_document"]

#: Number of steps whose events are kept, so that another save of the same step can be added to its file.
_KEPT_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class TraceEvents:
    """The events of one traced save.

    Attributes:
        spans: (name, begin, end, pid, thread, facts), in nanoseconds.
        moments: (name, time, pid, thread, facts), in nanoseconds.
        processes: names by pid.
        threads: names by (pid, thread).
        facts: facts about the save.
    """

    spans: Sequence[tuple[str, int, int, int, int, Mapping[str, Any]]]
    moments: Sequence[tuple[str, int, int, int, Mapping[str, Any]]]
    processes: Mapping[int, str]
    threads: Mapping[tuple[int, int], str]
    facts: Mapping[str, Any] = field(default_factory=dict)


def trace_document(saves: Iterable[TraceEvents]) -> dict[str, Any]:
    """One JSON document of the traces of all ``saves``."""
    names: dict[tuple[int, int | None], dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    facts = []
    for save in saves:
        facts.append(dict(save.facts))
        for pid, name in save.processes.items():
            names[pid, None] = {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for (pid, thread), name in save.threads.items():
            named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}}
            names[pid, thread] = named
        for name, began, ended, pid, thread, more in save.spans:
            times = {"ts": began / 1000, "dur": max(0, ended - began) / 1000}
            events.append({"ph": "X", "name": name, "cat": "save", **times, "pid": pid, "tid": thread, "args": more})
        for name, at, pid, thread, more in save.moments:
            where = {"ts": at / 1000, "pid": pid, "tid": thread}
            events.append({"ph": "i", "name": name, "cat": "save", "s": "p", **where, "args": more})
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": [*names.values(), *events], "displayTimeUnit": "ms", "otherData": {"saves": facts}}


class TraceFiles:
    """Writes the traces of one rank, one file a step: ``ckpt_rank{r}_step{n}_trace.json``.

    Several saves of one step share a file; the file of an earlier start is replaced. No reader sees a half written
    file. Thread: any.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._steps: dict[int, list[TraceEvents]] = {}
        self._lock = threading.Lock()

    def path(self, step: int) -> str:
        return os.path.join(self.folder, f"ckpt_rank{self._rank}_step{step}_trace.json")

    def write(self, step: int, save: TraceEvents) -> str:
        """Adds a save to the file of its step. Returns the path of the file.

        Raises:
            OSError: it cannot be written; a file that was there is unchanged.
        """
        with self._lock:
            saves = self._steps.setdefault(step, [])
            saves.append(save)
            while len(self._steps) > _KEPT_STEPS:
                del self._steps[next(iter(self._steps))]
            path = self.path(step)
            os.makedirs(self.folder, exist_ok=True)
            replace_text(path, json.dumps(trace_document(saves), default=str))
            return path
