"""Chooses which checkpoint a fit resumes from, and loads it for Lightning."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from resiliency.callbacks._places import EngineKey
from resiliency.callbacks._shared_engine import SharedEngine
from resiliency.errors import ConfigError, NoCheckpointFound, TierError
from resiliency.inspection.by_path import load_path, locate
from resiliency.plugins import _lightning
from resiliency.plugins.resume.rank_state import RankState
from resiliency.storage.manifest import META_DIR, STEPS_DIR
from resiliency.storage.step_id import StepId

__all__ = ["Resume"]

logger = logging.getLogger(__name__)


class Resume:
    """Resumes one fit from the newest step of the offered runs, unless the user named a checkpoint.

    Threads: training thread; called on every rank.

    Args:
        engines: engines open in this fit; the session's own mapping.
    """

    def __init__(self, trainer: Any, engines: Mapping[EngineKey, SharedEngine]) -> None:
        self._trainer = trainer
        self._engines = engines
        #: Saves and restores this rank's generators and data loader positions; None: they are not saved.
        self.rank_state: RankState | None = None
        #: Paths the user resumed from; never deleted.
        self.protected: set[str] = set()
        #: Paths that ``ckpt_path="last"`` may resolve to; each of them means the newest step of all.
        self.last_candidates: set[str] = set()
        #: Runs that cannot be written in this fit; perhaps they can be read.
        self.unwritable: list[EngineKey] = []
        self._offers: list[EngineKey] = []
        self._undo_intercept: Callable[[], None] | None = None

    def keep_rank_state(self) -> None:
        """Saves and restores generators and data loader positions in this fit. Idempotent."""
        if self.rank_state is None:
            self.rank_state = RankState()
            self.rank_state.attach(self._trainer)

    def end(self) -> None:
        """Undoes all changes to the trainer."""
        if self._undo_intercept is not None:
            self._undo_intercept()
            self._undo_intercept = None
        if self.rank_state is not None:
            self.rank_state.detach(self._trainer)
            self.rank_state = None

    # -- the choice -----------------------------------------------------------------------------------------------

    def intercept(self) -> None:
        """Makes Lightning load what :meth:`_decide` returns for the user's ``ckpt_path``. Idempotent."""
        if self._undo_intercept is None:
            self._undo_intercept = _lightning.intercept_resume(self._trainer, self._decide)

    def offer(self, key: EngineKey) -> None:
        """Lets the fit that is starting resume from this run if the user named no checkpoint."""
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
                        *(key for key in [*self._engines, *self.unwritable] if key.newest in self.last_candidates),
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
        if self._trainer.is_global_zero:
            logger.info(
                "resuming from %s of run %r in %s; pass auto_resume=False or another dirpath or run to start afresh",
                newest[0],
                newest[1].run,
                newest[1].directory,
            )
        return newest[1].newest

    def _newest_step(self, key: EngineKey) -> StepId | None:
        if key in self._engines:
            steps = self._engines[key].engine.steps()
            return steps[0][0] if steps else None
        # The run cannot be written, but perhaps read. Rank 0 decides for all ranks.
        found = None
        if self._trainer.is_global_zero:
            try:
                located = locate(key.newest)
                found = located.listing.id.dirname if located is not None else None
            except NoCheckpointFound:
                logger.debug("no checkpoint to resume from in %s", key.newest)
            except (TierError, ConfigError) as error:
                logger.warning(
                    "checkpoints in %s can be neither written nor read, the fit does not resume from them: %s",
                    key.directory,
                    error,
                )
        found = self._trainer.strategy.broadcast(found)
        return StepId.parse(found) if found else None

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, path: str, weights_only: bool | None) -> dict[str, Any] | None:
        """Loads one of our checkpoints for Lightning; None when ``path`` is a stock one. Collective: yes, in a fit.

        Raises:
            CorruptShard, NoCheckpointFound: the path is one of our steps, which cannot be restored.
        """
        allow_pickle = weights_only is False
        for key, shared in self._engines.items():
            step = self._step_at_path(path, key, shared)
            if step is None:
                continue
            restored = shared.engine.load(step=step if isinstance(step, StepId) else None, allow_pickle=allow_pickle)
            if restored is None:
                continue
            if isinstance(step, StepId) and META_DIR in path.split("/"):
                # The path is a step folder: the step is kept by protecting its names.
                self.protected |= {os.path.join(shared.places.dirpath, name) for name in restored.names}
            state: dict[str, Any] = restored.state
            self._place_rank_state(state, restored.per_rank, restored.world_size)
            return state
        located = locate(path)
        if located is None:
            return None
        state, per_rank = load_path(located, rank=self._trainer.global_rank, allow_pickle=allow_pickle)
        manifest = located.listing.manifest
        assert manifest is not None
        self._place_rank_state(state, per_rank, manifest.world_size)
        return state

    @staticmethod
    def _step_at_path(path: str, key: EngineKey, shared: SharedEngine) -> StepId | Literal["newest"] | None:
        """The step that a path refers to; None when it is not a path of this engine."""
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
                return next((step for step, names in shared.engine.steps() if name in names), None)
        return None

    def _place_rank_state(self, state: dict[str, Any], per_rank: Any, world_size: int) -> None:
        if self.rank_state is None or "loops" not in state:
            return
        own = per_rank.get("rank_state") if isinstance(per_rank, Mapping) else None
        if world_size != self._trainer.world_size or own is None:
            if "optimizer_states" in state:
                logger.warning(
                    "rank %d: the checkpoint was written by %d ranks, this job has %d: random generators, data"
                    " loaders and metrics start anew on this rank, everything else continues exactly",
                    self._trainer.global_rank,
                    world_size,
                    self._trainer.world_size,
                )
            return
        self.rank_state.load(own)
        self.rank_state.patch_loaded_checkpoint(state, own)
        _lightning.suppress_mid_epoch_warning(self._trainer)


def _relative(path: str, directory: str) -> str | None:
    """``path`` relative to ``directory``; "" for itself; None when it lies elsewhere."""
    directory = directory.rstrip("/")
    for candidate in (path,) if "://" in path else (os.path.abspath(path), os.path.realpath(path)):
        if candidate.rstrip("/") == directory:
            return ""
        if candidate.startswith(directory + "/"):
            return candidate.removeprefix(directory + "/").rstrip("/")
    return None
