"""The agent's part of the traces of saves: sends the spans of its work to the ranks that asked, as they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from resiliency.agent.messages import Notice, Traced, TraceEnded
from resiliency.spans import Span, Spans
from resiliency.storage.step_id import StepId

__all__ = ["Traces"]

#: A rank that has died cannot say that its trace is over: the oldest ends.
_MOST = 16


class Traces:
    """Thread: any. ``notify`` sends a message to a rank; it must not block."""

    def __init__(self, notify: Callable[[int, Notice], None]) -> None:
        self._notify = notify
        self._spans = Spans()
        self._asked: dict[StepId, set[int]] = {}
        self._lock = threading.Lock()

    def begin(self, rank: int, step: StepId) -> None:
        """From here on work for this save, and work between saves, is told to the rank. Idempotent."""
        with self._lock:
            self._asked.setdefault(step, set()).add(rank)
            self._spans.open(step, _Teller(self._notify, step, self._asked[step]))
            while len(self._asked) > _MOST:
                self._forget(next(iter(self._asked)))

    def end(self, rank: int, step: StepId) -> None:
        """Ends it, and says so."""
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
        """A piece of work for a save; None: for whichever are traced."""
        return self._spans.span(name, step, **facts)


class _Teller:
    """Sends spans to the ranks that asked. ``ranks`` may change meanwhile."""

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
