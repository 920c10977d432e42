"""Puts all times of a run on one clock. Pure.

Each line has a wall time, which people and NTP set, and the seconds since the boot of its host, which nobody sets. So a
boot has one anchor, the UTC time of its second 0, and the time of a line is anchor + monotonic time. The anchor is the
median of what the lines of the boot tell: neither the few lines from before NTP had the time, nor one wrong line, nor
a step of the clock tears processes apart. Without a boot in the log each process has an anchor of its own.

The anchors of several hosts still differ by what their clocks do. Ranks of a synchronous job end a step at the same
moment, which shows by how much.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

from resiliency.goodput.attempts import Attempt, cluster
from resiliency.goodput.split import merged_typical
from resiliency.telemetry.facts import RunFacts, Segment
from resiliency.telemetry.segment import CLOCK_JUMP_S

__all__ = ["on_one_clock"]

#: Smaller differences between the clocks of hosts are not corrected.
SKEW_TOLERATED_S = 1.0

#: What has one monotonic clock: (host, boot), or a process.
_Clock = tuple[object, ...]


def on_one_clock(run: RunFacts) -> tuple[RunFacts, dict[str, float]]:
    """Returns a copy of ``run`` with all times on one clock, and by host the most seconds that its clock was ahead.

    Hosts without an entry were off by less than a second or a step. With two hosts the clock of the lowest rank's host
    is the reference, with more the host with the median difference.
    """
    clocks = _clocks(run)
    told: dict[_Clock, list[tuple[float, float]]] = {}
    for one in run.processes:
        told.setdefault(clocks[id(one)], []).extend(one.samples())
    anchors = {clock: _median(samples) for clock, samples in told.items() if samples}
    placed = _placed(run, clocks, anchors)
    ahead = _ahead(placed)
    for clock, seconds in ahead.items():
        if clock in anchors:
            anchors[clock] -= seconds
    if any(ahead.values()):
        placed = _placed(run, clocks, anchors)
    jumps, hosts = 0, dict[str, float]()
    for one in run.processes:
        clock = clocks[id(one)]
        before = anchors.get(clock, 0.0)
        errors = [offset - before for offset, _ in one.samples()]
        jumps += any(abs(error - ahead.get(clock, 0.0)) > CLOCK_JUMP_S for error in errors)
        for error in errors:
            if abs(error) > max(SKEW_TOLERATED_S, abs(hosts.get(one.host, 0.0))):
                hosts[one.host] = error
    placed.quality = run.quality + Counter(clock_jumps=jumps)
    return placed, hosts


def _clocks(run: RunFacts) -> dict[int, _Clock]:
    """The clock of each process, by ``id``. Launchers and agents rarely tell their boot: theirs is that of the process
    of their host whose offset is the nearest."""
    clocks = {id(one): _clock(one) for one in run.processes}
    hosts: dict[str, list[Segment]] = {}
    for one in run.processes:
        if one.boot and one.offset is not None:
            hosts.setdefault(one.host, []).append(one)
    for one in run.others.values():
        offset, known = one.offset, hosts.get(one.host)
        if not one.boot and offset is not None and known:
            clocks[id(one)] = _clock(min(known, key=lambda other: abs((other.offset or 0.0) - offset)))
    return clocks


def _clock(one: Segment) -> _Clock:
    return (one.host, one.boot) if one.boot else (one.host, one.attempt, one.lane, one.serial)


def _median(samples: Sequence[tuple[float, float]]) -> float:
    """The offset that half of the lines do not exceed."""
    left = sum(count for _, count in samples) / 2
    for offset, count in sorted(samples):
        left -= count
        if left <= 0:
            return offset
    raise AssertionError("no samples")


def _placed(run: RunFacts, clocks: Mapping[int, _Clock], anchors: Mapping[_Clock, float]) -> RunFacts:
    """A copy of the run whose processes' times are anchor + monotonic time."""
    moves = {
        id(one): anchors.get(clocks[id(one)], one.offset) - one.offset
        for one in run.processes
        if one.offset is not None
    }
    moved = {id(one): one.moved(moves.get(id(one), 0.0)) for one in run.processes}
    return dataclasses.replace(
        run,
        segments=[moved[id(one)] for one in run.segments],
        nodes=[moved[id(one)] for one in run.nodes],
        others={key: moved[id(one)] for key, one in run.others.items()},
        marks=[
            dataclasses.replace(mark, time=mark.time + seconds) if (seconds := moves.get(id(mark.by), 0.0)) else mark
            for mark in run.marks
        ],
    )


def _ahead(run: RunFacts) -> dict[_Clock, float]:
    """Seconds that clocks are ahead of the job's; 0 where it is less than a second or a step.

    An attempt that shows nothing (it ended before its first step) has what another attempt shows of the host.
    """
    limit = max(SKEW_TOLERATED_S, merged_typical([one.steps for one in run.segments]) or 0.0)
    ahead: dict[_Clock, float] = {}
    hosts: dict[str, float] = {}
    for attempt in cluster(run.segments):
        shown = _differences(attempt)
        clocks = {_clock(one): shown[one.host] for one in attempt.segments if one.host in shown}
        known = [seconds - ahead[clock] for clock, seconds in clocks.items() if clock in ahead]
        zero = median_low(known) if known else 0.0
        for clock, seconds in clocks.items():
            ahead.setdefault(clock, seconds - zero)
        hosts.update({host: seconds - zero for host, seconds in shown.items() if host not in hosts})
    for one in (*run.segments, *run.nodes, *run.others.values()):
        ahead.setdefault(_clock(one), hosts.get(one.host, 0.0))
    return {clock: seconds if abs(seconds) > limit else 0.0 for clock, seconds in ahead.items()}


def _differences(attempt: Attempt) -> dict[str, float]:
    """Seconds by which hosts are ahead in one attempt, of those that ended the same steps; empty for a single host."""
    lanes = [attempt.lanes[lane][-1] for lane in sorted(attempt.lanes) if attempt.lanes[lane][-1].steps.high >= 0]
    hosts = list(dict.fromkeys(segment.host for segment in lanes))
    if len(hosts) < 2:
        return {}
    shift = max(segment.steps.shift for segment in lanes)
    ends: dict[tuple[int, int], dict[str, float]] = {}
    for segment in lanes:
        for key, window in segment.steps.at_shift(shift).items():
            time = segment.window_end(window)
            if time is not None:
                ends.setdefault((key, window.last_step), {}).setdefault(segment.host, time)
    compared = [times for times in ends.values() if len(times) > 1]
    # One reference host for all steps, because differences to different references cannot be compared. Some hosts have
    # only one of the steps.
    count = Counter(host for times in compared for host in times)
    reference = max(count, key=lambda host: (count[host], -hosts.index(host)), default="")
    differences: dict[str, list[float]] = {}
    for times in compared:
        for host, time in times.items() if reference in times else ():
            differences.setdefault(host, []).append(time - times[reference])
    middle = {host: median_low(values) for host, values in differences.items()}
    first = next((middle[host] for host in hosts if host in middle), 0.0)
    zero = median_low(middle.values()) if len(middle) > 2 else first
    return {host: value - zero for host, value in middle.items()}
