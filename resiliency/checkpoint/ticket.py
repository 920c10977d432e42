"""What became of a save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from resiliency.errors import ConfigError, ResiliencyError, Timeout

__all__ = ["Level", "Outcome", "Ticket"]

#: committed: the manifest is written, survives the death of every process. durable: survives a power loss.
Level = Literal["copied", "committed", "durable"]

_LEVELS = ("copied", "committed", "durable")


@dataclass(frozen=True)
class Outcome:
    """News about a save, returned by ``Checkpointer.poll``.

    Attributes:
        step: of the save.
        kind: "committed", "durable" or "failed".
        tier: where.
        reason: why it failed.
        names: names of the step.
        serial: which save of that step.
        retrying: failed, and tried again by the agent: a later outcome of this save and tier tells how it ended.
    """

    step: int
    kind: Literal["committed", "durable", "failed"]
    tier: str
    reason: str = ""
    names: tuple[str, ...] = ()
    serial: int = 0
    retrying: bool = False


@dataclass
class Ticket:
    """Handle of one save. Thread: training.

    Attributes:
        step: of the save.
        serial: 0 for the first save of that step, then 1, 2, ...
        nbytes: size of this rank's shard.
        stall_s: seconds the call to ``save`` took.
        reached: levels reached so far.
        failed: reason of a failure, or None.
    """

    step: int
    serial: int
    nbytes: int
    names: tuple[str, ...]
    _wait: Callable[[Ticket, str, float], None]
    stall_s: float = 0.0
    reached: set[str] = field(default_factory=set)
    failed: str | None = None

    def wait(self, level: Level = "committed", *, timeout: timedelta = timedelta(minutes=5)) -> None:
        """Blocks until the save has reached ``level`` on the local tier. Collective: no (but other ranks must save
        too).

        Raises:
            Timeout: it did not in time.
            ResiliencyError: the save failed; the message says why.
        """
        if level not in _LEVELS:
            raise ConfigError(f"level={level!r}; pass one of {', '.join(_LEVELS)}")
        self._wait(self, level, timeout.total_seconds())
        if level not in self.reached:
            if self.failed is not None:
                raise ResiliencyError(f"the checkpoint of step {self.step} failed: {self.failed}")
            raise Timeout(f"the checkpoint of step {self.step} was not {level} within {timeout}; see the agent's log")
