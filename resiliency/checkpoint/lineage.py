"""The line of descent that the saves of an attempt belong to; it decides which step is the newest.

Steps are ordered by line, then by number. An attempt that loads the newest step goes on in that step's line: what
another job still saves there (one that was thought dead) is newer if its number is larger. One that loads an older
step, or nothing, begins a new line, above all that were ever seen: what is saved from there on is newer than what was
left. So does one that cannot know whether its step is the newest, because a tier cannot be listed.
"""

from __future__ import annotations

from resiliency.storage.step_id import StepId

__all__ = ["Lineage"]


class Lineage:
    """The line of one attempt. Thread: training.

    Every rank must make the same calls with the same values, because the line is part of a step's identity.

    Args:
        largest: the largest line of all steps seen at the start of the attempt, on all tiers by all ranks; 0: none.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._line: int | None = None

    @property
    def line(self) -> int:
        """Line of the next save. The first call begins one, unless a step was loaded."""
        return self._begin() if self._line is None else self._line

    def _begin(self) -> int:
        self._largest += 1
        self._line = self._largest
        return self._line

    def loaded(self, step: StepId, *, newest: StepId, largest: int, certain: bool = True) -> int:
        """The job goes on from ``step``. Returns the line of the next save.

        Args:
            newest: the newest step that there is, damaged ones included.
            largest: largest line of all steps seen now.
            certain: False when there may be newer steps, on a tier that could not be listed.
        """
        self._largest = max(self._largest, largest, step.line, newest.line)
        if step < newest or not certain:
            return self._begin()
        self._line = step.line
        return self._line

    def rise_to(self, line: int) -> None:
        """Goes on in a line with a larger number, if ``line`` is larger: that of the same job in another folder."""
        if line > self.line:
            self._line = self._largest = line
