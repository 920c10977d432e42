"""Tracks what becomes of the saves of one rank: the one being copied, the tickets of the last ones, their outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from resiliency.agent.messages import Committed, Complete, Durable, Failed, FileFreed, FileGone, Notice, Recorded
from resiliency.checkpoint.arena import Arena, Slot
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.snapshot import Snapshot
from resiliency.checkpoint.ticket import LOCAL, Outcome, Ticket
from resiliency.events import EventKind
from resiliency.storage.manifest import StepId
from resiliency.storage.stage import Stage

__all__ = ["InFlightSave", "SaveTracker"]

logger = logging.getLogger(__name__)

#: Slots that stay mapped: one being filled, one being committed, one spare.
_MAPPED_SLOTS = 3
#: Tickets of this many saves are kept up to date.
_TICKETS = 64
#: Seconds between two looks at the counts of other agents' ranks, which nothing announces.
_COUNT_EVERY_S = 0.05


@dataclass
class InFlightSave:
    """The save whose shard the agent has not recorded yet; there is one at most.

    Attributes:
        snapshot: its copy, until it was fenced.
        sealed_at: monotonic time when the whole shard was handed to the agent.
        supersedes: names that go once it is committed.
        undo_schedule: forgets that this save was to go to slower tiers, so that the next one goes there.
    """

    ticket: Ticket
    slot: Slot
    snapshot: Snapshot | None = None
    sealed_at: float | None = None
    supersedes: list[str] = field(default_factory=list)
    undo_schedule: Callable[[], None] | None = None


class SaveTracker:
    """Keeps tickets and outcomes up to date with the agent's messages. Thread: training.

    Args:
        session: of this attempt.
        coordinator: where ranks of several agents count recorded shards.
        arena: gets the files back that the agent recycles.
        durable: whether the local tier can be more than committed.
    """

    def __init__(self, *, session: Session, coordinator: Coordinator, arena: Arena, durable: bool) -> None:
        self._session, self._coordinator, self._arena, self._durable = session, coordinator, arena, durable
        self._rank = coordinator.rank
        self._counted = not session.together and coordinator.world_size > 1
        self._tickets: dict[StepId, Ticket] = {}
        self._serials: dict[int, int] = {}
        self._uncounted: set[StepId] = set()
        self._outcomes: list[Outcome] = []
        self.in_flight: InFlightSave | None = None
        self.skipped = 0

    # -- saves of this rank ---------------------------------------------------------------------------------------

    def next_id(self, step: int) -> StepId:
        """Identity of the next save of ``step`` in this attempt."""
        return StepId(step, self._session.attempt, self._session.token, self._serials.get(step, 0))

    def begin(self, ticket: Ticket, slot: Slot, supersedes: Sequence[str]) -> InFlightSave:
        """A save was started: it is the one in flight now."""
        self._tickets[ticket.id] = ticket
        self._serials[ticket.step] = ticket.id.serial + 1
        self.in_flight = InFlightSave(ticket, slot, supersedes=list(supersedes))
        return self.in_flight

    def fail(self, in_flight: InFlightSave, reason: str) -> None:
        """The save came to nothing in this process. One warning, an event, an outcome."""
        ticket = in_flight.ticket
        ticket.failed = reason
        if self.in_flight is in_flight:
            self.in_flight = None
        self._session.events.emit(
            EventKind.CHECKPOINT_FAILED,
            step=ticket.step,
            reason=reason,
            tier=LOCAL,
            stage=str(Stage.COPIED),
            will_retry=True,
        )
        self._outcomes.append(Outcome(id=ticket.id, tier=LOCAL, stage=None, reason=reason, names=ticket.names))
        logger.warning("rank %d: checkpoint of step %d failed: %s; training goes on", self._rank, ticket.step, reason)

    def skip(self, step: int, reason: str, *, failed: bool = False) -> None:
        """No save was started. An event, an outcome, and a warning the first time."""
        self.skipped += 1
        kind = EventKind.CHECKPOINT_FAILED if failed else EventKind.CHECKPOINT_SKIPPED
        facts = {"will_retry": True, "stage": str(Stage.COPIED)} if failed else {}
        self._session.events.emit(kind, step=step, reason=reason, tier=LOCAL, **facts)
        self._outcomes.append(Outcome(id=self.next_id(step), tier=LOCAL, stage=None, reason=reason))
        level = logging.WARNING if self.skipped == 1 else logging.DEBUG
        logger.log(
            level,
            "rank %d: no checkpoint at step %d: %s; training goes on, the next save tries again",
            self._rank,
            step,
            reason,
        )

    @property
    def newest(self) -> StepId | None:
        """The newest save of this attempt; None before the first."""
        return max(self._tickets, default=None)

    def outcomes(self) -> list[Outcome]:
        """What happened since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- messages of the agent ------------------------------------------------------------------------------------

    @property
    def waits_for_others(self) -> bool:
        """True while a save of this rank waits for ranks of other agents, whose counts must be asked for."""
        return bool(self._uncounted)

    def process_messages(self) -> None:
        """Takes in everything the agent has said. Blocks: no."""
        for message in self._session.client.poll():
            self._process(message)
        for step in sorted(self._uncounted):
            recorded = self._count(step, 0)
            if recorded is None:
                return
            if recorded >= self._coordinator.world_size:
                # What is older and not whole yet never will be: a rank failed there.
                self._uncounted = {other for other in self._uncounted if other > step}
                self._session.client.send(Complete(id=step))

    def wait(self, timeout_s: float) -> None:
        """Waits for a message, or a moment when others are waited for; then takes in what came."""
        self._session.client.wait_message(min(timeout_s, _COUNT_EVERY_S) if self._uncounted else timeout_s)
        self.process_messages()

    def _count(self, step: StepId, amount: int) -> int | None:
        """Adds to the number of ranks that have recorded a save, and returns it; None when the store is gone (rank 0
        has ended): then nobody waits any more."""
        try:
            return self._coordinator.count(f"recorded/{step.dirname}", amount)
        except RuntimeError as error:  # what every torch store raises
            logger.info(
                "rank %d: the job's store is gone (%s); saves of other hosts are not waited for", self._rank, error
            )
            waiting, self._uncounted = self._uncounted, set()
            if self._session.client.config.shared:
                # Rank 0 has ended. What is whole can still be seen in the folder.
                for other in sorted(waiting):
                    self._session.client.send(Complete(id=other))
            return None

    def _process(self, message: Notice) -> None:
        if isinstance(message, FileFreed):
            self._arena.release(message.inode, message.path)
        elif isinstance(message, FileGone):
            self._arena.forget(message.inode)
        elif isinstance(message, Recorded):
            self._recorded(message.id)
        elif isinstance(message, Committed):
            self._reached(message.id, Stage.COMMITTED, message.tier)
        elif isinstance(message, Durable):
            self._reached(message.id, Stage.DURABLE, message.tier)
        elif isinstance(message, Failed):
            self._failed(message)

    def _take_off(self, step: StepId) -> InFlightSave | None:
        """The save in flight, if it is this one; it is in flight no more."""
        in_flight = self.in_flight
        if in_flight is None or in_flight.ticket.id != step:
            return None
        self.in_flight = None
        return in_flight

    def _recorded(self, step: StepId) -> None:
        self._take_off(step)
        if step in self._tickets:
            self._tickets[step].note(Stage.RECORDED)
        if self._counted:
            self._uncounted.add(step)
            self._count(step, 1)

    def _reached(self, step: StepId, stage: Stage, tier: str) -> None:
        ticket = self._tickets.get(step)
        if ticket is None:
            return
        ticket.note(stage, tier)
        if tier == LOCAL:
            if stage is Stage.DURABLE or not self._durable:
                self._arena.trim(_MAPPED_SLOTS)
            for old in sorted(self._tickets)[:-_TICKETS]:
                del self._tickets[old]
        self._outcomes.append(Outcome(id=step, tier=tier, stage=stage, names=ticket.names))

    def _failed(self, message: Failed) -> None:
        ticket = self._tickets.get(message.id)
        if ticket is not None and message.tier == LOCAL:
            ticket.failed = message.reason
            in_flight = self._take_off(message.id)
            if in_flight is not None and in_flight.undo_schedule is not None:
                in_flight.undo_schedule()
        self._outcomes.append(
            Outcome(
                id=message.id,
                tier=message.tier,
                stage=None,
                reason=message.reason,
                names=ticket.names if ticket is not None else (),
                retrying=message.retrying,
            )
        )
