"""Finds the rank of a workload that hangs, from the reports of the monitors of all its hosts. Pure: no input, no
output.

When one rank hangs, the others wait for it in a collective operation and are as quiet. A launcher compares the ranks of
its own host (:mod:`resiliency.launch.hangs`); this module compares the ranks of all hosts by the same rules. The
culprit is the rank that a signal has stopped; otherwise the one with the fewest beats; where all have made as many, the
one whose last beat is the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from resiliency.runtime.messages.monitor import RankReport
from resiliency.runtime.messages.observations import Observation, ObservationKind

__all__ = ["HangWatch"]

#: How often in a row the same rank must be found, with reports of all hosts in between: a report of one host is
#: compared with later reports of the others.
_FOUND = 2


@dataclass(kw_only=True)
class _Host:
    at_s: float
    ranks: tuple[RankReport, ...]


@dataclass(kw_only=True)
class _Generation:
    generation: int
    known: set[str] = field(default_factory=set)
    #: Latest report of each host while a rank is quiet. Otherwise nothing is kept, because there may be tens of
    #: thousands of ranks.
    hosts: dict[str, _Host] = field(default_factory=dict)
    #: Hosts with a rank that has been quiet, or stopped by a signal, for too long.
    suspicious: set[str] = field(default_factory=set)
    culprit: tuple[str, int] | None = None
    found: int = 0
    #: Hosts that have reported since the last comparison.
    fresh: set[str] = field(default_factory=set)
    said: bool = False


class HangWatch:
    """Compares the ranks of each workload. Thread: one.

    Args:
        steps: a rank hangs when it is quiet for longer than this many times its longest step.
        floor_s: and for longer than this, in seconds.
    """

    def __init__(self, *, steps: float, floor_s: float) -> None:
        self._steps, self._floor_s = steps, floor_s
        self._generations: dict[str, _Generation] = {}

    def reported(
        self, workload: str, generation: int, host: str, ranks: tuple[RankReport, ...], now_s: float
    ) -> Observation | None:
        """Takes the report of a host of the workload's present generation. Returns an observation that names the rank
        that hangs, once a generation; None otherwise."""
        seen = self._generations.get(workload)
        if seen is None or seen.generation != generation:
            seen = self._generations[workload] = _Generation(generation=generation)
        seen.known.add(host)
        if any(map(self._is_quiet, ranks)):
            seen.suspicious.add(host)
        else:
            seen.suspicious.discard(host)
        if not seen.suspicious or seen.said:
            if seen.hosts:
                seen.culprit, seen.found = None, 0
                seen.fresh.clear()
                seen.hosts.clear()
            return None
        seen.hosts[host] = _Host(at_s=now_s, ranks=ranks)
        seen.fresh.add(host)
        if len(seen.fresh) < len(seen.known):
            return None
        seen.fresh.clear()
        return self._look(workload, seen)

    def left(self, workload: str, generation: int, host: str) -> None:
        """All ranks of the host have finished: it reports no more of them, and is not waited for."""
        seen = self._generations.get(workload)
        if seen is not None and seen.generation == generation:
            seen.known.discard(host)
            seen.hosts.pop(host, None)
            seen.suspicious.discard(host)
            seen.fresh.discard(host)

    def forget(self, workload: str) -> None:
        """The workload has ended."""
        self._generations.pop(workload, None)

    def _look(self, workload: str, seen: _Generation) -> Observation | None:
        host, rank = self._culprit(seen)
        where = host, rank.rank
        seen.culprit, seen.found = where, seen.found + 1 if where == seen.culprit else 1
        if seen.found < _FOUND:
            return None
        seen.said = True
        return Observation(
            kind=ObservationKind.WORKER_HUNG,
            host=host,
            workload=workload,
            generation=seen.generation,
            rank=rank.rank,
            detail=self._text(rank, seen),
        )

    def _culprit(self, seen: _Generation) -> tuple[str, RankReport]:
        quiet = [(host, rank) for host in sorted(seen.suspicious) for rank in seen.hosts[host].ranks]
        quiet = [(host, rank) for host, rank in quiet if self._is_quiet(rank)]
        stopped = [(host, rank) for host, rank in quiet if rank.stopped_s > 0]
        # Sort by beats, then by the time of the rank's last sign of life on the supervisor's clock.
        return min(
            stopped or quiet, key=lambda one: (one[1].beats, seen.hosts[one[0]].at_s - one[1].quiet_s, one[1].rank)
        )

    def _is_quiet(self, rank: RankReport) -> bool:
        if rank.stopped_s > self._floor_s:
            return True
        return rank.watched and rank.quiet_s > max(self._floor_s, self._steps * rank.longest_s)

    def _text(self, rank: RankReport, seen: _Generation) -> str:
        if rank.stopped_s > 0:
            what = f"a signal has stopped it for {rank.stopped_s:.0f} s"
        else:
            what = f"no progress for {rank.quiet_s:.0f} s, its longest step took {rank.longest_s:.2g} s"
        others = [one.beats for one in _ranks(seen.hosts.values()) if one.rank != rank.rank]
        compared = f"; the others are at {min(others)} to {max(others)}" if others else ""
        return f"{what}; it is at step {rank.step}, {rank.phase or 'an unknown phase'}, {rank.beats} beats{compared}"


def _ranks(hosts: Iterable[_Host]) -> Iterable[RankReport]:
    return (rank for host in hosts for rank in host.ranks)
