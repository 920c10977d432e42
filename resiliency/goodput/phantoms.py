"""Sets aside lines that name an attempt or a rank that never existed, so that one wrong number does not become a part
of the job. Pure.

A process that dies at once also leaves a single line. It differs from a wrong line: its line is a process start that
no other process lacks, and no other process of its rank wrote both before and after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from resiliency.events import EventKind
from resiliency.telemetry.facts import RunFacts, Segment

__all__ = ["set_phantoms_aside", "set_sizes_aside"]

#: Segments by lane, each list ordered by the first event.
_Lanes = Mapping[int, Sequence[Segment]]


def set_phantoms_aside(run: RunFacts) -> int:
    """Finds lines with a wrong attempt or rank.

    A segment of a single line is set aside (``aside``) when its rank is beyond the size of the job, or nothing else in
    the log tells of its attempt. The first line of a longer segment is taken out when another attempt of the same rank
    lived between that line and the next.

    Returns:
        How many lines are set aside, by this call or an earlier one. A single line that got others since then counts
        as a process again.
    """
    lived = [segment for segment in run.segments if segment.lines > 1]
    if not lived:
        return run.lines_held
    # All segments are asked when no process with several lines tells a size: its start line may be the wrong one.
    worlds = Counter(segment.world for segment in lived if segment.world) or Counter(
        segment.world for segment in run.segments if segment.world
    )
    usual = worlds.most_common(1)[0][0] if worlds else 0
    numbers = {segment.attempt for segment in lived}
    # Events of launchers and agents confirm an attempt, too: its ranks may have died before their second line.
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
    #: By process without a start line: the nearest start, with its distance in seconds.
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
            # A single step apart from the other lines of its rank and attempt is one that did not fit among them.
            or (segment.steps.high >= 0 and (number, lane) in processes)
            # The only line of an attempt must be a process start, because a process that dies at once has written that.
            or (alone and tells_starts and segment.started is None)
            or (alone and not tells_starts and not _is_next(number, all_numbers))
            # A line from another host belongs to another rank, unless a process of this rank was started there.
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
    """Marks wrong sizes of the job (``size_aside``), which would count as the capacity of the whole job.

    A size is wrong when only a segment of a single line tells it, and it is larger than every size that several
    segments tell, than the ranks in the log, and than the ranks that launchers started. Returns how many are marked.
    """
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
    """True when the attempt just before or after ``number`` is among ``numbers``."""
    return number is not None and not {number - 1, number + 1}.isdisjoint(numbers)


def _apart(one: tuple[float, Segment]) -> float:
    return one[0]


def _misses_start(segment: Segment, lane: Sequence[Segment]) -> Segment | None:
    """The process just before or after this start that has no start line of its own; None when both have one."""
    time = segment.began
    if time is None:
        return None
    after = bisect_right(lane, time, key=lambda one: one.began or 0.0)
    # Also the process before it, because its clock may have been set back since.
    near = lane[max(0, after - 1) : after + 1]
    found = (one for one in near if one.started is None and not one.rollback and one.has_clocks_of(segment))
    return next(found, None)


def _is_of_another(segment: Segment, lane: Sequence[Segment]) -> bool:
    """True when another attempt of the same rank was alive at the time of this line."""
    time = segment.began
    if time is None:
        return False
    after = bisect_right(lane, time, key=lambda one: one.began or 0.0)
    # Few attempts of one rank overlap, so that the last four that began before this line are enough.
    return any(
        one.end is not None and time <= one.end and one.attempt != segment.attempt and one.has_clocks_of(segment)
        for one in lane[max(0, after - 4) : after]
    )


def _take_out(ranks: Sequence[Segment], tells_starts: bool) -> int:
    """Takes the first event out of each segment of a rank when another attempt lived between it and the next event.
    Returns how many were taken out."""
    moments = [(segment, segment.moments()) for segment in ranks]
    # The events of each segment without the first and the last one, which may themselves be wrong.
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
