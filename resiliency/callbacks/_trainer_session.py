"""What several checkpoint callbacks of one trainer share: engines by directory, the rank state, the resume decision."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.ticket import Outcome, Ticket
from resiliency.errors import ConfigError, NoCheckpointFound, TierError
from resiliency.inspection.by_path import load_path, locate
from resiliency.plugins import _lightning
from resiliency.plugins.resume.rank_state import RankState
from resiliency.storage.manifest import META_DIR, STEPS_DIR, StepId
from resiliency.telemetry.step_clock import StepClock, shared_clock

__all__ = ["TrainerSession", "EngineKey", "Opened", "trainer_session"]

logger = logging.getLogger(__name__)

#: Outcomes of saves older than this many are nobody's concern any more.
_REMEMBERED = 256


@dataclass(frozen=True)
class EngineKey:
    """What tells engines of one trainer apart."""

    directory: str
    run: str

    @property
    def newest(self) -> str:
        """A path that means the newest step of the run, the same on every rank."""
        return os.path.join(self.directory, META_DIR, self.run, STEPS_DIR)


class Listener(Protocol):
    """Who wants to hear what became of a save."""

    def heard(self, trainer: Any, outcome: Outcome) -> None: ...


@dataclass
class Opened:
    """An engine in use, where its names live (``root``), and what was asked for when it was opened."""

    engine: Checkpointer
    root: str
    tiers: tuple[LocalTierOptions, tuple[RemoteTierOptions, ...]]
    users: int = 0
    warm: bool = False
    #: Tensors being copied late and their version when the copy began, and the names of that save.
    watched: list[tuple[Tensor, int]] = field(default_factory=list)
    watched_names: tuple[str, ...] = ()
    #: Names of saves that must not be kept; the next save replaces them.
    given_up: list[str] = field(default_factory=list)


class TrainerSession:
    """The library's presence in one fit of one trainer. Made by the first callback that is set up, closed by the last.

    Threads: training thread.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rank_state: RankState | None = None
        self.engines: dict[EngineKey, Opened] = {}
        self.names: dict[str, set[str]] = {}
        #: Paths the user resumed from: theirs, never deleted.
        self.protected: set[str] = set()
        #: Answers to ``ckpt_path="last"``: each means the newest step of all.
        self.last_candidates: set[str] = set()
        self.clock: StepClock | None = None
        self.lazy = True
        #: Runs that cannot be written in this fit, but perhaps read.
        self.unwritable: list[EngineKey] = []
        self._offers: list[EngineKey] = []
        self._undo_intercept: Callable[[], None] | None = None
        self._handle: Any = None
        self._listeners: dict[tuple[EngineKey, StepId], weakref.ref[Any]] = {}

    # -- engines --------------------------------------------------------------------------------------------------

    def open(
        self,
        key: EngineKey,
        *,
        root: str,
        local: LocalTierOptions,
        remotes: Sequence[RemoteTierOptions],
        options: CheckpointerOptions,
    ) -> Opened:
        """The engine of a directory and run; opened by its first user. Collective: yes.

        Raises:
            ConfigError: it is in use with other tiers.
            TierError, AgentError, OSError: it cannot be used; every rank gets one of them.
        """
        opened = self.engines.get(key)
        tiers = (local, tuple(remotes))
        if opened is None:
            engine = Checkpointer(
                local,
                remotes=remotes,
                run=key.run,
                rank=self.trainer.global_rank,
                world_size=self.trainer.world_size,
                options=options,
            )
            engine.open()
            opened = self.engines[key] = Opened(engine, root, tiers)
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_any_step)
            self._start_clock(engine)
        elif (opened.root, opened.tiers) != (root, tiers):
            raise ConfigError(
                f"two ModelCheckpoint callbacks use run {key.run!r} in {key.directory} with different tiers"
                f" ({opened.root} and {root});"
                " give them the same dirpath and tiers, or give each its own local_dir= or run="
            )
        opened.users += 1
        return opened

    def release(self, key: EngineKey, *, close: Callable[[Checkpointer], None]) -> None:
        """One user of an engine is done; the last one closes it, and the last engine ends the attachment."""
        opened = self.engines.get(key)
        if opened is not None:
            opened.users -= 1
            if opened.users > 0:
                return
            if self.clock is not None and self.clock.writer is opened.engine.session.events:
                self.clock.flush()
                self.clock.writer = None
            del self.engines[key]
            try:
                close(opened.engine)
            finally:
                self.end_if_unused()

    def end_if_unused(self) -> None:
        """Undoes everything done to the trainer and to torch when no engine is left."""
        if self.engines:
            return
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._undo_intercept is not None:
            self._undo_intercept()
            self._undo_intercept = None
        if self.rank_state is not None:
            self.rank_state.detach(self.trainer)
            self.rank_state = None
        if self.trainer.__dict__.get(_ATTRIBUTE) is self:
            del self.trainer.__dict__[_ATTRIBUTE]

    def _start_clock(self, engine: Checkpointer) -> None:
        """Steps are written into the log of the first engine, unless somebody else writes them already."""
        if self.clock is not None:
            return
        clock = shared_clock(self.trainer, lambda: StepClock(None))
        if clock.writer is None:
            clock.on_train_end(self.trainer.global_step)  # says nothing: a fit that ended in an exception is over
            clock.writer = engine.session.events
        self.clock = clock

    def take_given_up(self, key: EngineKey) -> list[str]:
        """Names the next save of this engine replaces, because what they mean is not to be trusted."""
        names, self.engines[key].given_up = self.engines[key].given_up, []
        return names

    def warm_up(self, key: EngineKey) -> None:
        """Prepares shard files for full checkpoints; once per engine. Blocks: first touch, about 1-3 s per GiB."""
        opened = self.engines[key]
        if not opened.warm:
            opened.warm = True
            opened.engine.warm_up_for(_lightning.expected_tensors(self.trainer))

    # -- news -----------------------------------------------------------------------------------------------------

    def expect(self, key: EngineKey, ticket: Ticket, listener: Listener) -> None:
        """``listener`` hears what becomes of this save."""
        self._listeners[key, ticket.id] = weakref.ref(listener)
        for old in list(self._listeners)[:-_REMEMBERED]:
            del self._listeners[old]
        if self.clock is not None:
            self.clock.stall(ticket.stall_s)
            self.clock.save_in_flight = True

    def take_news(self) -> None:
        """Tells each callback what became of its saves. Blocks: no."""
        for key, opened in list(self.engines.items()):
            for outcome in opened.engine.poll():
                if outcome.tier == "local" and self.clock is not None:
                    self.clock.save_in_flight = False
                reference = self._listeners.get((key, outcome.id))
                listener = reference() if reference is not None else None
                if listener is not None:
                    listener.heard(self.trainer, outcome)

    # -- fence ----------------------------------------------------------------------------------------------------

    def watch(self, key: EngineKey, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        """Tensors whose copy is pending, so that :meth:`fence` can tell when something changed them too early."""
        opened = self.engines[key]
        opened.watched = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        opened.watched_names = tuple(names)

    def fence(self) -> float:
        """Waits until no pending copy of any engine reads live tensors. Returns seconds."""
        waited = 0.0
        for opened in self.engines.values():
            if opened.engine.pending:
                waited += opened.engine.fence()
            if opened.watched:
                self._check_unchanged(opened)
        if waited and self.clock is not None:
            self.clock.stall(waited)
        return waited

    def _check_unchanged(self, opened: Opened) -> None:
        watched, opened.watched = opened.watched, []
        if all(tensor._version == version for tensor, version in watched):
            return
        # The save may mix two moments. Its names go, and what follows is copied at once.
        self.lazy = False
        opened.given_up += opened.watched_names
        logger.warning(
            "parameters changed between the end of a batch and the optimizer step, while checkpoint %s was being"
            " copied: it is given up,"
            " and from now on checkpoints are copied at once. Change parameters in Callback.on_train_batch_end or pass"
            " lazy=False",
            ", ".join(opened.watched_names),
        )

    def _before_any_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # With a closure in automatic optimisation the forward is still to come; on_before_optimizer_step fences then.
        with_closure = bool(args[1:]) or bool(kwargs.get("closure"))
        if (
            with_closure
            and self.trainer.lightning_module.automatic_optimization
            and any(optimizer is known for known in self.trainer.optimizers)
        ):
            return
        self.fence()

    # -- resume ---------------------------------------------------------------------------------------------------

    def intercept(self) -> None:
        """Puts :meth:`_decide` between what the user asked for and what Lightning loads. Idempotent."""
        if self._undo_intercept is None:
            self._undo_intercept = _lightning.intercept_resume(self.trainer, self._decide)

    def offer_resume(self, key: EngineKey) -> None:
        """Lets the fit that is starting resume from this run when the user named no checkpoint."""
        self._offers.append(key)

    def _decide(self, path: Any) -> Any:
        keys = self._offers
        if path is not None:
            text = os.fspath(path)
            if text not in self.last_candidates:
                self.protected.add(os.path.abspath(text) if "://" not in text else text)
                return path
            keys = list(
                dict.fromkeys(
                    [
                        *self._offers,
                        *(key for key in [*self.engines, *self.unwritable] if key.newest in self.last_candidates),
                    ]
                )
            )
        newest: tuple[StepId, EngineKey] | None = None
        for key in keys:
            step = self._newest_step(key)
            if step is not None and (newest is None or step > newest[0]):
                newest = (step, key)
        if newest is None:
            return path if path is not None and os.path.exists(path) and not os.path.isdir(path) else None
        if self.trainer.is_global_zero:
            logger.info(
                "resuming from %s of run %r in %s; pass auto_resume=False or another dirpath or run to start afresh",
                newest[0],
                newest[1].run,
                newest[1].directory,
            )
        return newest[1].newest

    def _newest_step(self, key: EngineKey) -> StepId | None:
        if key in self.engines:
            steps = self.engines[key].engine.steps()
            return steps[0][0] if steps else None
        # Nothing can be written there, but what lies there can still be read. Rank 0 decides for all.
        found = None
        if self.trainer.is_global_zero:
            try:
                located = locate(key.newest)
                found = located.listing.id.dirname if located is not None else None
            except NoCheckpointFound:
                logger.debug("nothing in %s to resume from", key.newest)
            except (TierError, ConfigError) as error:
                logger.warning("%s cannot be read either, nothing is resumed from it: %s", key.directory, error)
        found = self.trainer.strategy.broadcast(found)
        return StepId.parse(found) if found else None

    def load(self, path: str, weights_only: bool | None) -> dict[str, Any] | None:
        """Loads one of our checkpoints for Lightning; None when ``path`` is a stock one. Collective: yes, in a fit.

        Raises:
            CorruptShard, NoCheckpointFound: the path means one of our steps and it cannot be restored.
        """
        allow_pickle = weights_only is False
        for key, opened in self.engines.items():
            meant = self._meaning(path, key, opened)
            if meant is None:
                continue
            restored = opened.engine.load(step=meant if isinstance(meant, StepId) else None, allow_pickle=allow_pickle)
            if restored is None:
                continue
            if isinstance(meant, StepId) and META_DIR in path.split("/"):
                # A step folder was named: what holds it are its names.
                self.protected |= {os.path.join(opened.root, name) for name in restored.names}
            state: dict[str, Any] = restored.state
            self._place_rank_state(state, restored.per_rank, restored.world_size)
            return state
        located = locate(path)
        if located is None:
            return None
        state, per_rank = load_path(located, rank=self.trainer.global_rank, allow_pickle=allow_pickle)
        manifest = located.listing.manifest
        assert manifest is not None
        self._place_rank_state(state, per_rank, manifest.world_size)
        return state

    @staticmethod
    def _meaning(path: str, key: EngineKey, opened: Opened) -> StepId | str | None:
        """The step of this engine a path means; "newest" for the newest one; None when it is not of this engine."""
        base = f"{META_DIR}/{key.run}"
        for root in dict.fromkeys((key.directory, opened.root)):
            name = _relative(path, root)
            if name is None:
                continue
            if name in ("", base, f"{base}/{STEPS_DIR}"):
                return "newest"
            if name.startswith(f"{base}/{STEPS_DIR}/"):
                return StepId.parse(name.split("/")[3])
            if not name.startswith(META_DIR + "/"):
                return next((step for step, names in opened.engine.steps() if name in names), None)
        return None

    def _place_rank_state(self, state: dict[str, Any], per_rank: Any, world_size: int) -> None:
        if self.rank_state is None or "loops" not in state:
            return
        own = per_rank.get("rank_state") if isinstance(per_rank, Mapping) else None
        if world_size != self.trainer.world_size or own is None:
            if "optimizer_states" in state:
                logger.warning(
                    "rank %d: the checkpoint was written by %d ranks, this job has %d: random generators and data"
                    " loaders start anew on"
                    " this rank, everything else continues exactly",
                    self.trainer.global_rank,
                    world_size,
                    self.trainer.world_size,
                )
            return
        self.rank_state.load(own)
        self.rank_state.patch_loaded_checkpoint(state, own)
        _lightning.quiet_mid_epoch_warning(self.trainer)


_ATTRIBUTE = "_resiliency_trainer_session"


def trainer_session(trainer: Any) -> TrainerSession:
    """The trainer's attachment, made when there is none."""
    found: TrainerSession | None = trainer.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = TrainerSession(trainer)
        setattr(trainer, _ATTRIBUTE, found)
    return found


def _relative(path: str, directory: str) -> str | None:
    """``path`` relative to ``directory``; "" for itself; None when it lies elsewhere."""
    directory = directory.rstrip("/")
    for candidate in (path,) if "://" in path else (os.path.abspath(path), os.path.realpath(path)):
        if candidate.rstrip("/") == directory:
            return ""
        if candidate.startswith(directory + "/"):
            return candidate.removeprefix(directory + "/").rstrip("/")
    return None
