"""Chooses which checkpoint a fit resumes from, and loads it for Lightning."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, Protocol

from resiliency.callbacks.checkpointing.earlier import Found, continues_writer, is_restart, look, newest_step, step_of
from resiliency.callbacks.checkpointing.places import CheckpointPlaces, EngineKey
from resiliency.callbacks.checkpointing.set_aside import SetAside
from resiliency.callbacks.checkpointing.shared_engine import SharedEngine
from resiliency.checkpoint.read_plan import ReadPlanner
from resiliency.checkpoint.restore import Inventory
from resiliency.checkpoint.stock_reader import StockReader, is_stock_folder
from resiliency.errors import ConfigError, NoCheckpointFound, TierError
from resiliency.inspection.by_path import locate, locate_and_load
from resiliency.inspection.stock_state import load_lightning_folder
from resiliency.plugins import _lightning
from resiliency.plugins.resume.rank_state import RankState
from resiliency.plugins.strategies.registry import adapter_for
from resiliency.plugins.strategies.replicated import ReplicatedAdapter
from resiliency.settings import environment
from resiliency.storage.manifest import META_DIR, STEPS_DIR
from resiliency.storage.step_id import StepId
from resiliency.storage.stock import is_stock
from resiliency.to_thread import to_thread

__all__ = ["EngineUser", "Process", "Resume"]

logger = logging.getLogger(__name__)


class EngineUser(Protocol):
    """Opens the engine of one callback when it is needed."""

    @property
    def places(self) -> CheckpointPlaces: ...

    def open(self) -> bool:
        """Opens the engine unless it is open. Returns False, on all ranks, when it cannot be used. Collective: yes."""


class Process:
    """Whether a fit has trained in this process, in any of its trainers."""

    #: The process start (``environment().start``) in which a fit with a checkpoint callback of this library has begun
    #: to train, or None. A later fit in the same script is another training: a restart of the job does not resume it.
    _trained_in: str | None = None

    @classmethod
    def has_trained(cls) -> bool:
        return cls._trained_in == environment().start

    @classmethod
    def begins_to_train(cls) -> None:
        cls._trained_in = environment().start


@dataclass(frozen=True)
class _Newest:
    """The newest step of a run, and what identifies the job that wrote it."""

    id: StepId
    writer: Mapping[str, str]


class Resume:
    """Chooses the step one fit resumes from when the user named no checkpoint, and loads it.

    A run is resumed when the user asked for it, or in the first fit of a process that the launcher calls a restart of
    the job that wrote the run's newest step. Otherwise the fit starts afresh, and a line says which checkpoints exist.

    Threads: training thread. All methods are called on every rank.

    Args:
        engines: the engines open in this fit; the session's own mapping, not a copy.
        users: the users of every engine of this fit, open or not; the session's own mapping, not a copy.
    """

    def __init__(
        self, trainer: Any, engines: Mapping[EngineKey, SharedEngine], users: Mapping[EngineKey, Sequence[EngineUser]]
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._users = users
        #: Saves and restores this rank's random generators and data loader positions; None: they are not saved.
        self.rank_state: RankState | None = None
        #: Paths the user resumed from; never deleted.
        self.protected: set[str] = set()
        #: Paths that ``ckpt_path="last"`` may resolve to; each of them means the newest step of all runs.
        self.last_candidates: set[str] = set()
        #: key -> True: the user asked to resume from the run; None: resume only in a restart of the job that wrote it.
        self._offers: dict[EngineKey, Literal[True] | None] = {}
        self._found: dict[EngineKey, Found] = {}
        #: What the tiers of an open engine hold, from the choice of the step until it is loaded.
        self._inventories: dict[EngineKey, Inventory] = {}
        #: Steps from which restarts of this job do not go on.
        self.set_aside = SetAside(trainer)
        self._undo_intercept: Callable[[], None] | None = None

    def keep_rank_state(self, *, reread: bool) -> None:
        """Makes this fit save and restore random generators and data loader positions. Idempotent.

        Args:
            reread: read the batches that were trained on again and drop them. One caller that asks for it is enough.
        """
        if self.rank_state is None:
            self.rank_state = RankState()
            self.rank_state.attach(self._trainer)
        self.rank_state.reread = self.rank_state.reread or reread

    def end(self) -> None:
        """Undoes all changes to the trainer."""
        self.set_aside.end()
        if self._undo_intercept is not None:
            self._undo_intercept()
            self._undo_intercept = None
        if self.rank_state is not None:
            self.rank_state.detach(self._trainer)
            self.rank_state = None

    # -- the choice -----------------------------------------------------------------------------------------------

    def found(self, key: EngineKey) -> Found:
        """What existed of the run at the start of this fit. Collective: the first time. Blocks: the first time, for one
        listing per tier."""
        if key not in self._found:
            self._found[key] = look(self._trainer, self._places(key))
        return self._found[key]

    def intercept(self) -> None:
        """Makes Lightning load the path that :meth:`_decide` returns for its own choice. Idempotent."""
        if self._undo_intercept is None:
            self._undo_intercept = _lightning.intercept_resume(self._trainer, self._decide)

    def offer(self, key: EngineKey, *, asked: Literal[True] | None) -> None:
        """Lets the starting fit resume from this run if the user named no checkpoint.

        ``asked``: True: always; None: only in a restart of the job that wrote the run's newest step.
        """
        self._offers[key] = asked or self._offers.get(key)

    def _decide(self, path: Any) -> Any:
        """The path to load. ``path``: what Lightning has made of the user's ``ckpt_path``; None: nothing."""
        chosen = self._choose(path)
        if chosen is None:
            self._inventories.clear()  # nothing is loaded, and later they would be out of date
        return chosen

    def _choose(self, path: Any) -> Any:
        asked = _lightning.asked_path(self._trainer, path)
        if asked == "last" or (asked is None and path is not None and os.fspath(path) in self.last_candidates):
            return self._last(path)
        return self._newest_or(path) if asked is None else self._obey(path)

    def _obey(self, path: Any) -> Any:
        text = os.fspath(path)
        self.protected.add(os.path.abspath(text) if "://" not in text else text)
        return path

    def _last(self, path: Any) -> Any:
        """The newest step of all runs, unless Lightning has found a later file of other code."""
        if path is not None and os.fspath(path) not in self.last_candidates:
            return self._obey(path)
        newest = self._newest_of(
            key for key in self._users if key in self._offers or key.newest in self.last_candidates
        )
        if newest is None:
            is_checkpoint = path is not None and META_DIR not in os.fspath(path).split("/") and os.path.exists(path)
            return path if is_checkpoint else None
        chosen = self._resume_from(newest)
        return self._obey(path) if path is not None and self._is_file_of(os.fspath(path), newest[0]) else chosen

    def _newest_or(self, path: Any) -> Any:
        """The newest step of the chosen runs, unless ``path`` is newer, which Lightning has chosen by itself: under
        SLURM what it has saved before a requeue, however old. All ranks take what rank 0 finds. Collective: yes."""
        newest = self._newest_of(self._chosen_runs(path))
        if newest is None:
            return path
        step = None
        if self._trainer.is_global_zero and path is not None:
            step = to_thread(lambda: step_of(os.fspath(path)))
        path, step = self._trainer.strategy.broadcast((path, step))
        if step is None or step <= newest[0].step:
            return self._resume_from(newest, instead_of=path)
        _lightning.tell_user(
            self._trainer,
            f"Resuming from {path} (step {step}), which Lightning has chosen: it is newer than {newest[0]} of run"
            f" {newest[1].run!r} in {newest[1].directory}.",
        )
        return self._obey(path)

    def _is_file_of(self, path: str, step: StepId) -> bool:
        """True when the file that Lightning has found is that step. False with several ranks, because another rank may
        see another file."""
        if self._trainer.world_size > 1 or not os.path.isfile(path):
            return False
        try:
            located = to_thread(lambda: locate(path))
        except (ConfigError, NoCheckpointFound, TierError):
            return False
        return located is not None and located.id == step

    def _chosen_runs(self, path: Any) -> list[EngineKey]:
        """The runs to resume from when the user named no checkpoint. Says so when it is none of those found.
        Collective: yes. ``path``: what is resumed from then; None: nothing.

        Raises:
            TierError: a tier that may hold steps cannot be listed, and no other tier has any. Starting from scratch
                would silently lose the training.
        """
        chosen: list[EngineKey] = []
        others: list[EngineKey] = []
        is_resume = not Process.has_trained() and is_restart(self._trainer)
        for key, asked in self._offers.items():
            if not (asked or is_resume):
                others.append(key)
            elif (newest := self._newest_step(key)) is not None:
                continues = asked or continues_writer(self._trainer, newest.writer)
                (chosen if continues else others).append(key)
        if not chosen:
            self._tell_of(others, path)
        return chosen

    def _tell_of(self, keys: Sequence[EngineKey], path: Any) -> None:
        """Shows one line that names the newest checkpoint that the fit does not resume from, on rank 0."""
        keys = [key for key in keys if key in self._inventories or self.found(key).steps or self.found(key).unknown]
        if not self._trainer.is_global_zero:
            return
        steps = ((to_thread(partial(newest_step, self._trainer, self._places(key))), key) for key in keys)
        newest = max(((step, key) for step, key in steps if step is not None), key=itemgetter(0), default=None)
        if newest is not None:
            does = "starts afresh" if path is None else f"resumes from {path}, as Lightning has chosen"
            _lightning.tell_user(
                self._trainer,
                f"{self._places(newest[1]).dirpath} holds checkpoints of an earlier training, up to {newest[0]}."
                f" They are kept, and this fit {does}; to continue from them instead, pass"
                ' ModelCheckpoint(auto_resume=True) or fit(ckpt_path="last").',
            )

    def _newest_of(self, keys: Iterable[EngineKey]) -> tuple[StepId, EngineKey] | None:
        steps = [(self._newest_step(key), key) for key in keys]
        return max(((newest.id, key) for newest, key in steps if newest is not None), key=itemgetter(0), default=None)

    def _resume_from(self, newest: tuple[StepId, EngineKey], instead_of: Any = None) -> str:
        step, key = newest
        what = "start afresh" if instead_of is None else f"resume from {instead_of}, as Lightning has chosen"
        _lightning.tell_user(
            self._trainer,
            f"Resuming from {step} of run {key.run!r} in {key.directory}; to {what}, pass"
            " ModelCheckpoint(auto_resume=False), another dirpath or another run.",
        )
        return key.newest

    def _places(self, key: EngineKey) -> CheckpointPlaces:
        return self._users[key][0].places

    def _open(self, key: EngineKey) -> SharedEngine | None:
        """The run's engine, opened if necessary; None when it cannot be used. Collective: when it must be opened."""
        shared = self._engines.get(key)
        if shared is None and self._users[key][0].open():
            shared = self._engines[key]
        return shared

    def _newest_step(self, key: EngineKey) -> _Newest | None:
        if key not in self._engines and not self.found(key).steps and not self.found(key).unknown:
            return None
        shared = self._open(key)
        if shared is not None:
            inventory = self._inventory(key, shared)
            if not inventory.steps:
                if inventory.entries:
                    # raises if all checkpoints are damaged; else logs why there is none to load
                    shared.engine.load(inventory=inventory)
                return None
            step, _ = inventory.steps[0]
            return _Newest(step, inventory.job_of(step))
        # The run's engine cannot be opened to write, but perhaps its steps can be read. Rank 0 decides for all ranks.
        found = None
        if self._trainer.is_global_zero:
            try:
                located = to_thread(lambda: locate(key.newest))
                if located is not None:
                    jobs = (record.job for record in located.listing.records.values() if record.job)
                    found = located.id.dirname, dict(next(jobs, {}))
            except NoCheckpointFound:
                logger.debug("no checkpoint to resume from in %s", key.newest)
            except (TierError, ConfigError) as error:
                logger.warning(
                    "checkpoints in %s can be neither written nor read, the fit does not resume from them: %s",
                    key.directory,
                    error,
                )
        found = self._trainer.strategy.broadcast(found)
        step_id = StepId.parse(found[0]) if found else None
        return _Newest(step_id, found[1]) if step_id is not None else None

    def _inventory(self, key: EngineKey, shared: SharedEngine) -> Inventory:
        """What the engine's tiers hold; they are listed once until a step is loaded. Collective: yes."""
        if key not in self._inventories:
            self._inventories[key] = self.set_aside.filter(key, shared.engine.inventory())
        return self._inventories[key]

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, path: str, weights_only: bool | None) -> dict[str, Any] | None:
        """Loads a checkpoint of this library, or a distributed one that the strategy cannot load, for Lightning; None
        when Lightning loads ``path``. Collective: in a fit.

        Raises:
            CorruptShard, NoCheckpointFound: the path is a step of this library, or a distributed checkpoint, which
                cannot be restored.
        """
        try:
            return self._load(path, weights_only)
        finally:
            self._inventories.clear()

    def _load(self, path: str, weights_only: bool | None) -> dict[str, Any] | None:
        allow_pickle = weights_only is False
        adapter = adapter_for(self._trainer.strategy) or ReplicatedAdapter()
        planner: ReadPlanner | None = None
        for key in list(self._users):
            shared = self._open(key) if self._may_hold(path, key) else None
            step = self._step_at_path(path, key, shared) if shared is not None else None
            if shared is None or step is None:
                continue
            planner = planner or adapter.target_state(self._trainer)
            one = step if isinstance(step, StepId) else None
            if one is None and self._inventory(key, shared).steps:
                self.set_aside.begin(key, self._inventory(key, shared).steps[0][0])
            restored = shared.engine.load(
                step=one, allow_pickle=allow_pickle, reads=planner, inventory=self._inventory(key, shared)
            )
            if restored is None:
                continue
            if isinstance(step, StepId) and META_DIR in path.split("/"):
                # The path is a step folder. Protecting the step's names keeps the step.
                self.protected |= {os.path.join(shared.places.dirpath, name) for name in restored.names}
            state = adapter.load_state(self._trainer, restored.state, allow_pickle=allow_pickle)
            self._place_rank_state(state, restored.per_rank, restored.world_size)
            return state
        rank = self._trainer.global_rank
        if adapter.is_sharded:
            located = to_thread(lambda: locate(path))
            if located is None or not located.is_checked:
                if is_stock_folder(path):
                    to_thread(lambda: StockReader(path).check())
                return None  # Lightning itself reads a copy without records, as the stock file that it is
        planner = planner or adapter.target_state(self._trainer)
        found = to_thread(lambda: locate_and_load(path, rank=rank, allow_pickle=allow_pickle, planner=planner))
        if found is None:
            if not is_stock_folder(path):
                return None
            folder = to_thread(lambda: load_lightning_folder(path, allow_pickle=allow_pickle))
            return adapter.load_state(self._trainer, folder, allow_pickle=allow_pickle)
        located, loaded, per_rank = found
        state = adapter.load_state(self._trainer, loaded, allow_pickle=allow_pickle)
        self._place_rank_state(state, per_rank, located.world_size)
        return state

    def _may_hold(self, path: str, key: EngineKey) -> bool:
        """False when the path is certainly no step of the run, so that its engine need not be opened."""
        roots = (key.directory, self._places(key).dirpath)
        return any(_relative(path, root) is not None for root in roots) and not is_stock(path)

    def _step_at_path(self, path: str, key: EngineKey, shared: SharedEngine) -> StepId | Literal["newest"] | None:
        """The step that a path refers to, or "newest" for the run's folder; None when no step of this engine has it."""
        base = f"{META_DIR}/{key.run}"
        for root in dict.fromkeys((key.directory, shared.places.dirpath)):
            name = _relative(path, root)
            if name is None:
                continue
            if name in ("", base, f"{base}/{STEPS_DIR}"):
                return "newest"
            if name.startswith(f"{base}/{STEPS_DIR}/"):
                return StepId.parse(name.split("/")[3])
            if not name.startswith(META_DIR + "/"):
                return next((step for step, names in self._inventory(key, shared).steps if name in names), None)
        return None

    def _place_rank_state(self, state: dict[str, Any], per_rank: Any, world_size: int) -> None:
        if self.rank_state is None or "loops" not in state:
            return
        own = per_rank.get("rank_state") if isinstance(per_rank, Mapping) else None
        if world_size != self._trainer.world_size or own is None:
            if "optimizer_states" in state:
                dealt = any(getattr(one, "continues_epochs", False) for one in self._trainer.callbacks)
                logger.warning(
                    "rank %d: %s: random generators%s and metrics start anew on this rank, everything else continues"
                    " exactly",
                    self._trainer.global_rank,
                    f"the checkpoint was written by {world_size} ranks, this job has {self._trainer.world_size}"
                    if world_size != self._trainer.world_size
                    else "the checkpoint has nothing of this rank alone (a plugin wrote it, or exact_resume was off)",
                    "" if dealt else ", data loaders",
                )
            return
        self.rank_state.load(own)
        self.rank_state.patch_loaded_checkpoint(state, own)
        _lightning.suppress_mid_epoch_warning(self._trainer)


def _relative(path: str, directory: str) -> str | None:
    """``path`` relative to ``directory``; "" for ``directory`` itself; None when it lies elsewhere."""
    if "://" in path or "://" in directory:
        pairs = [(path, directory)]
    else:
        # The last part may be a symbolic link itself, so the path counts both with that link and with its target.
        folder, name = os.path.split(os.path.abspath(path))
        root = os.path.realpath(directory)
        pairs = [
            (os.path.abspath(path), os.path.abspath(directory)),
            (os.path.join(os.path.realpath(folder), name), root),
            (os.path.realpath(path), root),
        ]
    for candidate, above in pairs:
        relative = candidate.rstrip("/").removeprefix(above.rstrip("/"))
        if relative != candidate.rstrip("/") and relative[:1] in ("", "/"):
            return relative[1:]
    return None
