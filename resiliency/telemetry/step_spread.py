"""Compares the ranks of a job by their own work in a step, so that a straggler shows up by name. Pure.

Ranks that train together end their steps together, however unequal they are, because the fast ones wait. What tells
them apart is the time before they first wait for one another: the wait for data and the forward pass.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from resiliency.telemetry.step_observer import StepTiming

__all__ = ["RankSteps", "StepWindow", "spread_text", "straggler_text", "stragglers"]

#: Share of a step, and seconds. A rank that is behind the median by no more than the larger of both is not slow: so
#: much is noise of the host.
_LEAST_SHARE = 0.02
_LEAST_S = 0.001


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """Steps of one rank in a window of time.

    Attributes:
        window: number of the window, from 1 in each fit.
        first, last: numbers of the first and last step in it.
        own_s: mean seconds of the rank's own work in a step: the wait for data and the forward pass.
        step_s: mean seconds of a step.
    """

    rank: int
    host: str
    window: int
    first: int
    last: int
    own_s: float
    step_s: float

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankSteps:
        """Reads what :meth:`to_text` has written; raises ValueError or TypeError for other text."""
        return cls(**json.loads(text))


class StepWindow:
    """Sums the steps of this rank. Thread: one at a time."""

    def __init__(self, rank: int, host: str) -> None:
        self._rank, self._host = rank, host
        self._window = 0
        self._clear()

    def _clear(self) -> None:
        self._first = self._last = self._count = 0
        self._own = self._all = 0.0

    def add(self, timing: StepTiming) -> None:
        if not self._count:
            self._first = timing.step
        self._last = timing.step
        self._count += 1
        self._own += timing.own_s
        self._all += timing.duration_s

    def take(self) -> RankSteps | None:
        """Returns the steps since the last call; None when there were none."""
        if not self._count:
            return None
        self._window += 1
        taken = RankSteps(
            rank=self._rank,
            host=self._host,
            window=self._window,
            first=self._first,
            last=self._last,
            own_s=self._own / self._count,
            step_s=self._all / self._count,
        )
        self._clear()
        return taken


def stragglers(ranks: Sequence[RankSteps], *, factor: float) -> list[RankSteps]:
    """The ranks whose own work takes more than ``factor`` times the median, and more than noise, the slowest first."""
    if len(ranks) < 2:
        return []
    median = statistics.median_low(one.own_s for one in ranks)
    slow = [
        one
        for one in ranks
        if one.own_s > factor * median and one.own_s - median > max(_LEAST_S, _LEAST_SHARE * one.step_s)
    ]
    return sorted(slow, key=lambda one: (-one.own_s, one.rank))


def straggler_text(one: RankSteps, ranks: Sequence[RankSteps]) -> str:
    """The sentence that names the straggler ``one`` and compares it with the median of ``ranks``."""
    median = statistics.median_low(each.own_s for each in ranks)
    times = f", {one.own_s / median:.1f} times the median" if median > 0 else ""
    return (
        f"rank {one.rank} on {one.host} holds up the others: its own work takes {one.own_s:.3f} s a step{times} of"
        f" {len(ranks)} ranks (steps {one.first} to {one.last})"
    )


def spread_text(ranks: Sequence[RankSteps], *, world_size: int) -> str:
    """The sentence that compares the fastest rank with the slowest."""
    fast, slow = min(ranks, key=lambda one: one.own_s), max(ranks, key=lambda one: one.own_s)
    said = f" ({len(ranks)} of {world_size} ranks)" if len(ranks) < world_size else ""
    last = max(one.last for one in ranks)
    return (
        f"Own work a step up to step {last}: {fast.own_s:.3f} s (rank {fast.rank} on {fast.host}) to"
        f" {slow.own_s:.3f} s (rank {slow.rank} on {slow.host}), of steps of {slow.step_s:.3f} s{said}"
    )
