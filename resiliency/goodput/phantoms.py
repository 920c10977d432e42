"""Lines that name an attempt or a rank that never was: one wrong number must not become a part of the job. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

from resiliency.telemetry.facts import RunFacts, Segment

__all__ = ["set_phantoms_aside"]


def set_phantoms_aside(run: RunFacts) -> int:
    """Marks segments that are one line, of a rank beyond the size of the job or of an attempt that nothing else tells
    of, and takes single lines out of segments between whose events another attempt of the same rank lived.

    Returns:
        How many lines are set aside, now or before. A line that is followed by others is taken back.
    """
    lived = [segment for segment in run.segments if segment.lines > 1]
    if not lived:
        return 0
    worlds = Counter(segment.world for segment in lived if segment.world)
    usual = worlds.most_common(1)[0][0] if worlds else 0
    numbers = {segment.attempt for segment in lived}
    # Launchers and agents bear an attempt out, too: they tell of ranks that died before a second line.
    numbers.update(mark.attempt for mark in run.marks if mark.hosts_clock)
    lanes = {segment.lane for segment in lived}
    processes = {(segment.attempt, segment.lane) for segment in lived}
    lines = Counter(segment.attempt for segment in run.segments)
    for segment in run.segments:
        segment.aside = segment.lines == 1 and (
            (0 < usual <= segment.lane and segment.lane not in lanes and segment.lane >= _size(run, segment))
            or (
                segment.attempt not in numbers
                and lines[segment.attempt] == 1
                and _is_unheard_of(segment, usual, numbers, lived)
            )
            # A single step beside the other lines of its rank and attempt is one that could not be put among them.
            or (segment.steps.high >= 0 and (segment.attempt, segment.lane) in processes)
            or (segment.attempt in numbers and _within_another(segment, lived))
        )
    taken = 0
    by_lane: dict[int, list[Segment]] = {}
    for segment in lived:
        by_lane.setdefault(segment.lane, []).append(segment)
    for ranks in by_lane.values():
        if len({one.attempt for one in ranks}) > 1:
            taken += _take_out(ranks)
    run.lines_taken_out += taken
    return run.lines_taken_out + sum(segment.aside for segment in run.segments)


def _size(run: RunFacts, segment: Segment) -> int:
    """The largest size that other ranks tell of the same attempt; 0: they tell none."""
    sizes = (one.world for one in run.segments if one.attempt == segment.attempt and one is not segment and one.world)
    return max(sizes, default=0)


def _is_unheard_of(segment: Segment, usual: int, numbers: set[int | None], lived: list[Segment]) -> bool:
    """A process that dies at once may write one line; then the number is the next one, and no other rank is there."""
    number = segment.attempt
    if number is None:
        return True
    return usual > 1 or not {number - 1, number + 1} & numbers or _within_another(segment, lived)


def _within_another(segment: Segment, lived: list[Segment]) -> bool:
    """Another attempt of the same rank was alive then, or all of its own number's events are elsewhere."""
    time = segment.start
    if time is None:
        return False
    return any(
        one.lane == segment.lane
        and one is not segment
        and one.start is not None
        and one.end is not None
        and one.start - 1.0 <= time <= one.end
        for one in lived
    )


def _take_out(ranks: list[Segment]) -> int:
    """Takes the first event out of each segment of a rank when another attempt lies between it and the next one."""
    moments = [(segment, segment.moments()) for segment in ranks]
    # What each did, without its first and last line, which may be the wrong ones themselves.
    lives = sorted((time, place) for place, (_, times) in enumerate(moments) for time in times[1:-1])
    taken = 0
    for segment, times in moments:
        if len(times) < 2:
            continue
        between = lives[bisect_right(lives, (times[0], len(moments))) : bisect_left(lives, (times[1], -1))]
        if any(moments[place][0].attempt != segment.attempt for _, place in between):
            taken += segment.forget(times[0])
    return taken
