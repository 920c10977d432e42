"""Finds ranks that slow down a workload, from the reports of the monitors of all its hosts. Pure: no input, no output.

Ranks that train together end their steps together, because the fast ones wait. They differ in their own work before
they first wait for each other (:mod:`resiliency.telemetry.step_spread`), and each rank publishes the sum of that. These
sums are compared over windows of time. A rank that is slow in several consecutive windows is a straggler; a short
disturbance is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from resiliency.runtime.messages.monitor import RankReport
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.telemetry.step_spread import RankSteps, straggler_text, stragglers

__all__ = ["StragglerWatch"]

#: Steps that each compared rank must have made in a window.
_LEAST_STEPS = 8
#: A rank is named after it was slow in this many consecutive windows, and again this many windows later if it still is.
_WINDOWS, _AGAIN = 3, 20

#: Highest value that is believed of a rank: larger ones cannot be computed with exactly.
_MOST = 1 << 53
#: By host, for each rank: its number, seconds of its own work, and steps. Plain tuples, because the garbage collector
#: need not look into them, and tens of thousands of ranks are kept for long.
_Work = dict[str, tuple[tuple[int, float, int], ...]]


@dataclass(kw_only=True)
class _Generation:
    """The reports of one generation.

    Attributes:
        before: what hosts had reported when the window began.
        slow: for each rank that was slow in the last window, the number of consecutive windows in which it was.
    """

    generation: int
    since_s: float
    windows: int = 0
    hosts: _Work = field(default_factory=dict)
    before: _Work = field(default_factory=dict)
    slow: dict[int, int] = field(default_factory=dict)


class StragglerWatch:
    """Compares the ranks of each workload. Thread: one.

    Args:
        factor: a rank is slow when its own work takes more than this many times the median, and at least 2% of a step
            more; 0: stragglers are not looked for.
        window_s: least time, in seconds, over which ranks are compared.
    """

    def __init__(self, *, factor: float, window_s: float) -> None:
        self._factor, self._window_s = factor, window_s
        self._generations: dict[str, _Generation] = {}

    def reported(self, workload: str, generation: int, host: str, ranks: tuple[RankReport, ...], now_s: float) -> None:
        """Takes the report of a host of the workload's present generation."""
        seen = self._generations.get(workload)
        if seen is None or seen.generation != generation:
            seen = self._generations[workload] = _Generation(generation=generation, since_s=now_s)
        seen.hosts[host] = tuple([(one.rank, min(one.own_s, _MOST), min(one.own_steps, _MOST)) for one in ranks])

    def look(self, now_s: float) -> list[Observation]:
        """Stragglers that were not named yet, or long ago. To be called about once a second."""
        if not self._factor:
            return []
        return [one for name, seen in self._generations.items() for one in self._look(name, seen, now_s)]

    def forget(self, workload: str) -> None:
        """The workload has ended."""
        self._generations.pop(workload, None)

    def _look(self, workload: str, seen: _Generation, now_s: float) -> Iterator[Observation]:
        length_s = now_s - seen.since_s
        if length_s < self._window_s:
            return
        compared = list(_compared(seen, length_s))
        if len(compared) > 1 and 0 <= min(one.last - one.first for one in compared) < _LEAST_STEPS:
            return  # the window goes on until there are enough steps
        seen.windows += 1
        seen.before, seen.since_s = dict(seen.hosts), now_s
        slow = stragglers(compared, factor=self._factor)
        seen.slow = {one.rank: seen.slow.get(one.rank, 0) + 1 for one in slow}
        for one in slow:
            if seen.slow[one.rank] % _AGAIN == _WINDOWS:
                yield Observation(
                    kind=ObservationKind.STRAGGLER,
                    host=one.host,
                    workload=workload,
                    generation=seen.generation,
                    rank=one.rank,
                    detail=straggler_text(one, compared),
                )


def _compared(seen: _Generation, length_s: float) -> Iterator[RankSteps]:
    """The ranks that measure their own work, with what it took since the window began."""
    for host, ranks in seen.hosts.items():
        before = {rank: (own_s, steps) for rank, own_s, steps in seen.before.get(host, ())}
        for rank, own_s, steps in ranks:
            known_s, known_steps = before.get(rank, (0.0, 0))
            if not known_steps:
                continue  # first steps are no measure, because caches are filled and kernels chosen in them
            made = steps - known_steps
            yield RankSteps(
                rank=rank,
                host=host,
                window=seen.windows,
                first=known_steps,
                last=steps,
                own_s=(own_s - known_s) / made if made > 0 else 0.0,
                step_s=length_s / max(1, made),
            )
