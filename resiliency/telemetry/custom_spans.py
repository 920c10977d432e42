"""Spans: work that a script names itself, an evaluation or a check of the data, for the report and its time line.

``with span("evaluation"): ...`` writes when it begins and when it ends, beside the steps, into the event log of this
process. Spans that come before the log is open are kept until it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resiliency.events import Event, EventKind, EventWriter, JsonlSink, boot_seconds

__all__ = ["span", "spans_go_to"]

#: Most events that are kept until a log is open; a process that never opens one does not write them.
_MOST_KEPT = 256
MOST_NAME = 80


class _Log:
    """Where the spans of this process go. Thread: any."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._sink: JsonlSink | None = None
        self._run, self._attempt, self._rank, self._host = "", 0, 0, ""
        self._kept: list[tuple[str, float, float, dict[str, object]]] = []

    def is_at(self, path: str, writer: EventWriter) -> None:
        with self._lock:
            self._run, self._attempt, self._rank, self._host = writer.run, writer.attempt, writer.rank, writer.host
            if self._sink is None or self._sink.path != path:
                if self._sink is not None:
                    self._sink.close()
                self._sink = JsonlSink(path)
            kept, self._kept = self._kept, []
            for one in kept:
                self._emit(*one)

    def tell(self, kind: str, **fields: object) -> None:
        with self._lock:
            if self._sink is not None:
                self._emit(kind, time.time(), boot_seconds(), fields)
            elif len(self._kept) < _MOST_KEPT:
                self._kept.append((kind, time.time(), boot_seconds(), fields))

    def _emit(self, kind: str, moment: float, monotonic_s: float, fields: dict[str, object]) -> None:
        assert self._sink is not None
        self._sink.emit(
            Event(
                kind=kind,
                time=moment,
                monotonic_s=monotonic_s,
                run=self._run,
                attempt=self._attempt,
                rank=self._rank,
                host=self._host,
                fields=fields,
            )
        )


_log: _Log | None = None


def _own() -> _Log:
    """The :class:`_Log` of this process; a forked child gets a new one."""
    global _log
    if _log is None or _log.pid != os.getpid():
        _log = _Log()
    return _log


def spans_go_to(path: str | os.PathLike[str], writer: EventWriter) -> None:
    """From now on writes the spans of this process, the kept ones first, to the log at ``path``, as events of the run,
    attempt and rank of ``writer``. The latest call counts. Blocks: no."""
    _own().is_at(os.fspath(path), writer)


@contextmanager
def span(name: str, *, writer: EventWriter | None = None) -> Iterator[None]:
    """Names a piece of work, which the report lists and its time line shows. A span has no bucket of its own: its time
    still counts as loop overhead between two batches, and as a part of the start before the first one.

    Thread: any; spans may lie within each other. Costs two lines in the log, some tens of microseconds each. Never
    raises by itself, and works without a log. A span whose process is killed is shown up to the end of the log.

    Args:
        name: spans of the same name are summed up; the first 80 characters count.
        writer: writes its events; None: they go to the log that a callback or checkpointer of this library has opened
            in this process, or will open.
    """
    name = str(name)[:MOST_NAME]  # a number, or a member of an enum: no reason to end a training
    began = time.perf_counter()
    _write(writer, EventKind.SPAN_STARTED, span=name)
    try:
        yield
    finally:
        _write(writer, EventKind.SPAN_ENDED, span=name, span_s=round(time.perf_counter() - began, 6))


def _write(writer: EventWriter | None, kind: str, **fields: Any) -> None:
    if writer is not None:
        writer.emit(kind, **fields)
    else:
        _own().tell(kind, **fields)
