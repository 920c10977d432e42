"""The share of a workload's time so far in which it made steps that were kept. Pure: no input, no output, no clock.

It is derived from heartbeats alone: when ranks progressed, and from which step they began again. Stalls and waits
within steps are not subtracted; the exact account comes from the event logs (``resiliency goodput report``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["GoodputWatch", "RunningGoodput", "Stretch"]

#: Most stretches of training that are kept apart; beyond that the oldest are joined.
_MOST = 64


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of consecutive steps of one generation.

    Attributes:
        first, last: optimizer steps done at its first and its last sign of progress; both -1 for a job that does not
            report steps: then nothing counts as lost.
        seconds: between these two.
    """

    generation: int
    first: int
    last: int
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunningGoodput:
    """The time of one workload so far.

    Attributes:
        total_s: seconds since the workload had its first places.
        trained: stretches of training in that time that were not lost, oldest first.
        at: UTC seconds of the last change.
    """

    total_s: float = 0.0
    trained: tuple[Stretch, ...] = ()
    at: float = 0.0

    @property
    def share(self) -> float | None:
        """In [0, 1]; None while no time has passed."""
        return min(1.0, sum(one.seconds for one in self.trained) / self.total_s) if self.total_s > 0 else None

    def passed(self, seconds: float, at: float) -> RunningGoodput:
        """Adds time that has passed, whatever happened in it."""
        return replace(self, total_s=self.total_s + max(0.0, seconds), at=at)

    def progressed(self, generation: int, step: int, seconds: float) -> RunningGoodput:
        """Ranks have reached a step.

        Args:
            step: optimizer steps done; -1: the job does not report them.
            seconds: since the last sign of progress of the same generation; ignored for the first one of a generation.
        """
        last = self.trained[-1] if self.trained else None
        if last is not None and last.generation == generation:
            gone_on = replace(last, last=max(step, last.last), seconds=last.seconds + max(0.0, seconds))
            return replace(self, trained=(*self.trained[:-1], gone_on))
        kept = tuple(found for one in self.trained if (found := _until(one, step)) is not None)
        return replace(self, trained=_joined((*kept, Stretch(generation=generation, first=step, last=step))))


def _until(one: Stretch, step: int) -> Stretch | None:
    """The part of a stretch that is kept when training continues from ``step``; None when none is."""
    if step < 0 or one.last <= step:
        return one
    if one.first >= step:
        return None
    return replace(one, last=step, seconds=one.seconds * (step - one.first) / (one.last - one.first))


def _joined(trained: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    if len(trained) <= _MOST:
        return trained
    one, other, *rest = trained
    joined = Stretch(generation=other.generation, first=one.first, last=other.last, seconds=one.seconds + other.seconds)
    return joined, *rest


class GoodputWatch:
    """The running goodput of all workloads. Thread: one. ``now_s`` is monotonic seconds, ``wall`` is UTC seconds."""

    def __init__(self) -> None:
        self._figures: dict[str, RunningGoodput] = {}
        self._looked_s: dict[str, float] = {}
        #: By workload: the generation, and when its last progress was seen.
        self._progressed_s: dict[str, tuple[int, float]] = {}

    def restore(self, workload: str, figure: RunningGoodput, wall: float) -> None:
        """Takes over what an earlier supervisor has stored, and adds the time that has passed since by the wall
        clock."""
        self._figures[workload] = figure.passed(wall - figure.at, wall) if figure.at else figure

    def of(self, workload: str) -> RunningGoodput:
        return self._figures.get(workload, RunningGoodput())

    def look(self, workload: str, now_s: float, wall: float) -> None:
        """Adds the time since the last call, for a workload that has had places and has not ended."""
        passed_s = now_s - self._looked_s.get(workload, now_s)
        self._looked_s[workload] = now_s
        self._figures[workload] = self.of(workload).passed(passed_s, wall)

    def progressed(self, workload: str, generation: int, step: int, now_s: float) -> None:
        """Ranks have reached a step; -1: they do not report steps."""
        known, since_s = self._progressed_s.get(workload, (0, now_s))
        self._progressed_s[workload] = generation, now_s
        passed_s = now_s - since_s if known == generation else 0.0
        self._figures[workload] = self.of(workload).progressed(generation, step, passed_s)

    def pause(self, workload: str) -> None:
        """The workload has ended. If it is started again, the time in between does not count."""
        self._looked_s.pop(workload, None)
