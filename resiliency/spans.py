"""Spans: timed pieces of work of one thread, recorded while somebody traces them.

Times are nanoseconds of the monotonic clock, which all processes of a host share. While nobody traces, :func:`traced`
and :meth:`Spans.span` return one object that does nothing, and no clock is read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Recorder", "Span", "Spans", "traced"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work.

    Attributes:
        name: of the work.
        began_ns, ended_ns: nanoseconds of the monotonic clock.
        pid, thread, thread_name: of the thread that did the work; ``thread`` is the kernel's id.
        facts: shown together with the span.
    """

    name: str
    began_ns: int
    ended_ns: int
    pid: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_native_id)
    thread_name: str = field(default_factory=lambda: threading.current_thread().name)
    facts: dict[str, Any] = field(default_factory=dict)


class Recorder(Protocol):
    """Receives spans. Thread: any. Must not block and must not raise."""

    def add(self, span: Span) -> None: ...


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_NOTHING = _Nothing()


class _Running:
    """Work in progress. An exception in it is noted in the span, and propagates."""

    def __init__(self, take: Callable[[Span], None], name: str, facts: dict[str, Any]) -> None:
        self._take, self._name, self._facts = take, name, facts
        self._began_ns = 0

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ns = time.monotonic_ns()
        facts = self._facts if kind is None else {**self._facts, "error": f"{kind.__name__}: {error}"}
        self._take(Span(name=self._name, began_ns=self._began_ns, ended_ns=ended_ns, facts=facts))


def traced(recorder: Recorder | None, name: str, **facts: Any) -> AbstractContextManager[None]:
    """Records the block as a span; does nothing without a recorder."""
    return _NOTHING if recorder is None else _Running(recorder.add, name, facts)


class Spans:
    """Recorders by what they trace (a key, such as a save). Thread: any."""

    def __init__(self) -> None:
        self._recorders: dict[Hashable, Recorder] = {}  # replaced, never changed: readers need no lock

    def open(self, key: Hashable, recorder: Recorder) -> None:
        """From now on records spans about ``key`` with this recorder."""
        self._recorders = {**self._recorders, key: recorder}

    def close(self, key: Hashable) -> None:
        """Stops recording spans about ``key``. Idempotent."""
        self._recorders = {other: recorder for other, recorder in self._recorders.items() if other != key}

    def span(self, name: str, key: Hashable | None = None, **facts: Any) -> AbstractContextManager[None]:
        """Records the block as a span about ``key``; None: for every recorder that is open now."""
        recorders = self._recorders
        if not recorders or (key is not None and key not in recorders):
            return _NOTHING
        chosen = list(recorders.values()) if key is None else [recorders[key]]

        def take(span: Span) -> None:
            for recorder in chosen:
                recorder.add(span)

        return _Running(take, name, facts)
