"""What became of the saves of one rank: the one being copied, the tickets of the last ones, and what the agent says of
them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resiliency.agent.protocol import MAX_SERIAL
from resiliency.checkpoint.arena import Arena, Slot
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.snapshot import Snapshot
from resiliency.checkpoint.ticket import Outcome, Ticket
from resiliency.errors import ConfigError
from resiliency.events import EventKind

__all__ = ["InFlightSave", "SaveTracker"]

logger = logging.getLogger(__name__)

#: Slots that stay mapped: one being filled, one being committed, one spare.
_MAPPED_SLOTS = 3
#: Tickets of this many saves are kept up to date.
_TICKETS = 64


@dataclass
class InFlightSave:
    """The save whose shard the agent has not recorded yet; there is one at most.

    Attributes:
        snapshot: its copy, until it was fenced.
        sealed_at: monotonic time when the whole shard was handed to the agent.
        supersedes: names that go once it is committed.
        undo: forgets that this save was to go to slower tiers.
    """

    ticket: Ticket
    slot: Slot
    snapshot: Snapshot | None = None
    sealed_at: float | None = None
    supersedes: list[str] = field(default_factory=list)
    undo: Callable[[], None] | None = None


class SaveTracker:
    """Keeps tickets and outcomes up to date with what the agent says. Thread: training.

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
        self._tickets: dict[tuple[int, int], Ticket] = {}
        self._serials: dict[int, int] = {}
        self._uncounted: set[tuple[int, int]] = set()
        self._outcomes: list[Outcome] = []
        self.in_flight: InFlightSave | None = None
        self.skipped = 0

    # -- saves of this rank ---------------------------------------------------------------------------------------

    def serial(self, step: int) -> int:
        """Number of the next save of ``step`` in this attempt.

        Raises:
            ConfigError: there were too many.
        """
        serial = self._serials.get(step, 0)
        if serial > MAX_SERIAL:
            raise ConfigError(f"step {step} was saved {serial} times in this attempt; pass a step that counts up")
        return serial

    def begin(self, ticket: Ticket, slot: Slot, supersedes: Sequence[str]) -> InFlightSave:
        """A save was started: it is the one in in_flight now."""
        self._tickets[ticket.step, ticket.serial] = ticket
        self._serials[ticket.step] = ticket.serial + 1
        self.in_flight = InFlightSave(ticket, slot, supersedes=list(supersedes))
        return self.in_flight

    def fail(self, in_flight: InFlightSave, reason: str) -> None:
        """The save came to nothing in this process. One warning, an event, an outcome."""
        in_flight.ticket.failed = reason
        if self.in_flight is in_flight:
            self.in_flight = None
        step = in_flight.ticket.step
        self._session.events.emit(EventKind.CHECKPOINT_FAILED, step=step, reason=reason, tier="local", will_retry=True)
        self._outcomes.append(Outcome(step, "failed", "local", reason, in_flight.ticket.names, in_flight.ticket.serial))
        logger.warning("rank %d: checkpoint of step %d failed: %s; training goes on", self._rank, step, reason)

    def skip(self, step: int, reason: str, *, failed: bool = False) -> None:
        """No save was started. An event, an outcome, and a warning the first time."""
        self.skipped += 1
        kind = EventKind.CHECKPOINT_FAILED if failed else EventKind.CHECKPOINT_SKIPPED
        self._session.events.emit(
            kind, step=step, reason=reason, tier="local", **({"will_retry": True} if failed else {})
        )
        self._outcomes.append(Outcome(step, "failed", "local", reason, serial=self._serials.get(step, 0)))
        level = logging.WARNING if self.skipped == 1 else logging.DEBUG
        logger.log(
            level,
            "rank %d: no checkpoint at step %d: %s; training goes on, the next save tries again",
            self._rank,
            step,
            reason,
        )

    @property
    def newest(self) -> tuple[int, int]:
        """Step and serial of the newest save of this attempt; (-1, 0) before the first."""
        return max(self._tickets, default=(-1, 0))

    def outcomes(self) -> list[Outcome]:
        """What happened since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- what the agent says --------------------------------------------------------------------------------------

    @property
    def waits_for_others(self) -> bool:
        """True while a save of this rank waits for ranks of other agents. Nothing announces their counts: they are
        asked for."""
        return bool(self._uncounted)

    def pump(self) -> None:
        """Takes in everything the agent has said. Blocks: no."""
        for message in self._session.client.poll():
            self._take(message)
        for step, serial in sorted(self._uncounted):
            recorded = self._count(step, serial, 0)
            if recorded is None:
                return
            if recorded >= self._coordinator.world_size:
                # What is older and not whole yet never will be: a rank failed there.
                self._uncounted = {key for key in self._uncounted if key > (step, serial)}
                self._session.client.send({"t": "complete", "step": step, "serial": serial})

    def wait(self, timeout_s: float) -> None:
        """Waits for something to be said, or a moment when others are waited for; then takes it in."""
        self._session.client.wait_message(min(timeout_s, 0.05) if self._uncounted else timeout_s)
        self.pump()

    def _count(self, step: int, serial: int, amount: int) -> int | None:
        """Ranks that have recorded a save, or None when the store is gone (rank 0 has ended): then nobody waits any
        more."""
        try:
            return self._coordinator.count(f"recorded/{self._session.token}/{step}/{serial}", amount)
        except RuntimeError as error:  # what every torch store raises
            logger.info(
                "rank %d: the job's store is gone (%s); saves of other hosts are not waited for", self._rank, error
            )
            waiting, self._uncounted = self._uncounted, set()
            if self._session.client.config.shared:
                # Rank 0 has ended. What is whole can still be seen in the folder.
                for key in sorted(waiting):
                    self._session.client.send({"t": "complete", "step": key[0], "serial": key[1]})
            return None

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message["t"]
        if kind == "free":
            self._arena.release(message["inode"], message["path"])
        elif kind == "gone":
            self._arena.forget(message["inode"])
        elif kind in ("recorded", "committed", "durable", "failed"):
            key = (int(message["step"]), int(message["serial"]))
            ticket = self._tickets.get(key)
            in_flight = self.in_flight if self.in_flight is not None and self.in_flight.ticket is ticket else None
            if kind == "recorded":
                self._recorded(key, in_flight)
            elif kind == "failed":
                self._failed(message, key, ticket, in_flight)
            elif ticket is not None:
                self._reached(kind, message["tier"], ticket)

    def _recorded(self, key: tuple[int, int], in_flight: InFlightSave | None) -> None:
        if in_flight is not None:
            self.in_flight = None
        if self._counted:
            self._uncounted.add(key)
            self._count(*key, 1)

    def _reached(self, kind: Any, tier: str, ticket: Ticket) -> None:
        if tier == "local":
            ticket.reached.add(kind)
            if kind == "committed" and not self._durable:
                ticket.reached.add("durable")  # as durable as a ramdisk gets
            if kind == "durable" or not self._durable:
                self._arena.trim(_MAPPED_SLOTS)
            for old in sorted(self._tickets)[:-_TICKETS]:
                del self._tickets[old]
        self._outcomes.append(Outcome(ticket.step, kind, tier, names=ticket.names, serial=ticket.serial))

    def _failed(
        self, message: Mapping[str, Any], key: tuple[int, int], ticket: Ticket | None, in_flight: InFlightSave | None
    ) -> None:
        if ticket is not None and message["tier"] == "local":
            ticket.failed = message["reason"]
            if in_flight is not None:
                self.in_flight = None
                if in_flight.undo is not None:
                    in_flight.undo()  # the next save goes there instead
        names = ticket.names if ticket is not None else ()
        retrying = bool(message.get("retrying"))
        self._outcomes.append(Outcome(key[0], "failed", message["tier"], message["reason"], names, key[1], retrying))
