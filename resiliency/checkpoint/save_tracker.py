"""Tracks the saves of one rank: the save in flight, the tickets of the last saves, and their outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from resiliency.agent.messages import (
    Committed,
    Complete,
    Durable,
    Failed,
    GiveUp,
    NameRefused,
    Notice,
    Recorded,
)
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.save_health import SaveHealth
from resiliency.checkpoint.save_trace import SaveTrace
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.snapshot import Snapshot
from resiliency.checkpoint.ticket import LOCAL, Outcome, Ticket
from resiliency.errors import TierError, TornSnapshot
from resiliency.events import EventKind
from resiliency.storage.plan_groups import different_plans
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = ["InFlightSave", "SaveTracker"]

logger = logging.getLogger(__name__)

#: Number of saves whose tickets are kept up to date, besides those that are on their way to another tier.
_TICKETS = 64
#: Seconds between two reads of the count of recorded shards; the store does not notify of changes.
_COUNT_EVERY_S = 0.05
#: Added to that count by a rank that gives up its part: larger than any number of ranks.
_GIVEN_UP = 1 << 32
#: Ranks whose plan digest one count on the store can hold, a bit each.
_RANKS_PER_COUNT = 62


@dataclass
class InFlightSave:
    """The save whose shard the agent has not recorded yet; there is at most one.

    Attributes:
        plan: digest of what all ranks write.
        snapshot: its copy, until the fence.
        failure: why the copy failed; set by the copy thread.
        sealed_at: monotonic seconds when the shard was sealed; None: not yet.
        supersedes: names to delete once it is committed.
        trace: of this save, if it is traced.
        undo_schedule: removes this save from the schedule of the slower tiers, so that the next save goes there
            instead.
    """

    ticket: Ticket
    plan: str = ""
    snapshot: Snapshot | None = None
    failure: BaseException | None = None
    sealed_at: float | None = None
    supersedes: list[str] = field(default_factory=list)
    undo_schedule: Callable[[], None] | None = None
    trace: SaveTrace | None = None


class SaveTracker:
    """Keeps tickets and outcomes up to date with the agent's messages. Thread: training, except :meth:`copy_failed`.

    Args:
        session: of this attempt.
        coordinator: counts the recorded shards when the ranks have several agents.
    """

    def __init__(self, *, session: Session, coordinator: Coordinator) -> None:
        self._session, self._coordinator = session, coordinator
        self._rank = coordinator.rank
        self._counted = not session.together and coordinator.world_size > 1
        self._tickets: dict[StepId, Ticket] = {}
        self._serials: dict[int, int] = {}
        #: Saves that this rank has recorded, and not yet all ranks; with the digests of their plans.
        self._uncounted: dict[StepId, str] = {}
        self._hears_others = True  # until the store that counts does not answer any more
        self._outcomes: list[Outcome] = []
        self.in_flight: InFlightSave | None = None
        self.skipped = 0
        self._health = SaveHealth(self._rank, speaks=self._rank == session.local_ranks[0])
        #: Number of saves given up because tensors changed while they were copied.
        self.torn = 0

    # -- saves of this rank ---------------------------------------------------------------------------------------

    def next_id(self, step: int) -> StepId:
        """Identity of a save of ``step`` that begins now. Call it once per save, even if this rank then skips or
        refuses the save: other ranks may save it, and the next save of the same step needs another identity."""
        session = self._session
        serial = self._serials.get(step, 0)
        self._serials[step] = serial + 1
        return StepId(step, session.attempt, session.token, serial, session.lineage.line)

    def begin(self, ticket: Ticket, supersedes: Sequence[str], *, plan: str = "") -> InFlightSave:
        """Registers a started save as the one in flight."""
        self._tickets[ticket.id] = ticket
        self._health.begin(ticket.tiers)
        self.in_flight = InFlightSave(ticket, plan, supersedes=list(supersedes))
        return self.in_flight

    def copy_failed(self, in_flight: InFlightSave, failure: BaseException) -> None:
        """Passes a failed copy to the training thread, which may be waiting for it, and reports it. Thread: any.
        Blocks: no."""
        in_flight.failure = failure
        if in_flight.trace is not None:
            in_flight.trace.end(_why(failure))
        self._session.client.wake()

    def fail(self, in_flight: InFlightSave, reason: str, *, kind: str = "") -> None:
        """Reports that the save failed in this process: an event, an outcome, and a warning, unless an earlier save
        failed for the same ``kind`` of reason and none has succeeded since."""
        ticket = in_flight.ticket
        ticket.failed = reason
        if in_flight.trace is not None:
            in_flight.trace.end(reason)
        if self.in_flight is in_flight:
            self.in_flight = None
        if in_flight.undo_schedule is not None:
            in_flight.undo_schedule()
        self._session.events.emit(
            EventKind.CHECKPOINT_FAILED,
            step=ticket.step,
            reason=reason,
            tier=LOCAL,
            stage=str(Stage.COPIED),
            will_retry=True,
        )
        self._outcomes.append(Outcome(id=ticket.id, tier=LOCAL, stage=None, reason=reason, names=ticket.names))
        self._health.fail(ticket.step, reason, kind=kind)
        self._give_up(ticket.id, reason)

    def skip(self, save: StepId, reason: str) -> None:
        """Reports that no save was started: an event, an outcome, and, the first time, a warning."""
        self.skipped += 1
        self._session.events.emit(EventKind.CHECKPOINT_SKIPPED, step=save.step, reason=reason, tier=LOCAL)
        self._outcomes.append(Outcome(id=save, tier=LOCAL, stage=None, reason=reason))
        self._health.skip(save.step, reason)
        self._give_up(save, reason)

    def refuse(self, save: StepId, reason: str) -> None:
        """Reports that a state cannot be stored: an event. The caller of the save gets the error, and warns."""
        self._session.events.emit(
            EventKind.CHECKPOINT_FAILED,
            step=save.step,
            reason=reason,
            tier=LOCAL,
            stage=str(Stage.COPIED),
            will_retry=False,
        )
        self._give_up(save, reason)

    def summarise(self) -> None:
        """Warns of the number of saves given up; call it at the end."""
        self._health.summarise()

    @property
    def newest(self) -> StepId | None:
        """The newest save of this attempt; None before the first."""
        return max(self._tickets, default=None)

    def outcomes(self) -> list[Outcome]:
        """The outcomes since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- messages of the agent ------------------------------------------------------------------------------------

    def parts_of_others(self, stage: Stage, tier: str | None) -> set[tuple[str, StepId]]:
        """The (tier, save) of which parts of other ranks are missing, without which what this rank has saved does not
        reach a stage: COMMITTED on the local tier, or DURABLE also on a remote one.

        Args:
            tier: for DURABLE: looks only at this tier; None: all.
        """
        missing = {(LOCAL, step) for step in self._uncounted}
        if self._hears_others:
            missing |= self._newest_lacks(LOCAL, Stage.RECORDED, Stage.COMMITTED)
        if stage is Stage.DURABLE:
            remotes = {name for ticket in self._tickets.values() for name in ticket.tiers} - {LOCAL}
            for name in remotes if tier is None else remotes & {tier}:
                missing |= self._newest_lacks(name, Stage.COMMITTED, Stage.DURABLE)
        return missing

    def _newest_lacks(self, tier: str, reached: Stage, wanted: Stage) -> set[tuple[str, StepId]]:
        """The newest save for a tier that has reached one stage on the local tier, if it has not reached another one on
        that tier. Of older ones nothing more is heard: a rank failed there, or they gave way."""
        there = [
            ticket
            for ticket in self._tickets.values()
            if tier in (LOCAL, *ticket.tiers) and ticket.failed is None and ticket.has_reached(reached)
        ]
        newest = max(there, key=lambda ticket: ticket.id, default=None)
        if newest is None or newest.has_reached(wanted, tier=tier) or tier in newest.given_up:
            return set()
        return {(tier, newest.id)}

    def process_messages(self) -> None:
        """Handles all messages received from the agent, and the failure of a copy. Blocks: no, but for requests to the
        store."""
        if self.in_flight is not None and self.in_flight.failure is not None:
            failure = self.in_flight.failure
            self.torn += isinstance(failure, TornSnapshot)
            self.skipped += isinstance(failure, TierError)  # no file could be made, so nothing was copied
            self.fail(self.in_flight, _why(failure), kind=type(failure).__name__)
        for message in self._session.client.poll():
            self._process(message)
        for step in sorted(self._uncounted):
            recorded = self._count(step, 0)
            if recorded is None:
                return
            reason, everybody = "", range(self._coordinator.world_size)
            if recorded % _GIVEN_UP >= len(everybody):
                alike = self._planned_alike(step)
                if alike is None:
                    return
                others = alike.symmetric_difference(everybody)
                reason = different_plans([alike, others]) if others else ""
            if reason or recorded >= _GIVEN_UP:
                self._given_up(step, reason or "another rank gave its part up")
            elif recorded >= len(everybody):
                # Older saves that are still incomplete will never be committed, because a rank failed there.
                self._uncounted = {other: plan for other, plan in self._uncounted.items() if other > step}
                self._session.client.send(Complete(id=step))

    def wait(self, timeout_s: float) -> None:
        """Blocks until a message comes, at most ``timeout_s``, or 50 ms while waiting for other ranks; then handles the
        messages received."""
        pause = _COUNT_EVERY_S if self._uncounted else timeout_s
        self._session.client.wait_message(min(timeout_s, pause))
        self.process_messages()

    def _planned_alike(self, step: StepId) -> set[int] | None:
        """The ranks whose plan of a save that all have recorded is that of this rank; None as for :meth:`_add`."""
        found: set[int] = set()
        for first in range(0, self._coordinator.world_size, _RANKS_PER_COUNT):
            bits = self._add(_plan_topic(step, self._uncounted[step], first), 0)
            if bits is None:
                return None
            found.update(first + bit for bit in range(_RANKS_PER_COUNT) if bits >> bit & 1)
        return found

    def _count(self, step: StepId, amount: int) -> int | None:
        """Adds to the number of ranks that have recorded a save, and returns it; None as for :meth:`_add`."""
        return self._add(f"recorded/{step.dirname}", amount)

    def _add(self, topic: str, amount: int) -> int | None:
        """Adds to a count of the job's store, and returns it.

        None when the store does not answer (rank 0 has exited); then this rank stops waiting for other ranks.
        """
        try:
            return self._coordinator.count(topic, amount)
        except RuntimeError as error:  # what every torch store raises
            logger.info(
                "rank %d: the job's store does not answer (%s); no longer waiting for records of other hosts",
                self._rank,
                error,
            )
            self._hears_others = False
            waiting, self._uncounted = self._uncounted, {}
            if self._session.client.config.shared:
                # In a shared folder the agent itself sees which steps have all records.
                for other in sorted(waiting):
                    self._session.client.send(Complete(id=other))
            return None

    def _give_up(self, step: StepId, reason: str) -> None:
        """Tells the agent, and the ranks that wait for this rank's part, that the part will not come."""
        self._uncounted.pop(step, None)
        if self._counted:
            self._count(step, _GIVEN_UP)
        if self._coordinator.world_size > 1:
            self._session.client.send(GiveUp(id=step, reason=reason))

    def _given_up(self, step: StepId, reason: str) -> None:
        """Handles that a step will never be whole, because of other ranks."""
        self._uncounted.pop(step, None)
        ticket = self._tickets.get(step)
        if ticket is None or ticket.failed:
            return
        self._session.client.send(GiveUp(id=step, reason=reason))
        ticket.failed = reason
        self._outcomes.append(Outcome(id=step, tier=LOCAL, stage=None, reason=reason, names=ticket.names))
        self._health.fail(step.step, reason, kind="peer", own=False)

    def _process(self, message: Notice) -> None:
        if isinstance(message, Recorded):
            self._recorded(message.id)
        elif isinstance(message, Committed):
            self._reached(message.id, Stage.COMMITTED, message.tier)
        elif isinstance(message, Durable):
            self._reached(message.id, Stage.DURABLE, message.tier)
        elif isinstance(message, Failed):
            self._failed(message)
        elif isinstance(message, NameRefused):
            self._health.refuse_name(message.tier, message.id.step, message.name, message.reason)

    def _land(self, step: StepId) -> InFlightSave | None:
        """Ends the flight of a save. Returns the save; None when it was not in flight."""
        in_flight = self.in_flight
        if in_flight is None or in_flight.ticket.id != step:
            return None
        self.in_flight = None
        return in_flight

    def _recorded(self, step: StepId) -> None:
        landed = self._land(step)
        if step in self._tickets:
            self._tickets[step].mark_reached(Stage.RECORDED)
        if self._counted and step not in self._uncounted:  # else Ctrl-C came, and the message a second time
            plan = self._uncounted[step] = landed.plan if landed is not None else ""
            first = self._rank - self._rank % _RANKS_PER_COUNT
            self._add(_plan_topic(step, plan, first), 1 << self._rank - first)
            self._count(step, 1)

    def _reached(self, step: StepId, stage: Stage, tier: str) -> None:
        ticket = self._tickets.get(step)
        if ticket is None:
            return
        if tier == LOCAL and ticket.failed is not None and not ticket.has_reached(Stage.COMMITTED):
            return  # a later agent has found the files of a save that failed before it had its names
        ticket.mark_reached(stage, tier)
        self._health.reach(tier, ticket.step, stage)
        if tier == LOCAL:
            for old in sorted(self._tickets)[:-_TICKETS]:
                if not _is_on_its_way(self._tickets[old]):
                    del self._tickets[old]
        self._outcomes.append(Outcome(id=step, tier=tier, stage=stage, names=ticket.names))

    def _failed(self, message: Failed) -> None:
        ticket = self._tickets.get(message.id)
        step, reason = message.id.step, message.reason
        if message.tier != LOCAL:
            if ticket is not None and not message.retrying:
                ticket.given_up[message.tier] = reason
            if not message.retrying and not message.id.of_attempt(self._session.attempt, self._session.token):
                self._health.begin([message.tier])  # a step of an earlier attempt, not counted yet
            self._health.fail_remote(message.tier, step, reason, retrying=message.retrying, gave_way=message.gave_way)
        elif ticket is not None:
            ticket.failed = reason
            in_flight = self._land(message.id)
            if in_flight is not None and in_flight.undo_schedule is not None:
                in_flight.undo_schedule()
            if ticket.has_reached(Stage.COMMITTED, tier=LOCAL):
                self._health.not_durable(step, reason)
            else:
                self._health.fail(step, reason, kind="agent", own=in_flight is not None)
                self._uncounted.pop(message.id, None)
                if self._counted:
                    self._count(message.id, _GIVEN_UP)
        self._outcomes.append(
            Outcome(
                id=message.id,
                tier=message.tier,
                stage=None,
                reason=reason,
                names=ticket.names if ticket is not None else (),
                retrying=message.retrying,
            )
        )


def _plan_topic(step: StepId, plan: str, first: int) -> str:
    """The count whose bits are the ranks, from ``first`` on, that have recorded a save with this plan."""
    return f"recorded/{step.dirname}/{plan}/{first}"


def _is_on_its_way(ticket: Ticket) -> bool:
    """True while a save may still become durable on a tier behind the local one."""
    remotes = [tier for tier in ticket.tiers if tier != LOCAL and tier not in ticket.given_up]
    return ticket.failed is None and not all(ticket.has_reached(Stage.DURABLE, tier=tier) for tier in remotes)


def _why(failure: BaseException) -> str:
    """The failure as one sentence: the same for the log, the outcome and the trace."""
    return str(failure) if isinstance(failure, TierError) else f"the copy failed: {failure}"
