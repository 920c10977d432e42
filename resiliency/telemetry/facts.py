"""What is kept of an event log: segments (one rank in one attempt), marks, checkpoint counts. Pure.

Its size is bounded by ranks x attempts, not by the number of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resiliency.telemetry.segment import Segment
from resiliency.telemetry.utc_stamps import parse_stamp

__all__ = ["CheckpointTier", "Mark", "RunFacts", "Segment", "parse_stamp"]

MAX_MARKS = 20_000
MAX_SAVES = 4_096


@dataclass(frozen=True)
class Mark:
    """A rare event that a report lists. ``time`` in UTC seconds, ``rank`` is the rank it is about."""

    time: float
    kind: str
    rank: int | None = None
    host: str = ""
    attempt: int | None = None
    step: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    #: The process that wrote it, by whose clock ``time`` is.
    by: Segment | None = field(default=None, compare=False, repr=False)


@dataclass
class CheckpointTier:
    """Counts for one tier. ``saved`` counts per emitter, because all ranks or only one may report a step."""

    saved: Counter[str] = field(default_factory=Counter)
    durable: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    skipped: int = 0
    corrupt: int = 0
    repaired: int = 0
    deleted: int = 0
    bytes: int = 0
    durable_s: float = 0.0
    durable_max_s: float = 0.0
    durable_n: int = 0
    restore_s: float = 0.0
    restore_n: int = 0
    last_step: int = -1


@dataclass
class RunFacts:
    """Everything kept about one run (one ``job_name``)."""

    name: str
    segments: list[Segment] = field(default_factory=list)
    #: Launchers of the older library log per node and attempt; used when no rank logs.
    nodes: list[Segment] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    tiers: dict[str, CheckpointTier] = field(default_factory=dict)
    #: (time, step) of checkpoints, thinned out evenly when there are very many.
    saves: list[tuple[float, int]] = field(default_factory=list)
    loads: list[tuple[float, int]] = field(default_factory=list)
    #: By host and attempt: the processes without a rank (launchers, agents), all in one.
    others: dict[tuple[str, int | None], Segment] = field(default_factory=dict)
    #: Times of the first ``user_scheduled`` and the last ``user_terminated``.
    scheduled: float | None = None
    terminated: float | None = None
    events: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    quality: Counter[str] = field(default_factory=Counter)
    gpus_per_rank: int = 1
    #: Names of the supervisor's workload that its ranks tell.
    workloads: set[str] = field(default_factory=set)

    @property
    def device(self) -> str:
        """The device its ranks compute on, "cuda" or "cpu"; "" when no rank tells it, or they differ."""
        told = {segment.device for segment in self.segments if segment.device}
        return told.pop() if len(told) == 1 else ""

    def tier(self, name: str) -> CheckpointTier:
        kept = self.tiers.get(name)
        if kept is None:
            if len(self.tiers) >= 64:  # a faulty writer could send an unlimited number of names
                name = "other"
            kept = self.tiers.setdefault(name, CheckpointTier())
        return kept

    def mark(self, mark: Mark) -> None:
        if len(self.marks) < MAX_MARKS:
            self.marks.append(mark)
        else:
            self.quality["marks_dropped"] += 1

    @property
    def processes(self) -> Sequence[Segment]:
        """All that wrote to the log."""
        return (*self.segments, *self.nodes, *self.others.values())

    @property
    def bounds(self) -> tuple[float, float] | None:
        """First and last moment that the log tells of; None without one."""
        ends = [(one.start, one.end, one.earliest, one.latest) for one in self.processes]
        times = [time for some in ends for time in some if time is not None]
        times += [mark.time for mark in self.marks]
        times += [time for time in (self.scheduled, self.terminated) if time is not None]
        return (min(times), max(times)) if times else None

    def saved(self, time: float, step: int) -> None:
        self.saves.append((time, step))
        if len(self.saves) > MAX_SAVES:
            # Keep the first, the last and every second one, so that the time between saves stays known.
            self.saves = self.saves[:1] + self.saves[1:-1:2] + self.saves[-1:]
