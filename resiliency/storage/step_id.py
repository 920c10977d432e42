"""The identity of a save: its step, attempt and line of descent. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

__all__ = ["StepId"]

_STEP_DIR = re.compile(r"^(\d{10,})-a(\d{4,})-([0-9a-f]{6})-(\d{2,})(?:-l(\d{4,}))?$")


@total_ordering
@dataclass(frozen=True)
class StepId:
    """Identity of one checkpoint: the step, which save of which attempt of the run it is, and its line of descent.

    Ordered by line first, then by step. A start that goes on from the newest step stays on that step's line. One that
    goes back (because the newest step was damaged, or because the user wanted to) begins a new line, so that what is
    saved from there on is the newest, whatever its number. See resiliency.checkpoint.lineage.

    Attributes:
        step: optimizer step (Lightning's ``global_step``), >= 0.
        attempt: 1 for the first start of the run, counted up at each start.
        token: 6 hex digits drawn at the start of the attempt, so that two starts never share a folder.
        serial: 0 for the first save of the step in the attempt, then 1, 2, ...
        line: number of the line of descent, 1 or more. None: the attempt's number, as in folders that do not name it.
    """

    step: int
    attempt: int
    token: str
    serial: int = 0
    line: int = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        if self.line is None:
            object.__setattr__(self, "line", self.attempt)

    @property
    def dirname(self) -> str:
        """Name of the step's folder."""
        name = f"{self.step:010d}-a{self.attempt:04d}-{self.token}-{self.serial:02d}"
        return name if self.line == self.attempt else f"{name}-l{self.line:04d}"

    @classmethod
    def parse(cls, dirname: str) -> StepId | None:
        """The identity in the name of a folder; None when it is no step folder."""
        match = _STEP_DIR.match(dirname)
        if match is None:
            return None
        attempt = int(match[2])
        line = attempt if match[5] is None else int(match[5])
        if match[5] is not None and line in (0, attempt):
            return None  # the library writes no such name, and it would be a second name for one step
        return cls(int(match[1]), attempt, match[3], int(match[4]), line)

    @classmethod
    def from_jsonable(cls, data: Mapping[str, Any]) -> StepId:
        """Reads the identity from ``step``, ``attempt``, ``token``, ``serial`` and ``line`` of a JSON object.

        Raises:
            KeyError, TypeError, ValueError: a field other than ``line`` is missing, or one has another type or an
                impossible value.
        """
        line = data["line" if "line" in data else "attempt"]
        numbers = [data["step"], data["attempt"], data["serial"], line]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise TypeError(f"step, attempt, serial and line must be whole numbers, not {numbers}")
        found = cls(data["step"], data["attempt"], str(data["token"]), data["serial"], line)
        if cls.parse(found.dirname) != found:
            raise ValueError(f"{found} is no identity of a step")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The five fields, for JSON."""
        return {
            "step": self.step,
            "attempt": self.attempt,
            "token": self.token,
            "serial": self.serial,
            "line": self.line,
        }

    def of_attempt(self, attempt: int, token: str) -> bool:
        """True when it was saved by this start of the job."""
        return (self.attempt, self.token) == (attempt, token)

    @property
    def _order(self) -> tuple[int, int, int, int, str]:
        return self.line, self.step, self.attempt, self.serial, self.token

    def __lt__(self, other: StepId) -> bool:
        return self._order < other._order

    def __str__(self) -> str:
        again = f", save {self.serial + 1}" if self.serial else ""
        return f"step {self.step} (attempt {self.attempt}{again}, {self.token})"
