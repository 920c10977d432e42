"""How much of a workload's time so far has made steps that were kept. Pure.

What the supervisor can know from heartbeats alone: when ranks went on, and from which step they began again. Stalls and
waits within steps are not taken off; the exact account is made of the event logs (``resiliency goodput report``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["GoodputWatch", "RunningGoodput", "Trained"]

#: Stretches that are told apart; the oldest are joined.
_MOST = 64


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Steps that an epoch has made one after the other.

    Attributes:
        first, last: optimizer steps done at its first and its last sign of progress; of a job that does not say its
            steps -1 and -1: then nothing is known to be lost.
        seconds: between them.
    """

    epoch: int
    first: int
    last: int
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunningGoodput:
    """
    Attributes:
        total_s: since the workload had its first places.
        trained: what it has made in that time, and has not lost, oldest first.
        at: UTC seconds of the last change.
    """

    total_s: float = 0.0
    trained: tuple[Trained, ...] = ()
    at: float = 0.0

    @property
    def share(self) -> float | None:
        """In [0, 1]; None: there was no time yet."""
        return min(1.0, sum(one.seconds for one in self.trained) / self.total_s) if self.total_s > 0 else None

    def passed(self, seconds: float, at: float) -> RunningGoodput:
        """Time has passed, whatever happened in it."""
        return replace(self, total_s=self.total_s + max(0.0, seconds), at=at)

    def progressed(self, epoch: int, step: int, seconds: float) -> RunningGoodput:
        """Ranks have come to a step.

        Args:
            step: optimizer steps done; -1: the job does not say.
            seconds: since the last sign of progress of the same epoch; of its first one it does not count.
        """
        last = self.trained[-1] if self.trained else None
        if last is not None and last.epoch == epoch:
            gone_on = replace(last, last=max(step, last.last), seconds=last.seconds + max(0.0, seconds))
            return replace(self, trained=(*self.trained[:-1], gone_on))
        kept = tuple(found for one in self.trained if (found := _until(one, step)) is not None)
        return replace(self, trained=_joined((*kept, Trained(epoch=epoch, first=step, last=step))))


def _until(one: Trained, step: int) -> Trained | None:
    """What is left of a stretch when training goes on from ``step``; None: nothing."""
    if step < 0 or one.last <= step:
        return one
    if one.first >= step:
        return None
    return replace(one, last=step, seconds=one.seconds * (step - one.first) / (one.last - one.first))


def _joined(trained: tuple[Trained, ...]) -> tuple[Trained, ...]:
    if len(trained) <= _MOST:
        return trained
    one, other, *rest = trained
    joined = Trained(epoch=other.epoch, first=one.first, last=other.last, seconds=one.seconds + other.seconds)
    return joined, *rest


class GoodputWatch:
    """The figures of all workloads. Thread: one. All ``now_s`` are monotonic seconds."""

    def __init__(self) -> None:
        self._figures: dict[str, RunningGoodput] = {}
        self._looked_s: dict[str, float] = {}
        #: Of each workload: its epoch, and when that was seen to make progress last.
        self._progressed_s: dict[str, tuple[int, float]] = {}

    def restore(self, workload: str, figure: RunningGoodput, wall: float) -> None:
        """What a supervisor before this one has stored; time has passed since, by the wall clock."""
        self._figures[workload] = figure.passed(wall - figure.at, wall) if figure.at else figure

    def of(self, workload: str) -> RunningGoodput:
        return self._figures.get(workload, RunningGoodput())

    def look(self, workload: str, now_s: float, wall: float) -> None:
        """Time has passed for a workload that has had places, and has not ended."""
        passed_s = now_s - self._looked_s.get(workload, now_s)
        self._looked_s[workload] = now_s
        self._figures[workload] = self.of(workload).passed(passed_s, wall)

    def progressed(self, workload: str, epoch: int, step: int, now_s: float) -> None:
        """Its ranks have come to a step; -1: they do not say to which."""
        known, since_s = self._progressed_s.get(workload, (0, now_s))
        self._progressed_s[workload] = epoch, now_s
        passed_s = now_s - since_s if known == epoch else 0.0
        self._figures[workload] = self.of(workload).progressed(epoch, step, passed_s)

    def pause(self, workload: str) -> None:
        """It has ended; should it be begun again, the time between does not count."""
        self._looked_s.pop(workload, None)
