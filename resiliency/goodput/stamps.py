"""Corrects wrong time stamps, or sets them aside. Pure.

Each event carries two times: the wall clock, which people set, and the monotonic clock, which nobody sets. The
monotonic clock gives the distances between the events of a process, and the majority of the events decides where on the
wall clock they lie. An event that is still far from all others after that is set aside.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile

from resiliency.goodput.phantoms import set_phantoms_aside, set_sizes_aside
from resiliency.goodput.start_claims import check_starts
from resiliency.telemetry.facts import DAY_S, DaySpan, RunFacts, Segment, parse_stamp

__all__ = ["FAR_S", "straighten"]

#: Events farther than this from all others of a run are set aside, unless a process began and ended there.
FAR_S = 30 * DAY_S
#: At most this many processes of a boot vote on its clock.
MOST_WITNESSES = 8
#: Clocks that differ by no more than this many seconds have the same setting.
SAME_CLOCK_S = 1.0


def straighten(run: RunFacts) -> None:
    """Corrects the times of a run in place, and counts in its ``quality`` those that it sets aside. Idempotent."""
    peers: dict[tuple[str, int | None], list[Segment]] = {}
    for segment in run.segments:
        peers.setdefault((segment.host, segment.attempt), []).append(segment)
    for segment in (*run.segments, *run.nodes):
        segment.settle()
    boots = _boots(run)
    between = _between(run, peers)
    for segment in run.segments:  # again, for readings that no other event of the process confirms
        known = boots.get((segment.host, segment.boot), ())
        segment.settle(_peers_of(segment, peers), between.get(id(segment)), known)
    lived = [(one.began, one.end) for one in run.segments if one.lines > 1]
    ends = [end for _, end in lived if end is not None]
    life = (min(one for one, _ in lived if one is not None), max(ends)) if ends else None
    moved = sum(clock.settle(_peers_of(clock, peers), life) for clock in run.others.values())
    if moved:
        run.quality["clocks_of_hosts_set_aright"] += moved
    run.marks = [
        dataclasses.replace(mark, time=mark.by.resolve(mark.told))
        if mark.by is not None and mark.told is not None
        else mark
        for mark in run.marks
    ]
    too_long = run.too_long + sum(segment.steps.too_long for segment in run.segments)
    for name, count in (
        ("clock_readings_set_aside", _readings_alone(run)),
        ("lines_set_aside", set_phantoms_aside(run)),
        ("sizes_set_aside", set_sizes_aside(run)),
        ("starts_set_aside", check_starts(run)),
        ("durations_set_aside", too_long),
    ):
        if count:
            run.quality[name] = count
        else:
            run.quality.pop(name, None)
    _find_ends(run)
    eras = _eras(run)
    if len(eras) < 2:
        return
    kept = [era for era in eras if era.real] or [max(eras, key=lambda era: era.events)]

    def within(time: float) -> bool:
        return any(era.low <= time <= era.high for era in kept)

    gone = sum(segment.keep(within) for segment in (*run.segments, *run.nodes))
    for clock in run.others.values():
        clock.keep(within)  # else the next account of the run would extend to it
    before = len(run.marks) + len(run.saves) + len(run.loads)
    run.marks = [mark for mark in run.marks if within(mark.time)]
    run.saves = [save for save in run.saves if within(save[0])]
    run.loads = [load for load in run.loads if within(load[0])]
    gone += before - len(run.marks) - len(run.saves) - len(run.loads)
    for name in ("scheduled", "terminated", "first_alone", "last_alone"):
        time = getattr(run, name)
        if time is not None and not within(time):
            setattr(run, name, None)
            gone += 1
    aside = {number: day for number, day in run.days.items() if not within(day.first)}
    run.days = {number: day for number, day in run.days.items() if number not in aside}
    run.first = min((day.first for day in run.days.values()), default=None)
    run.last = max((day.last for day in run.days.values()), default=None)
    if gone or aside:
        run.quality["stamps_set_aside"] += max(1, sum(day.events for day in aside.values()))


def _peers_of(segment: Segment, peers: Mapping[tuple[str, int | None], Sequence[Segment]]) -> Sequence[Segment]:
    """The processes that have the same two clocks as ``segment``: those of its host and attempt.

    When a rank has that attempt number twice, the machine may have been rebooted in between. Then a rank has no peers,
    and a launcher those of its own boot.
    """
    found = peers.get((segment.host, segment.attempt), ())
    if len({one.lane for one in found}) == len(found):
        return found
    return [one for one in found if segment.lane < 0 and one.boot == segment.boot]


def _readings_alone(run: RunFacts) -> int:
    """How many clock readings nothing else confirms. A reading that another process of the host also has is not
    counted: the clock was really set then, for example a launcher's between two attempts."""
    everything = (*run.segments, *run.nodes, *run.others.values())
    doubted = [one for one in everything if one.alone]
    if not doubted:
        return 0
    told: dict[str, list[tuple[float, Segment]]] = {one.host: [] for one in doubted}
    for one in everything:
        if one.host in told:
            told[one.host].extend((base, one) for base in one.all_bases())
    for bases in told.values():
        bases.sort(key=_first)
    return sum(not _has_witness(base, one, told[one.host]) for one in doubted for base in one.bases_alone())


def _first(pair: tuple[float, Segment]) -> float:
    return pair[0]


def _has_witness(base: float, segment: Segment, told: Sequence[tuple[float, Segment]]) -> bool:
    near = told[bisect_left(told, base - SAME_CLOCK_S, key=_first) :]
    return any(one is not segment for _, one in takewhile(lambda pair: pair[0] <= base + SAME_CLOCK_S, near))


def _between(
    run: RunFacts, peers: Mapping[tuple[str, int | None], Sequence[Segment]]
) -> dict[int, tuple[float, float]]:
    """For each process of a single line that is alone on its host, by ``id``: the end of its rank's attempt before, and
    the start of the one after."""
    if not any(one.lines == 1 for one in run.segments):
        return {}
    lanes: dict[int, list[tuple[int, Segment]]] = {}
    for one in run.segments:
        if one.attempt is not None:
            lanes.setdefault(one.lane, []).append((one.attempt, one))
    found: dict[int, tuple[float, float]] = {}
    for members in lanes.values():
        members.sort(key=_number)
        for (_, before), (number, one), (_, after) in zip(members, members[1:], members[2:], strict=False):
            low, high = before.end, after.began
            if one.lines == 1 and len(peers[one.host, number]) == 1 and low is not None and high is not None:
                found[id(one)] = (low, high)
    return found


def _number(member: tuple[int, Segment]) -> int:
    return member[0]


def _boots(run: RunFacts) -> dict[tuple[str, str], list[Segment]]:
    """By (host, boot), at most MOST_WITNESSES processes: those whose clocks most events speak for."""
    boots: dict[tuple[str, str], list[Segment]] = {}
    for segment in sorted(run.segments, key=lambda one: -one.heard):
        if segment.boot and len(known := boots.setdefault((segment.host, segment.boot), [])) < MOST_WITNESSES:
            known.append(segment)
    return boots


def _find_ends(run: RunFacts) -> None:
    """Sets the first and last moment of a run from its corrected times, and drops the days outside them."""
    segments = [one for one in (*run.segments, *run.nodes, *run.others.values()) if not one.aside]
    times = [
        time
        for segment in segments
        for time in (segment.start, segment.end, segment.earliest, segment.latest)
        if time is not None
    ]
    named = (run.scheduled, run.terminated, run.first_alone, run.last_alone)
    times += [mark.time for mark in run.marks] + [time for time in named if time is not None]
    if times:
        run.first, run.last = min(times), max(times)
        low, high = int(run.first // DAY_S), int(run.last // DAY_S)
        run.days = {number: day for number, day in run.days.items() if low <= number <= high}


@dataclasses.dataclass
class _Era:
    low: float
    high: float
    events: int
    #: True when it has the most events, or a process has two different moments in it.
    real: bool = False


def _eras(run: RunFacts) -> list[_Era]:
    """The run divided into stretches, at each gap of more than FAR_S without an event."""
    days: Counter[int] = Counter()
    spans: dict[int, DaySpan] = {}

    def see(time: float, events: int) -> None:
        number = int(time // DAY_S)
        span = spans.setdefault(number, DaySpan(time, time))
        span.first, span.last = min(span.first, time), max(span.last, time)
        days[number] += events

    for day in run.days.values():
        see(day.first, day.events)
        see(day.last, 0)
    segments = (*run.segments, *run.nodes)
    for segment in segments:
        for time in (segment.start, segment.end, segment.launched):
            if time is not None:
                see(time, 1)
        for window in segment.steps.windows.values():
            stamp = parse_stamp(window.last_stamp)
            if stamp is not None:
                see(stamp, window.n)
    for mark in run.marks:
        see(mark.time, 0)
    for named in (run.scheduled, run.terminated):
        if named is not None:
            see(named, 0)
    eras: list[_Era] = []
    for number in sorted(days):
        span = spans[number]
        if eras and span.first - eras[-1].high <= FAR_S:
            eras[-1].high = span.last
            eras[-1].events += days[number]
        else:
            eras.append(_Era(span.first, span.last, days[number]))
    most = max((era.events for era in eras), default=0)
    for era in eras:
        lived = any(
            s.start is not None and s.end is not None and era.low <= s.start < s.end <= era.high for s in segments
        )
        era.real = era.events == most or (lived and era.events > 0)
    return eras
