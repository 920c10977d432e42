"""Lines that name an attempt or a rank that never was: one wrong number must not become a part of the job. Pure.

A process that dies at once leaves one line, too. What tells both apart: its line is the start of a process, which no
other one misses, and no other process of its rank wrote before and after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from resiliency.events import EventKind
from resiliency.telemetry.facts import RunFacts, Segment

__all__ = ["set_phantoms_aside", "set_sizes_aside"]

#: By lane, in order of their beginnings.
_Lanes = Mapping[int, Sequence[Segment]]


def set_phantoms_aside(run: RunFacts) -> int:
    """Marks segments that are one line, of a rank beyond the size of the job or of an attempt that nothing else tells
    of, and takes single lines out of segments between whose events another attempt of the same rank lived.

    Returns:
        How many lines are set aside, now or before. A line that is followed by others is taken back.
    """
    lived = [segment for segment in run.segments if segment.lines > 1]
    if not lived:
        return run.lines_held
    # Of all lines where the start of the only process that lived is the wrong one.
    worlds = Counter(segment.world for segment in lived if segment.world) or Counter(
        segment.world for segment in run.segments if segment.world
    )
    usual = worlds.most_common(1)[0][0] if worlds else 0
    numbers = {segment.attempt for segment in lived}
    # Launchers and agents bear an attempt out, too: they tell of ranks that died before a second line.
    numbers.update(mark.attempt for mark in run.marks if mark.hosts_clock)
    all_numbers = numbers | {segment.attempt for segment in run.segments}
    by_lane: dict[int, list[Segment]] = defaultdict(list)
    for segment in sorted(lived, key=lambda one: one.began or 0.0):
        by_lane[segment.lane].append(segment)
    processes: dict[tuple[int | None, int], set[str]] = defaultdict(set)
    startless: set[tuple[int | None, str]] = set()
    for segment in lived:
        processes[segment.attempt, segment.lane].add(segment.host)
        if segment.started is None and not segment.rollback:
            startless.add((segment.attempt, segment.host))
    #: Of the process that misses one, the start that is the nearest.
    missed: dict[int, tuple[float, Segment]] = {}
    sizes, lines = _sizes(run), Counter(segment.attempt for segment in run.segments)
    tells_starts = 2 * sum(segment.started is not None for segment in lived) > len(lived)
    for segment in run.segments:
        if segment.lines != 1:
            segment.aside = False
            continue
        number, lane = segment.attempt, segment.lane
        alone = number not in numbers and lines[number] == 1
        segment.aside = (
            (0 < usual <= lane and lane not in by_lane and lane >= sizes.get(number, 0))
            # A single step beside the other lines of its rank and attempt is one that could not be put among them.
            or (segment.steps.high >= 0 and (number, lane) in processes)
            # A process that dies at once has written its start.
            or (alone and tells_starts and segment.started is None)
            or (alone and not tells_starts and not _is_next(number, all_numbers))
            # A line of another host is of another rank, unless a process of this one was started there.
            or (
                segment.host not in processes.get((number, lane), (segment.host,))
                and (segment.started is None or (tells_starts and (number, segment.host) in startless))
            )
        )
        if segment.aside or not (alone or number in numbers):
            continue
        if segment.started is not None and tells_starts:
            if (owner := _misses_start(segment, by_lane.get(lane, ()))) is not None:
                apart = abs((segment.began or 0.0) - (owner.began or 0.0))
                missed[id(owner)] = min(missed.get(id(owner), (apart, segment)), (apart, segment), key=_apart)
        else:
            segment.aside = _is_of_another(segment, by_lane.get(lane, ()))
    for _, segment in missed.values():
        segment.aside = True
    taken = 0
    for ranks in by_lane.values():
        if len({one.attempt for one in ranks}) > 1:
            taken += _take_out(ranks, tells_starts)
    run.lines_taken_out += taken
    return run.lines_held + run.lines_taken_out + sum(segment.aside for segment in run.segments)


def set_sizes_aside(run: RunFacts) -> int:
    """Marks the size of a job that is larger than all others and told by the one line of a process, where launchers
    have not started so many; how many. It would be what the whole job has."""
    told: Counter[int] = Counter()
    for one in run.segments:
        told.update({size for size in (one.world, one.world_before) if size and not one.aside})
    most = 1 + max((one.lane for one in run.segments if not one.aside), default=0)
    borne_out = max((size for size, count in told.items() if count > 1), default=0)
    started = _started(run)
    for one in run.segments:
        size = one.world or 0
        one.size_aside = one.lines == 1 and 0 < borne_out < size > max(most, started[one.attempt])
    return sum(one.size_aside for one in run.segments)


def _started(run: RunFacts) -> Counter[int | None]:
    """How many ranks the launchers say that they started in each attempt."""
    hosts: dict[tuple[int | None, str], int] = {}
    for mark in run.marks:
        count = mark.fields.get("count") if mark.kind == EventKind.RANKS_STARTED else None
        if type(count) is int:
            hosts[mark.attempt, mark.host] = max(count, hosts.get((mark.attempt, mark.host), 0))
    started: Counter[int | None] = Counter()
    for (number, _), count in hosts.items():
        started[number] += count
    return started


def _sizes(run: RunFacts) -> dict[int | None, int]:
    """The largest size that ranks tell of each attempt."""
    sizes: dict[int | None, int] = {}
    for one in run.segments:
        if one.world:
            sizes[one.attempt] = max(one.world, sizes.get(one.attempt, 0))
    return sizes


def _is_next(number: int | None, numbers: set[int | None]) -> bool:
    """The number of an attempt follows that of another one, or comes before it."""
    return number is not None and not {number - 1, number + 1}.isdisjoint(numbers)


def _apart(one: tuple[float, Segment]) -> float:
    return one[0]


def _misses_start(segment: Segment, lane: Sequence[Segment]) -> Segment | None:
    """The process next to this start that has none of its own."""
    time = segment.began
    if time is None:
        return None
    after = bisect_right(lane, time, key=lambda one: one.began or 0.0)
    # The one before, too: its clock may have been set back since.
    near = lane[max(0, after - 1) : after + 1]
    found = (one for one in near if one.started is None and not one.rollback and one.has_clocks_of(segment))
    return next(found, None)


def _is_of_another(segment: Segment, lane: Sequence[Segment]) -> bool:
    """Another attempt of the same rank was alive then."""
    time = segment.began
    if time is None:
        return False
    after = bisect_right(lane, time, key=lambda one: one.began or 0.0)
    # Overlapping attempts of one rank are few; the last ones that began before are looked at.
    return any(
        one.end is not None and time <= one.end and one.attempt != segment.attempt and one.has_clocks_of(segment)
        for one in lane[max(0, after - 4) : after]
    )


def _take_out(ranks: Sequence[Segment], tells_starts: bool) -> int:
    """Takes the first event out of each segment of a rank when another attempt lies between it and the next one."""
    moments = [(segment, segment.moments()) for segment in ranks]
    # What each did, without its first and last line, which may be the wrong ones themselves.
    lives = sorted((time, place) for place, (_, times) in enumerate(moments) for time in times[1:-1])
    taken = 0
    for segment, times in moments:
        if len(times) < 2:
            continue
        between = lives[bisect_right(lives, (times[0], len(moments))) : bisect_left(lives, (times[1], -1))]
        is_start = tells_starts and segment.started == times[0]
        if any(
            other.attempt != segment.attempt and other.has_clocks_of(segment) and not (is_start and other.started)
            for other in {id(one): one for one in (moments[place][0] for _, place in between)}.values()
        ):
            taken += segment.forget(times[0])
    return taken
