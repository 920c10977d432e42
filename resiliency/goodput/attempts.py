"""Groups segments into attempts of the job, and finds by how many seconds hosts' clocks disagree. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from resiliency.telemetry.facts import RunFacts, Segment, parse_stamp

__all__ = ["NO_OFFSETS", "Attempt", "Offsets", "clock_changes", "cluster", "host_offsets"]

#: Ranks that start up to this many seconds apart may still be of one attempt (image pulls, queueing).
START_SPREAD_S = 600.0
#: A larger world size is an error in the log.
MAX_RANKS = 1_000_000
#: Smaller differences between clocks are not corrected.
SKEW_TOLERATED_S = 1.0


class Offsets:
    """Seconds by which hosts' clocks are ahead, by attempt, because a clock may be set right between two attempts."""

    def __init__(self) -> None:
        #: By host: its offset with the largest absolute value. Hosts without an offset are missing.
        self.hosts: dict[str, float] = {}
        self._segments: dict[int, float] = {}
        self._attempts: dict[tuple[int | None, str], float] = {}

    def __bool__(self) -> bool:
        return bool(self.hosts)

    def add(self, segment: Segment, seconds: float) -> None:
        """Records that the clock was ``seconds`` ahead for the times of ``segment``."""
        if seconds:
            self._segments[id(segment)] = seconds
            self._largest(segment.host, seconds)

    def add_host(self, number: int | None, host: str, seconds: float) -> None:
        """Records that the clock was ``seconds`` ahead for the events of ``host`` in attempt ``number``."""
        self._attempts[number, host] = seconds
        self._largest(host, seconds)

    def _largest(self, host: str, seconds: float) -> None:
        if abs(seconds) > abs(self.hosts.get(host, 0.0)):
            self.hosts[host] = seconds

    def same(self, segment: Segment, copy: Segment) -> None:
        """Gives ``copy``, which replaces ``segment``, the same offset."""
        if id(segment) in self._segments:
            self._segments[id(copy)] = self._segments[id(segment)]

    def of(self, segment: Segment) -> float:
        """Seconds that the clock was ahead for the times of ``segment``; 0.0 when no offset is recorded."""
        return self._segments.get(id(segment), 0.0)

    def at(self, number: int | None, host: str) -> float:
        """Seconds that the clock of ``host`` was ahead in attempt ``number``; the host's largest offset when none is
        recorded for that attempt."""
        return self._attempts.get((number, host), self.hosts.get(host, 0.0))


NO_OFFSETS = Offsets()


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

    def start(self, offsets: Offsets) -> float:
        return min(_start(segment, offsets) for segment in self.segments)

    def end(self, offsets: Offsets) -> float:
        return max((segment.end or 0.0) - offsets.of(segment) for segment in self.segments)

    @property
    def world(self) -> int:
        """Number of ranks that the trainers logged; 0 when they did not."""
        logged = Counter(one.world for one in self.segments if one.world and not one.size_aside)
        logged.update(segment.world_before for segment in self.segments if segment.world_before)
        if not logged:
            return 0
        # When several sizes are logged equally often, the one that equals the number of ranks in the log wins.
        most = max(logged.values())
        told = [world for world, count in logged.items() if count == most]
        return min(len(self.lanes) if len(self.lanes) in told else told[0], MAX_RANKS)


def _start(segment: Segment, offsets: Offsets) -> float:
    return (segment.start or 0.0) - offsets.of(segment)


def cluster(segments: Sequence[Segment], offsets: Offsets) -> list[Attempt]:
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
        members.sort(key=lambda segment: (_start(segment, offsets), segment.serial))
        attempts.extend(_by_time(number, members, offsets))
    attempts.sort(key=lambda attempt: attempt.start(offsets))
    return attempts


def _by_time(number: int | None, members: list[Segment], offsets: Offsets) -> list[Attempt]:
    found: list[Attempt] = []
    first = latest = 0.0
    for segment in members:
        start = _start(segment, offsets)
        end = (segment.end or start) - offsets.of(segment)
        if not found or segment.lane in found[-1].lanes or start > max(latest, first + START_SPREAD_S):
            found.append(Attempt(number))
            first, latest = start, end
        found[-1].add(segment)
        latest = max(latest, end)

    joined: list[Attempt] = []
    for attempt in found:
        if joined and _rejoins(attempt, joined[-1], offsets):
            for segment in attempt.segments:
                joined[-1].add(segment)
        else:
            joined.append(attempt)
    return joined


def _rejoins(late: Attempt, running: Attempt, offsets: Offsets) -> bool:
    """True when ``late`` is a minority of ranks that started again while the others of ``running`` went on training."""
    others = [lane for lane in running.lanes if lane not in late.lanes]
    if len(late.lanes) * 2 >= len(running.lanes) or not others:
        return False
    start = late.start(offsets)
    went_on = 0
    for lane in others:
        last = running.lanes[lane][-1].last_step_time()
        if last is not None and last - offsets.of(running.lanes[lane][-1]) > start:
            went_on += 1
    return went_on * 2 > len(others)


def clock_changes(run: RunFacts) -> Offsets:
    """Finds host clocks that were set: seconds ahead, in each attempt, of the setting that most of the host's events
    have.

    All processes of one boot of a machine share a monotonic clock, which nobody sets, so it shows when the wall clock
    was set between two attempts. Hosts that do not log their ``boot`` are skipped, because another machine may have
    the same name.
    """
    everything = (*run.segments, *run.nodes, *run.others.values())
    boots: dict[str, set[str]] = {}
    for segment in everything:
        if segment.boot:
            boots.setdefault(segment.host, set()).add(segment.boot)
    told: dict[tuple[str, str], list[tuple[float, Segment]]] = {}
    for segment in everything:
        # Most launcher events carry no boot; it is the host's when that has only one.
        boot = segment.boot or (min(boots[segment.host]) if len(boots.get(segment.host, ())) == 1 else "")
        if boot and (base := segment.base) is not None:
            told.setdefault((segment.host, boot), []).append((base, segment))
    offsets = Offsets()
    for (host, _), bases in told.items():
        usual = _usual_base(bases)
        # Launchers come last, because the last offset that is added becomes the host's.
        launchers = {id(segment) for segment in run.others.values()}
        for base, segment in sorted(bases, key=lambda one: id(one[1]) in launchers):
            ahead = base - usual if abs(base - usual) > SKEW_TOLERATED_S else 0.0
            offsets.add(segment, ahead)
            offsets.add_host(segment.attempt, host, ahead)
    return offsets


def _usual_base(bases: Sequence[tuple[float, Segment]]) -> float:
    """The base (UTC seconds at which the monotonic clock began) that most events agree on. Bases within a second of
    each other count as one."""
    votes: list[list[float]] = []
    for base, segment in sorted(bases, key=lambda one: one[0]):
        if votes and base - votes[-1][0] <= SKEW_TOLERATED_S:
            votes[-1][1] += segment.heard
        else:
            votes.append([base, segment.heard])
    return max(votes, key=lambda vote: vote[1])[0]


def host_offsets(attempts: Sequence[Attempt], usual_step_s: float, changes: Offsets = NO_OFFSETS) -> Offsets:
    """Seconds each host's clock is ahead in each attempt; 0 where it is off by less than a second or a step.

    Ranks of a synchronous job end a step at the same moment, so the stamps of one step show the difference. With two
    hosts the clock of the lowest rank's host is the reference, with more the host with the median difference. An
    attempt that shows nothing (it ended before its first step) has the offsets of the one before, else of the next.
    ``changes`` (from :func:`clock_changes`) are subtracted before hosts are compared, and are part of the result.
    """
    hosts: list[str] = []
    found = [_differences(attempt, hosts, changes) for attempt in attempts]
    if not any(found):
        return changes
    limit = max(SKEW_TOLERATED_S, usual_step_s)
    offsets = Offsets()
    known: dict[str, float] = {}
    for host in hosts:
        first = next((one[host] for one in found if host in one), 0.0)
        known[host] = first if abs(first) > limit else 0.0
    for attempt, differences in zip(attempts, found, strict=True):
        known.update({host: value if abs(value) > limit else 0.0 for host, value in differences.items()})
        for segment in attempt.segments:
            offsets.add(segment, known.get(segment.host, 0.0) + changes.of(segment))
        for host in {*known, *changes.hosts}:
            offsets.add_host(attempt.number, host, known.get(host, 0.0) + changes.at(attempt.number, host))
    return offsets


def _differences(attempt: Attempt, hosts: list[str], changes: Offsets) -> dict[str, float]:
    """Seconds by which hosts are ahead in one attempt; empty when the log does not show it. Adds the attempt's hosts
    to ``hosts``."""
    lanes = [attempt.lanes[lane][-1] for lane in sorted(attempt.lanes) if attempt.lanes[lane][-1].steps.high >= 0]
    for segment in lanes:
        if segment.host not in hosts:
            hosts.append(segment.host)
    if len({segment.host for segment in lanes}) < 2:
        return {}
    differences: dict[str, list[float]] = {}
    shift = max(segment.steps.shift for segment in lanes)
    ends: dict[tuple[int, int], dict[str, float]] = {}
    for segment in lanes:
        windows = segment.steps.at_shift(shift)
        latest = max(windows, default=0)
        for key, window in windows.items():
            # When the clock was set between two steps, only the time of the last step is known to be right.
            if segment.was_set:
                time = segment.last_step_time() if key == latest else None
            else:
                time = parse_stamp(window.last_stamp)
            if time is not None:
                ends.setdefault((key, window.last_step), {}).setdefault(segment.host, time - changes.of(segment))
    compared = [times for times in ends.values() if len(times) > 1]
    # One reference host for all steps, because differences to different references cannot be compared. Some hosts have
    # only one of the steps.
    shown = Counter(host for times in compared for host in times)
    reference = max((host for host in hosts if host in shown), key=lambda host: shown[host], default="")
    for times in compared:
        for host, time in times.items() if reference in times else ():
            differences.setdefault(host, []).append(time - times[reference])
    middle = {host: median_low(values) for host, values in differences.items()}
    first = next((middle[host] for host in hosts if host in middle), 0.0)
    zero = median_low(middle.values()) if len(middle) > 2 else first
    return {host: value - zero for host, value in middle.items()}
