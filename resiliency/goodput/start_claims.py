"""How long ago something began, as one line says: believed where nothing else in the log contradicts it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from resiliency.events import EventKind
from resiliency.goodput.attempts import START_SPREAD_S
from resiliency.telemetry.facts import RunFacts, Segment

__all__ = ["check_starts"]

#: Ranks of one host are started together, ...
SAME_HOST_S = 60.0
#: ... by one launcher, whose start they all tell.
SAME_LAUNCHER_S = 5.0


def check_starts(run: RunFacts) -> int:
    """Forgets starts of processes and launchers that are contradicted; how many those were, now or before."""
    attempts: dict[int | None, list[Segment]] = {}
    before: dict[int, float] = {}
    for segment in run.segments:
        if segment.aside:
            continue
        attempts.setdefault(segment.attempt, []).append(segment)
    launchers = [mark for mark in run.marks if mark.kind == EventKind.LAUNCHER_STARTED]
    gone = 0
    for members in sorted(attempts.values(), key=lambda some: min(one.began or 0.0 for one in some)):
        processes, launches = _Claims(members, "process"), _Claims(members, "launched")
        for segment in members:
            if segment.process is not None and (
                processes.is_apart(segment.process, segment, SAME_HOST_S)
                or segment.process < before.get(segment.lane, 0.0) - SAME_LAUNCHER_S
            ):
                segment.drop("process")
                gone += 1
            marked = [mark.time for mark in launchers if mark.host == segment.host]
            if segment.launched is not None and (
                launches.is_apart(segment.launched, segment, SAME_LAUNCHER_S)
                or (marked and segment.launched < min(marked) - SAME_LAUNCHER_S)
            ):
                segment.drop("launched")
                gone += 1
        for segment in members:
            last = segment.last_step_time()
            if last is not None:
                before[segment.lane] = max(last, before.get(segment.lane, 0.0))
    for place, mark in enumerate(run.marks):
        if mark.kind != EventKind.LAUNCHER_STARTED or mark.told is None or not mark.told.since:
            continue
        told = [one.launched for one in run.segments if one.launched is not None and one.host == mark.host]
        if told and mark.time < min(told) - SAME_LAUNCHER_S:
            time = mark.time - mark.told.since
            run.marks[place] = dataclasses.replace(mark, time=time, told=mark.told._replace(since=0.0))
            gone += 1
    run.starts_forgotten += gone
    return run.starts_forgotten


class _Claims:
    """What the ranks of an attempt tell of one start: the two earliest of each host, and of all."""

    def __init__(self, members: Sequence[Segment], name: str) -> None:
        self._earliest: dict[str | None, list[tuple[float, int]]] = {}
        for one in members:
            time = getattr(one, name)
            if time is not None:
                for key in (one.host, None):
                    kept = self._earliest.setdefault(key, [])
                    kept.append((time, one.lane))
                    kept.sort()
                    del kept[2:]

    def is_apart(self, time: float, segment: Segment, same_host_s: float) -> bool:
        """Earlier than what all others of its host tell, or than others of the attempt by more than starts are
        apart."""
        for key, most in ((segment.host, same_host_s), (None, START_SPREAD_S)):
            others = [other for other, lane in self._earliest.get(key, ()) if lane != segment.lane]
            if others:
                return time < others[0] - most
        return False
