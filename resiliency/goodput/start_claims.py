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
        for segment in members:
            peers = [one for one in members if one is not segment and one.lane != segment.lane]
            if segment.process is not None and (
                _is_apart(segment.process, segment, peers, "process", SAME_HOST_S)
                or segment.process < before.get(segment.lane, 0.0) - SAME_LAUNCHER_S
            ):
                segment.drop("process")
                gone += 1
            marked = [mark.time for mark in launchers if mark.host == segment.host]
            if segment.launched is not None and (
                _is_apart(segment.launched, segment, peers, "launched", SAME_LAUNCHER_S)
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


def _is_apart(time: float, segment: Segment, peers: Sequence[Segment], name: str, same_host_s: float) -> bool:
    """Earlier than what all others of its host tell, or than others of the attempt by more than starts are apart."""
    told: list[tuple[float | None, bool]] = [(getattr(one, name), one.host == segment.host) for one in peers]
    near = [one for one, same in told if one is not None and same]
    if near:
        return time < min(near) - same_host_s
    far = [one for one, _ in told if one is not None]
    return bool(far) and time < min(far) - START_SPREAD_S
