"""Groups segments into attempts of the job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from resiliency.telemetry.facts import Segment

__all__ = ["Attempt", "cluster"]

#: Ranks that start up to this many seconds apart may still be of one attempt (image pulls, queueing).
START_SPREAD_S = 600.0
#: A larger world size is an error in the log.
MAX_RANKS = 1_000_000


@dataclass
class Attempt:
    """One start of the job: its segments by lane, in order of time (a lane has several when a rank rejoined)."""

    number: int | None
    lanes: dict[int, list[Segment]] = field(default_factory=dict)

    def add(self, segment: Segment) -> None:
        self.lanes.setdefault(segment.lane, []).append(segment)

    @property
    def segments(self) -> Iterable[Segment]:
        return (segment for pieces in self.lanes.values() for segment in pieces)

    @property
    def start(self) -> float:
        return min(_start(segment) for segment in self.segments)

    @property
    def end(self) -> float:
        return max(segment.end or 0.0 for segment in self.segments)

    @property
    def world(self) -> int:
        """Number of ranks that the trainers logged, the largest one when it changed; 0 when they did not."""
        logged = [size for one in self.segments for size in (one.world, one.world_before) if size]
        return min(max(logged, default=0), MAX_RANKS)


def _start(segment: Segment) -> float:
    return segment.start or 0.0


def cluster(segments: Sequence[Segment]) -> list[Attempt]:
    """Groups segments into attempts, ordered by start.

    Segments of one attempt carry one attempt number, start together or overlap, and hold each lane once. A lane that
    appears twice under one number begins a new attempt (the numbers started over), unless most of the others went on
    training: then that rank rejoined a running job.
    """
    by_number: dict[int | None, list[Segment]] = {}
    for segment in segments:
        if segment.start is not None:
            by_number.setdefault(segment.attempt, []).append(segment)
    attempts: list[Attempt] = []
    for number, members in by_number.items():
        lanes = {segment.lane for segment in members}
        if number is not None and len(lanes) == len(members) and len({segment.host for segment in members}) > 1:
            # Each rank has this number once, so it is one attempt, however far its hosts' clocks are apart.
            attempts.append(Attempt(number, {segment.lane: [segment] for segment in members}))
            continue
        members.sort(key=lambda segment: (_start(segment), segment.serial))
        attempts.extend(_by_time(number, members))
    attempts.sort(key=lambda attempt: attempt.start)
    return attempts


def _by_time(number: int | None, members: list[Segment]) -> list[Attempt]:
    found: list[Attempt] = []
    first = latest = 0.0
    for segment in members:
        start = _start(segment)
        end = segment.end or start
        if not found or segment.lane in found[-1].lanes or start > max(latest, first + START_SPREAD_S):
            found.append(Attempt(number))
            first, latest = start, end
        found[-1].add(segment)
        latest = max(latest, end)

    joined: list[Attempt] = []
    for attempt in found:
        if joined and _rejoins(attempt, joined[-1]):
            for segment in attempt.segments:
                joined[-1].add(segment)
        else:
            joined.append(attempt)
    return joined


def _rejoins(late: Attempt, running: Attempt) -> bool:
    """True when ``late`` is a minority of ranks that started again while the others of ``running`` went on training."""
    others = [lane for lane in running.lanes if lane not in late.lanes]
    if len(late.lanes) * 2 >= len(running.lanes) or not others:
        return False
    lasts = [running.lanes[lane][-1].last_step_time() for lane in others]
    start = late.start
    went_on = sum(last is not None and last > start for last in lasts)
    return went_on * 2 > len(others)
