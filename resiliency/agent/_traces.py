"""The agent's part in tracing saves: sends the spans of its work, as they end, to the ranks that asked for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from resiliency.agent.messages import Notice, Traced, TraceEnded
from resiliency.spans import Span, Spans
from resiliency.storage.step_id import StepId

__all__ = ["Traces"]

#: Most saves traced at a time; the oldest trace is dropped, because a dead rank cannot end its trace.
_MOST = 16


class Traces:
    """Traces of saves, by step. Thread: any. ``notify`` sends a message to a rank; it must not block."""

    def __init__(self, notify: Callable[[int, Notice], None]) -> None:
        self._notify = notify
        self._spans = Spans()
        self._asked: dict[StepId, set[int]] = {}
        self._lock = threading.Lock()

    def begin(self, rank: int, step: StepId) -> None:
        """From now on spans of work for this save, and of work for no single save, are sent to the rank. Idempotent."""
        with self._lock:
            self._asked.setdefault(step, set()).add(rank)
            self._spans.open(step, _Teller(self._notify, step, self._asked[step]))
            while len(self._asked) > _MOST:
                self._forget(next(iter(self._asked)))

    def end(self, rank: int, step: StepId) -> None:
        """Ends the rank's trace of a save, and notifies the rank."""
        with self._lock:
            ranks = self._asked.get(step, set())
            ranks.discard(rank)
            if not ranks:
                self._forget(step)
        self._notify(rank, TraceEnded(id=step))

    def _forget(self, step: StepId) -> None:
        self._asked.pop(step, None)
        self._spans.close(step)

    def span(self, name: str, step: StepId | None = None, **facts: Any) -> AbstractContextManager[None]:
        """A context whose duration is one span of work for a save; without a step, for every save being traced."""
        return self._spans.span(name, step, **facts)


class _Teller:
    """Sends spans to the ranks that asked. Other threads may change ``ranks`` meanwhile."""

    def __init__(self, notify: Callable[[int, Notice], None], step: StepId, ranks: set[int]) -> None:
        self._notify, self._step, self._ranks = notify, step, ranks

    def add(self, span: Span) -> None:
        message = Traced(
            id=self._step,
            name=span.name,
            began_ns=span.began_ns,
            ended_ns=span.ended_ns,
            pid=span.pid,
            thread=span.thread,
            thread_name=span.thread_name,
            facts=span.facts,
        )
        for rank in tuple(self._ranks):
            self._notify(rank, message)
