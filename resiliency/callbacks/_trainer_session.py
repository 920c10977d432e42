"""State shared by the checkpoint callbacks of one trainer: engines by directory and run, and the resume."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resiliency.callbacks._places import CheckpointPlaces, EngineKey
from resiliency.callbacks._resume import Resume
from resiliency.callbacks._shared_engine import SharedEngine
from resiliency.callbacks._step_hooks import step_observer
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.ticket import Outcome, Ticket
from resiliency.errors import ConfigError
from resiliency.plugins.strategies.base import StrategyAdapter
from resiliency.storage.step_id import StepId
from resiliency.telemetry.step_events import StepEvents, log_steps

__all__ = ["OutcomeReceiver", "TrainerSession", "trainer_session"]

logger = logging.getLogger(__name__)

#: Outcomes are delivered for this many of the latest saves.
_DELIVERED_SAVES = 256


class OutcomeReceiver(Protocol):
    """Receives the outcomes of a save."""

    def save_outcome(self, outcome: Outcome) -> None: ...


class TrainerSession:
    """The shared state of one fit. Created by the first checkpoint callback that is set up, closed by the last.

    Threads: training thread.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps = step_observer(trainer)
        self.engines: dict[EngineKey, SharedEngine] = {}
        #: Names in use below each dirpath, the same on every rank: on disk, or of a save in flight.
        self.names: dict[str, set[str]] = {}
        #: False once something has changed tensors while they were copied late.
        self.lazy = True
        self.resume = Resume(trainer, self.engines)
        self._optimizer_hook: Any = None
        self._receivers: dict[tuple[EngineKey, StepId], weakref.ref[OutcomeReceiver]] = {}
        self._step_events: StepEvents | None = None

    # -- engines --------------------------------------------------------------------------------------------------

    def open(self, places: CheckpointPlaces, options: CheckpointerOptions) -> SharedEngine:
        """The engine of these places; opened by its first user. Collective: yes.

        Raises:
            ConfigError: it is in use with other tiers.
            TierError, AgentError, OSError: it cannot be used; every rank gets one of them.
        """
        key = places.key
        shared = self.engines.get(key)
        if shared is None:
            engine = Checkpointer(
                places.local,
                remotes=places.remotes,
                run=key.run,
                rank=self.trainer.global_rank,
                world_size=self.trainer.world_size,
                options=options,
            )
            engine.open()
            shared = self.engines[key] = SharedEngine(engine, places)
            if self._optimizer_hook is None:
                self._optimizer_hook = register_optimizer_step_pre_hook(self._before_any_step)
            # Steps are written into the log of the first engine, unless another log has them already.
            if self._step_events is None:
                self._step_events = log_steps(self.steps, lambda: engine.session.events)
        elif shared.places != places:
            raise ConfigError(
                f"two ModelCheckpoint callbacks use run {key.run!r} in {key.directory} with different tiers"
                f" ({shared.places.dirpath} and {places.dirpath});"
                " give them the same dirpath and tiers, or give each its own local_dir= or run="
            )
        shared.users += 1
        return shared

    def release(self, key: EngineKey, *, close: Callable[[Checkpointer], None]) -> None:
        """Ends one callback's use of an engine; the last user closes it, and the last engine ends the session."""
        shared = self.engines.get(key)
        if shared is None:
            return
        shared.users -= 1
        if shared.users > 0:
            return
        events = self._step_events
        if events is not None and events.writer is shared.engine.session.events:
            events.flush()
            self.steps.unsubscribe(events)
            self._step_events = None
        del self.engines[key]
        try:
            close(shared.engine)
        finally:
            self.end_if_unused()

    def end_if_unused(self) -> None:
        """Undoes all changes to the trainer and to torch when no engine is left."""
        if self.engines:
            return
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None
        self.resume.end()
        if self.trainer.__dict__.get(_ATTRIBUTE) is self:
            del self.trainer.__dict__[_ATTRIBUTE]

    def warm_up(self, key: EngineKey, adapter: StrategyAdapter) -> None:
        """Prepares shard files for full checkpoints; once per engine. Blocks: first touch, about 1-3 s per GiB."""
        shared = self.engines[key]
        if not shared.warm:
            shared.warm = True
            shared.engine.warm_up_for(adapter.expected_tensors(self.trainer))

    # -- outcomes of saves ----------------------------------------------------------------------------------------

    def register_save(self, key: EngineKey, ticket: Ticket, receiver: OutcomeReceiver) -> None:
        """Registers ``receiver`` for the outcomes of a save."""
        self._receivers[key, ticket.id] = weakref.ref(receiver)
        for old in list(self._receivers)[:-_DELIVERED_SAVES]:
            del self._receivers[old]
        self.steps.stall(ticket.stall_s)
        self.steps.save_in_flight = True

    def deliver_outcomes(self) -> None:
        """Delivers the outcomes of saves to the callbacks that took them. Blocks: no."""
        for key, shared in list(self.engines.items()):
            for outcome in shared.engine.poll():
                if outcome.tier == "local":
                    self.steps.save_in_flight = False
                reference = self._receivers.get((key, outcome.id))
                receiver = reference() if reference is not None else None
                if receiver is not None:
                    receiver.save_outcome(outcome)

    # -- fence ----------------------------------------------------------------------------------------------------

    def fence(self) -> float:
        """Waits until no pending copy of any engine reads live tensors. Returns seconds."""
        waited = 0.0
        for shared in self.engines.values():
            seconds, unchanged = shared.fence()
            waited += seconds
            self.lazy = self.lazy and unchanged
        if waited:
            self.steps.stall(waited)
        return waited

    def _before_any_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # With a closure in automatic optimisation the forward comes later, and on_before_optimizer_step fences.
        with_closure = bool(args[1:]) or bool(kwargs.get("closure"))
        if (
            with_closure
            and self.trainer.lightning_module.automatic_optimization
            and any(optimizer is known for known in self.trainer.optimizers)
        ):
            return
        self.fence()


_ATTRIBUTE = "_resiliency_trainer_session"


def trainer_session(trainer: Any) -> TrainerSession:
    """The trainer's session; creates it when there is none."""
    found: TrainerSession | None = trainer.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = TrainerSession(trainer)
        setattr(trainer, _ATTRIBUTE, found)
    return found
