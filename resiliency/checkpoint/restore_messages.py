"""What ranks tell each other during a restore, and how it is encoded. Pure, no torch.

A message is checked where it is decoded; what another version of the library sent is refused with the rank and the
field, on every rank alike, because every rank decodes every message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from resiliency.checkpoint.inventory import StepInventory
from resiliency.errors import ConfigError
from resiliency.storage._decode import field, objects
from resiliency.storage.sources import BadCopy

__all__ = ["CopyProblem", "InventoryReport", "ProblemReport"]


def _parse(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} cannot be read: {error}; start all ranks with the same version of this library"
        ) from error


@dataclass(frozen=True, kw_only=True)
class InventoryReport:
    """What one rank found on the tiers it lists.

    Attributes:
        entries: what it found.
        problem: why a tier could not be listed; empty when all could.
    """

    entries: tuple[StepInventory, ...]
    problem: str = ""

    def encode(self) -> bytes:
        """JSON, ASCII only."""
        return json.dumps({"entries": [entry.to_dict() for entry in self.entries], "problem": self.problem}).encode()

    @classmethod
    def decode(cls, data: bytes, *, rank: int) -> InventoryReport:
        """Reads the report of ``rank``.

        Raises:
            ConfigError: it is none; says what is wrong with it.
        """
        what = f"the checkpoint inventory of rank {rank}"
        message = _parse(data, what)
        entries = objects(message, "entries", what=what)
        return cls(
            entries=tuple(StepInventory.from_dict(entry, what=what) for entry in entries),
            problem=field(message, "problem", str, what=what),
        )


@dataclass(frozen=True, kw_only=True)
class CopyProblem:
    """Why a copy of a shard cannot be used.

    Attributes:
        copy: which one.
        reason: for people.
        damaged: True when its bytes are wrong, False when a tier failed.
    """

    copy: BadCopy
    reason: str
    damaged: bool


@dataclass(frozen=True, kw_only=True)
class ProblemReport:
    """The bad copies one rank found in one phase of a restore."""

    problems: tuple[CopyProblem, ...]

    def encode(self) -> bytes:
        """JSON, ASCII only."""
        problems = [{"copy": p.copy.to_dict(), "reason": p.reason, "damaged": p.damaged} for p in self.problems]
        return json.dumps({"problems": problems}).encode()

    @classmethod
    def decode(cls, data: bytes, *, rank: int) -> ProblemReport:
        """Reads the report of ``rank``.

        Raises:
            ConfigError: it is none; says what is wrong with it.
        """
        what = f"the list of bad copies of rank {rank}"
        found = []
        for item in objects(_parse(data, what), "problems", what=what):
            found.append(
                CopyProblem(
                    copy=BadCopy.from_dict(field(item, "copy", dict, what=what), what=what),
                    reason=field(item, "reason", str, what=what),
                    damaged=field(item, "damaged", bool, what=what),
                )
            )
        return cls(problems=tuple(found))
