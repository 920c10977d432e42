"""Identity of a save: which step, of which attempt. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

__all__ = ["StepId"]

_STEP_DIR = re.compile(r"^(\d{10,})-a(\d{4,})-([0-9a-f]{6})-(\d{2,})$")


@total_ordering
@dataclass(frozen=True)
class StepId:
    """Identity of one checkpoint: the step, and which save of which attempt of the run it is.

    Ordered by attempt first: what a later start of the job saved is newer than anything an earlier start left, even
    when the later one went back to an older step (because the newest was damaged, or because the user wanted to).

    Attributes:
        step: optimizer step (Lightning's ``global_step``), >= 0.
        attempt: 1 for the first start of the run, counted up at each start.
        token: 6 hex digits drawn at the start of the attempt, so that two starts never share a folder.
        serial: 0 for the first save of the step in the attempt, then 1, 2, ...
    """

    step: int
    attempt: int
    token: str
    serial: int = 0

    @property
    def dirname(self) -> str:
        """Name of the step's folder."""
        return f"{self.step:010d}-a{self.attempt:04d}-{self.token}-{self.serial:02d}"

    @classmethod
    def parse(cls, dirname: str) -> StepId | None:
        """The identity a folder name spells, or None when it is not a step folder."""
        match = _STEP_DIR.match(dirname)
        return cls(int(match[1]), int(match[2]), match[3], int(match[4])) if match else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepId:
        """The identity that ``step``, ``attempt``, ``token`` and ``serial`` of a JSON object spell.

        Raises:
            KeyError, TypeError, ValueError: one is missing, of another type or cannot be.
        """
        numbers = [data["step"], data["attempt"], data["serial"]]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise TypeError(f"step, attempt and serial must be whole numbers, not {numbers}")
        found = cls(data["step"], data["attempt"], str(data["token"]), data["serial"])
        if cls.parse(found.dirname) != found:
            raise ValueError(f"{found} is no identity of a step")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The four fields, for JSON."""
        return {"step": self.step, "attempt": self.attempt, "token": self.token, "serial": self.serial}

    def of_attempt(self, attempt: int, token: str) -> bool:
        """True when it was saved by this start of the job."""
        return (self.attempt, self.token) == (attempt, token)

    def __lt__(self, other: StepId) -> bool:
        return (self.attempt, self.step, self.serial, self.token) < (
            other.attempt,
            other.step,
            other.serial,
            other.token,
        )

    def __str__(self) -> str:
        again = f", save {self.serial + 1}" if self.serial else ""
        return f"step {self.step} (attempt {self.attempt}{again}, {self.token})"
