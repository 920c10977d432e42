"""Tickets and outcomes of saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from resiliency.errors import ConfigError, ResiliencyError, Timeout
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = ["LOCAL", "Outcome", "Ticket", "checked_stage"]

#: Name of the local tier in tickets, outcomes and events.
LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A stage that a save has reached on a tier, or its failure there; returned by ``Checkpointer.poll``.

    Attributes:
        id: the save.
        tier: name of the tier.
        stage: the stage reached, COMMITTED or DURABLE; None: the save failed.
        reason: why it failed; "" otherwise.
        names: names of the step.
        retrying: the agent tries again after this failure; another outcome of this save and tier will follow.
    """

    id: StepId
    tier: str
    stage: Stage | None
    reason: str = ""
    names: tuple[str, ...] = ()
    retrying: bool = False

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def failed(self) -> bool:
        return self.stage is None


@dataclass(kw_only=True)
class Ticket:
    """Handle of one save. Thread: training.

    Attributes:
        id: step, attempt and serial of the save.
        nbytes: size of this rank's shard in bytes.
        names: names of the step.
        tiers: tiers the save goes to, the local one first.
        can_be_durable: those tiers on which a save can survive a power loss (not a ramdisk).
        stall_s: seconds that the call to ``save`` took.
        failed: why the save failed on the local tier; None: it has not.
        given_up: remote tier -> why the save will not reach it.
    """

    id: StepId
    nbytes: int
    names: tuple[str, ...]
    tiers: tuple[str, ...]
    can_be_durable: tuple[str, ...]
    stall_s: float = 0.0
    failed: str | None = None
    given_up: dict[str, str] = field(default_factory=dict)
    _wait: Callable[[Ticket, Stage, str | None, float], None]
    _stages: dict[str, Stage] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.id.step

    def stage(self, tier: str = LOCAL) -> Stage | None:
        """The last stage that the save has reached on a tier; None: none yet."""
        return self._stages.get(tier)

    def has_reached(self, stage: Stage, *, tier: str | None = None) -> bool:
        """True when the save has reached ``stage`` on ``tier``. Without ``tier``: DURABLE on any tier, other stages on
        the local tier."""
        places = tuple(self._stages) if tier is None and stage is Stage.DURABLE else (tier or LOCAL,)
        return any(place in self._stages and stage.reached_by(self._stages[place]) for place in places)

    def is_hopeless(self, stage: Stage, *, tier: str | None = None) -> bool:
        """True when the save can no longer reach ``stage`` on ``tier``; without ``tier`` as in :meth:`has_reached`."""
        if self.failed is not None:
            return True
        if tier is not None or stage is not Stage.DURABLE:
            return tier in self.given_up
        return bool(self.can_be_durable) and set(self.can_be_durable) <= self.given_up.keys()

    def mark_reached(self, stage: Stage, tier: str = LOCAL) -> None:
        """Records a stage reached on a tier, unless a later one was reached before. Called by the checkpointer."""
        before = self._stages.get(tier)
        if before is None or before.reached_by(stage):
            self._stages[tier] = stage

    def wait(
        self, stage: Stage = Stage.COMMITTED, *, tier: str | None = None, timeout: timedelta = timedelta(minutes=5)
    ) -> None:
        """Blocks until the save has reached ``stage``, up to ``timeout``. Collective: no, but other ranks must save
        too.

        Args:
            stage: COPIED, RECORDED, COMMITTED or DURABLE.
            tier: name of the tier; None: DURABLE on any tier, the other stages on the local tier.

        Raises:
            ConfigError: the save cannot reach ``stage``: it does not go to ``tier``, or it can be durable on none of
                its tiers.
            Timeout: the save did not reach ``stage`` in time.
            ResiliencyError: the save failed; the message says why.
        """
        checked_stage(stage)
        self._check_possible(stage, tier)
        self._wait(self, stage, tier, timeout.total_seconds())
        if not self.has_reached(stage, tier=tier):
            if self.failed is not None:
                raise ResiliencyError(f"the checkpoint of step {self.step} failed: {self.failed}")
            if self.is_hopeless(stage, tier=tier):
                reasons = self.given_up if tier is None else {tier: self.given_up[tier]}
                where = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
                raise ResiliencyError(f"the checkpoint of step {self.step} will not be {stage} on {where}")
            where = f" on {tier}" if tier is not None else ""
            raise Timeout(
                f"the checkpoint of step {self.step} was not {stage}{where} within {timeout}; see the agent's log"
            )

    def _check_possible(self, stage: Stage, tier: str | None) -> None:
        if tier is not None and tier not in self.tiers:
            raise ConfigError(
                f"the save of step {self.step} does not go to tier {tier!r}; it goes to {list(self.tiers)}"
            )
        if stage is Stage.DURABLE and not (self.can_be_durable if tier is None else tier in self.can_be_durable):
            raise ConfigError(
                f"the save of step {self.step} is on a ramdisk and never durable there; wait for Stage.COMMITTED,"
                " or add a remote tier that gets it"
            )


def checked_stage(stage: Stage) -> Stage:
    """Returns ``stage``.

    Raises:
        TypeError: ``stage`` is not a Stage.
    """
    if not isinstance(stage, Stage):
        known = ", ".join(f"Stage.{known.name}" for known in Stage)
        raise TypeError(f"stage={stage!r} is a {type(stage).__name__}; pass one of {known}")
    return stage
