"""Checks what single lines say about when their process or launcher began; it is believed unless the log contradicts
it. Pure.

Only times by the same clocks are compared as times. For ranks whose clocks may disagree, and for ranks that joined
later, ages are compared: the seconds from the start to the line that tells it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from resiliency.events import EventKind
from resiliency.goodput.attempts import START_SPREAD_S
from resiliency.telemetry.facts import Mark, RunFacts, Segment
from resiliency.telemetry.segment import WRONG_S

__all__ = ["check_starts"]

#: The ranks of one host start within this many seconds of each other, ...
SAME_HOST_S = 60.0
#: ... and tell the start of their common launcher within this many.
SAME_LAUNCHER_S = 5.0


def check_starts(run: RunFacts) -> int:
    """Forgets starts of processes and launchers that the log contradicts. Returns how many were forgotten, by this call
    or an earlier one."""
    attempts: dict[int | None, list[Segment]] = {}
    before: dict[int, tuple[float, Segment]] = {}
    for segment in run.segments:
        if segment.aside:
            continue
        attempts.setdefault(segment.attempt, []).append(segment)
    launchers = [mark for mark in run.marks if mark.kind == EventKind.LAUNCHER_STARTED]
    marked = _Earliest((mark.time, mark.host, _base(mark)) for mark in launchers)
    gone = 0
    for members in sorted(attempts.values(), key=lambda some: min(one.began or 0.0 for one in some)):
        processes, launches = _Claims(members, "process"), _Claims(members, "launched")
        for segment in members:
            last, whose = before.get(segment.lane, (0.0, segment))
            if segment.process is not None and (
                processes.is_apart(segment.process, segment, SAME_HOST_S)
                or (segment.process < last - SAME_LAUNCHER_S and _follows(segment, last, whose))
            ):
                segment.drop("process")
                gone += 1
            earliest = marked.of(segment.host, segment.base)
            if segment.launched is not None and (
                launches.is_apart(segment.launched, segment, SAME_LAUNCHER_S)
                or (earliest is not None and segment.launched < earliest - SAME_LAUNCHER_S)
            ):
                segment.drop("launched")
                gone += 1
        for segment in members:
            end = segment.last_step_time()
            if end is not None:
                before[segment.lane] = max((end, segment), before.get(segment.lane, (end, segment)), key=_time)
    told = _Earliest((one.launched, one.host, one.base) for one in run.segments if one.launched is not None)
    for place, mark in enumerate(run.marks):
        if mark.kind != EventKind.LAUNCHER_STARTED or mark.told is None or not mark.told.since:
            continue
        earliest = told.of(mark.host, _base(mark))
        if earliest is not None and mark.time < earliest - SAME_LAUNCHER_S:
            time = mark.time - mark.told.since
            run.marks[place] = dataclasses.replace(mark, time=time, told=mark.told._replace(since=0.0))
            gone += 1
    run.starts_forgotten += gone
    return run.starts_forgotten


def _follows(segment: Segment, last: float, before: Segment) -> bool:
    """True when, by the clocks of both, the attempt before made its last step before this process told its start."""
    return segment.started is not None and last <= segment.started and before.has_clocks_of(segment)


def _time(one: tuple[float, Segment]) -> float:
    return one[0]


def _base(mark: Mark) -> float | None:
    return mark.by.base if mark.by is not None else None


class _Earliest:
    """By host, the earliest of the times that were told by the same clocks."""

    def __init__(self, told: Iterable[tuple[float, str, float | None]]) -> None:
        self._hosts: dict[str, list[tuple[float | None, float]]] = {}
        for time, host, base in told:
            kept = self._hosts.setdefault(host, [])
            for place, (known, least) in enumerate(kept):
                if _agree(known, base):
                    kept[place] = (known, min(time, least))
                    break
            else:
                kept.append((base, time))

    def of(self, host: str, base: float | None) -> float | None:
        return min((time for known, time in self._hosts.get(host, ()) if _agree(known, base)), default=None)


def _agree(one: float | None, other: float | None) -> bool:
    return one is None or other is None or abs(one - other) <= WRONG_S


class _Claims:
    """What the ranks of an attempt tell of one kind of start (``name``): the two earliest of each host, and the two
    oldest of all. Two, because a rank is compared with others only."""

    def __init__(self, members: Sequence[Segment], name: str) -> None:
        self._hosts: dict[str, list[tuple[float, float, int]]] = {}
        self._oldest: list[tuple[float, int]] = []
        for one in members:
            time = getattr(one, name)
            if time is not None:
                kept = self._hosts.setdefault(one.host, [])
                kept.append((time, -_age(time, one), one.lane))
                kept.sort()
                del kept[2:]
                self._oldest.append((-_age(time, one), one.lane))
                self._oldest.sort()
                del self._oldest[2:]

    def is_apart(self, time: float, segment: Segment, same_host_s: float) -> bool:
        """True when ``time`` is earlier than all other ranks of the host tell, by more than ``same_host_s``. Without
        others on the host: when it is older than the rest of the attempt tells, by more than START_SPREAD_S."""
        age = _age(time, segment)
        others = [one for one in self._hosts.get(segment.host, ()) if one[2] != segment.lane]
        if others:
            return time < others[0][0] - same_host_s and -age < others[0][1] - same_host_s
        ages = [-other for other, lane in self._oldest if lane != segment.lane]
        return bool(ages) and age > ages[0] + START_SPREAD_S


def _age(time: float, segment: Segment) -> float:
    """Seconds from ``time`` to the line that tells it; 0 when the log has no start of the process."""
    return (segment.started if segment.started is not None else time) - time
