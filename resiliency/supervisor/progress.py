"""What hosts have reported of a workload's present generation. Pure: no input, no output, no clock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from resiliency.runtime.messages.launcher import REPORT_S

__all__ = ["Progress"]

#: A generation counts as started when a rank is this many steps past the first step reported, even if other ranks have
#: reported none. Ranks that train together cannot be so far apart, so the others may be unable to report steps.
_STEPS_AHEAD = 3
#: Least time, in seconds, over which steps are counted to tell steps per second. Hosts report steps one apart within
#: milliseconds: two such reports alone would make a hundred steps a second.
_PACE_S = 2.0


@dataclass(kw_only=True)
class Progress:
    """Not stored, because hosts report it again.

    Attributes:
        placed: hosts that know their places.
        ended: hosts whose ranks have all finished.
        stepped: hosts of which a rank has made a step.
        step, first_step: the largest step of all ranks, and the first one reported; -1: none.
        progressed_s: when ``step`` was last seen to grow.
        made_s: that step was made after this time.
        steps_per_s: recent steps per second.
        paced_step, paced_s: the step and the time from which ``steps_per_s`` is counted.
    """

    generation: int = 0
    placed: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    stepped: set[str] = field(default_factory=set)
    step: int = -1
    first_step: int = -1
    began: bool = False
    progressed_s: float = -1.0
    made_s: float = -1.0
    steps_per_s: float = 0.0
    paced_step: int = -1
    paced_s: float = -1.0

    def reported(self, host: str, step: int, age_s: float, ended: bool, now_s: float) -> bool:
        """Takes the report of a host that has a place. Returns whether a new step was made.

        Args:
            step: -1: none yet.
            age_s: of the step, when the host's launcher looked.
        """
        self.placed.add(host)
        (self.ended.add if ended else self.ended.discard)(host)
        if step < 0:
            return False
        self.stepped.add(host)
        # The first step of a generation may be earlier than the last of the one before.
        if step <= self.step and self.began:
            return False
        if not self.began:
            self.first_step = self.paced_step = step
            self.paced_s = now_s
        elif now_s - self.paced_s >= _PACE_S:
            lately = (step - self.paced_step) / (now_s - self.paced_s)
            self.steps_per_s = (self.steps_per_s + lately) / 2 if self.steps_per_s else lately
            self.paced_step, self.paced_s = step, now_s
        self.step, self.began, self.progressed_s = step, True, now_s
        self.made_s = now_s - age_s - REPORT_S
        return True

    def has_started(self, hosts: Collection[str]) -> bool:
        """Whether the ranks of these hosts train."""
        return (self.stepped | self.ended).issuperset(hosts) or self.step >= self.first_step + _STEPS_AHEAD
