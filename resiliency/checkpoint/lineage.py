"""The line of descent that the saves of an attempt belong to; it decides which step is the newest.

Steps are ordered by line, then by number. An attempt that loads the newest step continues that step's line: what
another job still saves there (one that was thought dead) is newer if its number is larger. An attempt that loads an
older step, or none, begins a new line, above all lines ever seen: its saves are newer than all that it left behind.
"""

from __future__ import annotations

from resiliency.storage.step_id import StepId

__all__ = ["Lineage"]


class Lineage:
    """The line of one attempt. Thread: training.

    Every rank must make the same calls with the same values, because the line is part of a step's identity.

    Args:
        largest: the largest line of all steps that any rank saw on any tier at the start of the attempt; 0: no steps.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._line: int | None = None

    @property
    def line(self) -> int:
        """Line of the next save. The first call begins a new line, unless a step was loaded."""
        return self._begin() if self._line is None else self._line

    def _begin(self) -> int:
        self._largest += 1
        self._line = self._largest
        return self._line

    def loaded(self, step: StepId, *, newest: StepId, largest: int) -> int:
        """Records that the job continues from ``step``. Returns the line of the next save.

        Args:
            newest: the newest step there is, damaged ones included.
            largest: the largest line of all steps seen now.
        """
        self._largest = max(self._largest, largest, step.line, newest.line)
        if step < newest:
            return self._begin()
        self._line = step.line
        return self._line

    def rise_to(self, line: int) -> None:
        """Continues in the given line if it is larger: that of the same job in another folder."""
        if line > self.line:
            self._line = self._largest = line
