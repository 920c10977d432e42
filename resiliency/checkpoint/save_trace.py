"""Collects the spans of one save on one rank, from the call of ``save`` until it has reached the last of its tiers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from resiliency.agent.client import AgentClient
from resiliency.agent.messages import Committed, Durable, Failed, Notice, Trace, Traced, TraceEnded
from resiliency.checkpoint.ticket import LOCAL
from resiliency.spans import Span, traced
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = ["FinishedTrace", "Instant", "SaveTrace"]

logger = logging.getLogger(__name__)

#: Seconds that the agent may take to send its remaining spans.
_LAST_WORDS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Instant:
    """Something that happened at one time; fields as in :class:`Span`."""

    name: str
    at_ns: int
    pid: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_native_id)
    thread_name: str = field(default_factory=lambda: threading.current_thread().name)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinishedTrace:
    """What a trace has collected.

    Attributes:
        step, rank, pid: of the save.
        spans, moments: from the trainer and the agent.
        outcome: "complete", or the reason why the trace is incomplete.
    """

    step: int
    rank: int
    pid: int
    spans: tuple[Span, ...]
    moments: tuple[Instant, ...]
    outcome: str


class SaveTrace:
    """The trace of one save; pass it to :meth:`Checkpointer.save`.

    A trace is over when the save has reached the last stage on each of its tiers, when the save has failed, after
    ``timeout_s``, or when the checkpointer is closed. Then ``write`` is called on the thread ``resiliency-trace``,
    which lives as long as the trace. Nothing but :meth:`close` waits for it.

    Threads: any.

    Args:
        step, rank: of the save.
        write: called once, with what was collected; its exceptions are logged.
        timeout_s: seconds after which the trace is written, complete or not.
    """

    def __init__(self, *, step: int, rank: int, write: Callable[[FinishedTrace], None], timeout_s: float) -> None:
        self._step, self._rank, self._write, self._timeout_s = step, rank, write, timeout_s
        self._lock = threading.RLock()  # entered in native code, see resiliency.agent.client
        self._changed = threading.Condition(self._lock)
        self._spans: list[Span] = []
        self._moments: list[Instant] = []
        self._awaited: dict[str, Stage] | None = None  # last stage of each tier not done yet; None: not begun
        self._outcome = ""  # "" until the trace is over
        self._last_words = False
        self._client: AgentClient | None = None
        self._id: StepId | None = None
        self._sealed: tuple[int, int, str] | None = None  # monotonic time in ns, id and name of the sealing thread
        self._began_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="resiliency-trace", daemon=True)
        self._thread.start()

    # -- while the save runs --------------------------------------------------------------------------------------

    def add(self, span: Span) -> None:
        """Adds a span of work. Blocks: no."""
        with self._lock:
            self._spans.append(span)

    def follow(self, client: AgentClient, save: StepId, stages: Mapping[str, Stage]) -> None:
        """Also collects the agent's work, until the save has reached the given stage on each tier. Blocks: no."""
        with self._lock:
            self._client, self._id, self._awaited = client, save, dict(stages)
        client.trace(save, self._take)

    def sealed(self) -> None:
        """Call on the thread that reports the written shard to the agent; from then on the save waits for its
        commit."""
        thread = threading.current_thread()
        with self._lock:
            self._sealed = (time.monotonic_ns(), threading.get_native_id(), thread.name)

    def end(self, reason: str) -> None:
        """Ends the trace: the save has failed, or nobody waits for it any more. Idempotent. Blocks: no."""
        with self._lock:
            if not self._outcome:
                self._moments.append(Instant(name="ended", at_ns=time.monotonic_ns(), facts={"reason": reason}))
                self._outcome = reason
                self._changed.notify_all()

    @property
    def written(self) -> bool:
        """True when the trace is over and its thread has ended."""
        return not self._thread.is_alive()

    def close(self, *, timeout_s: float, patience_s: float = 0.0) -> None:
        """Ends the trace, and waits until it is written. Idempotent.

        Blocks: first up to ``patience_s`` for the save to reach its end, because another rank may be a moment behind;
            then up to ``timeout_s``.
        """
        with self._lock:
            self._changed.wait_for(lambda: bool(self._outcome), patience_s)
        self.end("the checkpointer was closed before the save had reached all its tiers")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the trace of step %d is still being written after %.0f s", self._step, timeout_s)

    def _take(self, message: Notice) -> None:
        """Handles each message of the agent about this save. Called on the receiving thread, which holds the client's
        lock."""
        now = time.monotonic_ns()
        with self._lock:
            if isinstance(message, Traced):
                self._spans.append(
                    Span(
                        name=message.name,
                        began_ns=message.began_ns,
                        ended_ns=message.ended_ns,
                        pid=message.pid,
                        thread=message.thread,
                        thread_name=message.thread_name,
                        facts=dict(message.facts),
                    )
                )
            elif isinstance(message, TraceEnded):
                self._last_words = True
            elif isinstance(message, (Committed, Durable)):
                self._reached(message, now)
            elif isinstance(message, Failed) and not message.retrying:
                facts = {"tier": message.tier, "reason": message.reason}
                self._moments.append(Instant(name="failed", at_ns=now, facts=facts))
                self._over(message.tier, f"failed on {message.tier}: {message.reason}")
            self._changed.notify_all()

    def _reached(self, message: Committed | Durable, now: int) -> None:
        stage = Stage.COMMITTED if isinstance(message, Committed) else Stage.DURABLE
        self._moments.append(Instant(name=str(stage), at_ns=now, facts={"tier": message.tier}))
        if message.tier == LOCAL and stage is Stage.COMMITTED:
            self._add_wait(now)
        awaited = self._awaited or {}
        if awaited.get(message.tier, None) is stage:
            self._over(message.tier, "")

    def _over(self, tier: str, failure: str) -> None:
        """Notes that a tier is done. The trace is over when all tiers are, or when the local one has failed."""
        if self._awaited is None or self._outcome:
            return
        self._awaited.pop(tier, None)
        if failure and tier == LOCAL:
            self._outcome = failure
        elif not self._awaited:
            self._outcome = failure or self._failed_before() or "complete"

    def _failed_before(self) -> str:
        failed = [moment.facts for moment in self._moments if moment.name == "failed"]
        return f"failed on {failed[0]['tier']}: {failed[0]['reason']}" if failed else ""

    def _add_wait(self, now: int) -> None:
        if self._sealed is not None:
            began, thread, name = self._sealed
            self._sealed = None
            self._spans.append(
                Span(name="waiting for commit", began_ns=began, ended_ns=now, thread=thread, thread_name=name)
            )

    # -- the end --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with traced(self, f"checkpoint of step {self._step}"):
            with self._lock:
                self._changed.wait_for(lambda: bool(self._outcome), self._timeout_s)
                client, save = self._client, self._id
            if client is not None and save is not None:
                client.send(Trace(id=save, end=True))
                with self._lock:
                    self._changed.wait_for(lambda: self._last_words, _LAST_WORDS_S)
                client.stop_tracing(save)
            with self._lock:
                self._add_wait(time.monotonic_ns())  # for a save that was not committed
        with self._lock:
            outcome = self._outcome or f"not everything was done within {self._timeout_s:.0f} s"
            finished = FinishedTrace(
                step=self._step,
                rank=self._rank,
                pid=os.getpid(),
                spans=tuple(self._spans),
                moments=tuple(self._moments),
                outcome=outcome,
            )
        try:
            self._write(finished)
        except Exception:  # Boundary: a failing trace must not disturb the training.
            logger.warning("the trace of step %d could not be written", self._step, exc_info=True)
