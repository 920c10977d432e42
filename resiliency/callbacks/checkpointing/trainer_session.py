"""State shared by the checkpoint callbacks of one trainer: engines by directory and run, and the resume.

An engine is opened only when it is needed. If Lightning does not call the last hooks of a fit (because another callback
raised in ``on_exception``), the next session in the process closes the session of that fit; Lightning offers no earlier
moment. In a process that Lightning has spawned, an exception reaches no hook at all, so the end of the process closes
the session.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from resiliency.callbacks.checkpointing.early_changes import EarlyChanges
from resiliency.callbacks.checkpointing.places import CheckpointPlaces, EngineKey
from resiliency.callbacks.checkpointing.resume import EngineUser, Resume
from resiliency.callbacks.checkpointing.shared_engine import SharedEngine
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.save_trace import SaveTrace
from resiliency.checkpoint.ticket import LOCAL, Outcome, Ticket
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import EventSink
from resiliency.plugins import _lightning
from resiliency.plugins.step_hooks import step_observer
from resiliency.storage.step_id import StepId
from resiliency.telemetry.step_events import StepEvents, log_steps

__all__ = [
    "OutcomeReceiver",
    "TrainerSession",
    "load_in_session",
    "places_loaders",
    "sessions_using",
    "trainer_session",
]

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
        #: Users of each engine, open or not.
        self.users: dict[EngineKey, list[EngineUser]] = {}
        #: Names in use below each dirpath, on disk or of a save in flight. The same on every rank.
        self.names: dict[str, set[str]] = {}
        #: Paths whose removal was requested and that have not been saved again since.
        self.going: set[str] = set()
        #: True once training has begun in this fit.
        self.training = False
        #: Seconds that this fit has waited for saves in settle(), for all its callbacks together.
        self.waited_at_end = 0.0
        #: The exception that a logger raised when it was notified of a save.
        self.logger_error: Exception | None = None
        #: Whether tensors may be copied late; False once something has changed them between a batch and its fence.
        self.lazy = True
        #: Called with the engine's key when a save begins; returns its trace, or None when the save is not traced.
        self.trace_save: Callable[[EngineKey], SaveTrace | None] = _no_trace
        self._early_changes = EarlyChanges()
        self.resume = Resume(trainer, self.engines, self.users)
        #: The optimizer step from which on the next step is saved without a name; None: none is wanted.
        self._wanted_step: int | None = None
        self._undo_slurm: Callable[[], None] | None = None
        self._receivers: dict[tuple[EngineKey, StepId], weakref.ref[OutcomeReceiver]] = {}
        self._step_events: StepEvents | None = None

    def __reduce__(self) -> Any:
        """A copy or pickle of the trainer has no session."""
        return _no_session, ()

    # -- engines --------------------------------------------------------------------------------------------------

    def register(self, user: EngineUser) -> None:
        """Adds a user of an engine, which may open it later.

        Raises:
            ConfigError: another callback uses the same run with other tiers.
        """
        _close_abandoned(self)
        others = self.users.setdefault(user.places.key, [])
        if others and others[0].places != user.places:
            mine, theirs = user.places, others[0].places
            raise ConfigError(
                f"two ModelCheckpoint callbacks use run {mine.key.run!r} in {mine.key.directory} with different tiers"
                f" ({theirs.dirpath} and {mine.dirpath});"
                " give them the same dirpath and tiers, or give each its own local_dir= or run="
            )
        others.append(user)

    def open(self, places: CheckpointPlaces, options: CheckpointerOptions) -> SharedEngine:
        """The engine of these places; the first call opens it. Collective: yes.

        Raises:
            TierError, AgentError: the engine cannot be used; every rank gets one of these errors.
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
                sinks=self._sinks(),
            )
            engine.before_step = self._before_step
            engine.open()
            shared = self.engines[key] = SharedEngine(engine, places)
            _live.add(self)
            _close_at_the_end_of_a_spawned_process()
            # The events of steps go into the log of the first engine, unless another log gets them already.
            if self._step_events is None:
                self._step_events = log_steps(self.steps, lambda: engine.session.events)
        return shared

    def _sinks(self) -> tuple[EventSink, ...]:
        """The trainer's callbacks' event sinks, for the engine whose log gets the steps; () for the other engines."""
        if any(isinstance(one, StepEvents) for one in self.steps.subscribers):
            return ()
        return tuple(sink for callback in self.trainer.callbacks for sink in getattr(callback, "event_sinks", ()))

    def level_lines(self) -> None:
        """Gives all engines the highest line of descent among them, so that steps in several folders are comparable."""
        if len(self.engines) > 1:
            line = max(shared.engine.line for shared in self.engines.values())
            for shared in self.engines.values():
                shared.engine.rise_to_line(line)

    def release(self, user: EngineUser, *, close: Callable[[Checkpointer], None]) -> None:
        """Ends one callback's use of an engine. The engine's last user closes it with ``close``; the last user of any
        engine ends the session."""
        key = user.places.key
        users = self.users.get(key, [])
        if user in users:
            users.remove(user)
        if users:
            return
        self.users.pop(key, None)
        try:
            self._close(key, close)
        finally:
            if not self.users:
                self.end()

    def _close(self, key: EngineKey, close: Callable[[Checkpointer], None]) -> None:
        shared = self.engines.pop(key, None)
        if shared is None or shared.engine.is_forked:
            return
        events = self._step_events
        if events is not None and events.writer is shared.engine.session.events:
            events.flush()
            self.steps.unsubscribe(events)
            self._step_events = None
        close(shared.engine)

    def end(self) -> None:
        """Undoes all changes to the trainer and to torch. Idempotent."""
        if self._undo_slurm is not None:
            self._undo_slurm()
            self._undo_slurm = None
        self.resume.end()
        _live.discard(self)
        if self.trainer.__dict__.get(_ATTRIBUTE) is self:
            del self.trainer.__dict__[_ATTRIBUTE]

    def abandon(self) -> None:
        """Closes all engines after a fit that ended without its last hooks. Blocks: until running copies are done."""
        self.users.clear()
        for key in list(self.engines):
            try:
                self._close(key, lambda engine: engine.close(flush=False, reason="exception"))
            except ResiliencyError:
                logger.warning("the checkpoint engine of %s did not close cleanly", key.directory, exc_info=True)
        self.end()

    @property
    def is_abandoned(self) -> bool:
        """True when the trainer does not run any more: then its last hooks did not reach all callbacks."""
        return bool(self.trainer.state.status != "running")

    def warm_up(self, key: EngineKey, expected: Mapping[str, Tensor]) -> None:
        """Prepares shard files for these tensors, once per engine. Blocks: about 1-3 s per GiB, because each page of
        the files is touched for the first time."""
        shared = self.engines[key]
        if not shared.warm:
            shared.warm = True
            shared.engine.warm_up_for(expected)

    # -- SLURM ----------------------------------------------------------------------------------------------------

    def save_after_slurm(self) -> None:
        """When Lightning saves its own checkpoint before a SLURM requeue, makes the step after it one of the run's,
        from which a resume is exact. Idempotent. Call it in ``setup`` of a fit."""
        if self._undo_slurm is None:
            self._undo_slurm = _lightning.after_slurm_save(self.trainer, self._want_next_step)

    def _want_next_step(self) -> None:
        # Saves nothing by itself, because the signal may have interrupted anything. Ranks may be a step apart.
        self._wanted_step = _lightning.highest_step(self.trainer) + 1

    def take_wanted_save(self, step: int) -> bool:
        """True once when this step is to be saved; the same on all ranks."""
        if self._wanted_step is None or step < self._wanted_step:
            return False
        self._wanted_step = None
        return True

    # -- outcomes of saves ----------------------------------------------------------------------------------------

    def register_save(self, key: EngineKey, ticket: Ticket, receiver: OutcomeReceiver) -> None:
        """Registers ``receiver`` for the outcomes of a save; it is held weakly, and only for the last 256 saves."""
        self._receivers[key, ticket.id] = weakref.ref(receiver)
        for old in list(self._receivers)[:-_DELIVERED_SAVES]:
            del self._receivers[old]
        self.steps.stall(ticket.stall_s)
        self.steps.save_in_flight = True

    def deliver_outcomes(self) -> None:
        """Delivers new outcomes to the callbacks that requested the saves. Blocks: no."""
        for key, shared in list(self.engines.items()):
            for outcome in shared.engine.poll():
                if outcome.tier == LOCAL:
                    self.steps.save_in_flight = False
                reference = self._receivers.get((key, outcome.id))
                receiver = reference() if reference is not None else None
                if receiver is not None:
                    receiver.save_outcome(outcome)

    # -- fence ----------------------------------------------------------------------------------------------------

    def fence(self) -> float:
        """Waits until no pending copy of any engine reads live tensors. Returns the seconds waited.

        Blocks: up to ``fence_timeout`` of each engine.
        """
        waited = 0.0
        if self._early_changes.end() and self.lazy:
            self.lazy = False
            logger.info(
                "parameters change between the end of a batch and the optimizer step (as with"
                " torch.nn.Embedding(max_norm=...)): checkpoints are copied at once, not during the next step"
            )
        for shared in self.engines.values():
            seconds, unchanged = shared.fence()
            waited += seconds
            self.lazy = self.lazy and unchanged
        if waited:
            self.steps.stall(waited)
        return waited

    def settle(self) -> None:
        """Lets late copies that are done be committed now. Blocks: no."""
        for shared in self.engines.values():
            shared.engine.settle()

    def batch_ended(self) -> None:
        """Starts to watch for changes of tensors. Call it at the end of a batch, after hooks that may change them."""
        # Not with manual optimization: before the first late copy nothing fences the module's own optimizer steps.
        if self.lazy and self.trainer.lightning_module.automatic_optimization:
            self._early_changes.begin(self.trainer)

    def _before_step(self, optimizer: Optimizer, with_closure: bool) -> None:
        # With a closure in automatic optimisation the step runs the forward, and on_before_optimizer_step fences later.
        if not (
            with_closure
            and self.trainer.lightning_module.automatic_optimization
            and any(optimizer is known for known in self.trainer.optimizers)
        ):
            self.fence()


def _no_trace(key: EngineKey) -> None:
    return None


#: Sessions with an open engine.
_live: weakref.WeakSet[TrainerSession] = weakref.WeakSet()


def _close_abandoned(new: TrainerSession) -> None:
    for session in list(_live):
        if session is not new and session.is_abandoned:
            logger.info("closing the checkpoint engine that an earlier fit left open when it failed")
            session.abandon()


def sessions_using(key: EngineKey) -> list[TrainerSession]:
    """The sessions in this process that have this engine open and whose fit still runs."""
    return [session for session in list(_live) if key in session.engines and not session.is_abandoned]


#: Id of the spawned process that has registered _close_live for its end; 0: none.
_spawned = 0


def _close_at_the_end_of_a_spawned_process() -> None:
    """In a spawned process, registers that its end closes all sessions, because it runs no ``atexit``. Idempotent."""
    global _spawned
    if multiprocessing.parent_process() is not None and _spawned != os.getpid():
        _spawned = os.getpid()
        multiprocessing.util.Finalize(None, _close_live, exitpriority=10)


def _close_live() -> None:
    for session in list(_live):
        session.abandon()


def _no_session() -> None:
    return None


_ATTRIBUTE = "_resiliency_trainer_session"


def trainer_session(trainer: Any) -> TrainerSession:
    """The trainer's session; creates it when there is none."""
    found: TrainerSession | None = trainer.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = TrainerSession(trainer)
        setattr(trainer, _ATTRIBUTE, found)
    return found


def places_loaders(trainer: Any) -> bool:
    """True when the fit will open its train loaders at the positions of this rank that a restored checkpoint holds."""
    found: TrainerSession | None = trainer.__dict__.get(_ATTRIBUTE)
    state = found.resume.rank_state if found is not None else None
    return state is not None and state.is_pending


def load_in_session(trainer: Any, path: str, weights_only: bool | None) -> dict[str, Any] | None:
    """Loads a checkpoint of this library for Lightning; None when ``path`` is a stock one. Collective: in a fit."""
    return trainer_session(trainer).resume.load(path, weights_only)
