"""How a checkpoint callback saves, names and removes once it has an engine."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any
from weakref import proxy

from torch import Tensor

from resiliency.callbacks._names import is_stock
from resiliency.callbacks._trainer_session import EngineKey, TrainerSession
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.ticket import Outcome
from resiliency.plugins import _lightning
from resiliency.storage.stage import Stage

__all__ = ["SavesThroughEngine"]

logger = logging.getLogger(__name__)

#: How long the save that may be the last of a fit waits for the one before it; others are skipped sooner.
_LAST_SAVE_WAIT = timedelta(minutes=2)
#: Keys of a Lightning checkpoint under which parameters and optimizer state lie.
_LIVE = ("state_dict/", "optimizer_states/")


class SavesThroughEngine:
    """The methods of a stock ``ModelCheckpoint`` that touch storage, through the engine.

    While a hook runs (``_collecting``), saves and removals are noted; at its end one checkpoint is taken under all
    names. Without an engine because the strategy is not supported, or outside a fit (``_stock_way``), the stock methods
    do the work.

    Threads: training thread, on every rank alike.
    """

    _session: TrainerSession | None
    _key: EngineKey | None
    _engine: Checkpointer | None
    _stock_way: bool
    _collecting: bool
    _overlap: bool
    _lazy: bool
    _announced_tier: str
    _requests: list[str]
    _removals: list[str]
    _owed_removals: list[str]
    _stock_removals: list[tuple[int, str]]
    _saved_as: dict[str, int]
    _saves: int
    _missed: int

    def _open(self, trainer: Any) -> bool:
        raise NotImplementedError

    def _relative(self, path: str) -> str | None:
        """A path below ``dirpath`` relative to it; None for anything else."""
        root = str(self.dirpath).rstrip("/") + "/"  # type: ignore[attr-defined]
        return str(path).removeprefix(root) if str(path).startswith(root) else None

    @property
    def _known(self) -> set[str]:
        """Names in use below ``dirpath``, the same set on every rank: those on disk and those on their way there."""
        assert self._session is not None
        return self._session.names.setdefault(str(self.dirpath), set())  # type: ignore[attr-defined]

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._stock_way or self._relative(filepath) is None:
            super()._save_checkpoint(trainer, filepath)  # type: ignore[misc]
            return
        self._requests.append(filepath)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if not self._collecting:
            self._save_requests(trainer)

    def _save_requests(self, trainer: Any) -> None:
        """Takes one checkpoint under all names asked for, then passes the removals on."""
        requests, self._requests = self._requests, []
        removals, self._removals = self._removals, []
        if not requests and not removals:
            return
        names = list(dict.fromkeys(name for name in map(self._relative, requests) if name is not None))
        if self._engine is None and not self._may_open_again(trainer):
            self._owed_removals += removals
            return
        assert self._engine is not None and self._session is not None and self._key is not None
        owed = [*self._owed_removals, *(self._session.take_given_up(self._key) if names else ())]
        removals = [name for name in dict.fromkeys([*owed, *removals]) if name not in names]
        self._owed_removals = []
        if names and not self._save(trainer, requests[0], names, removals):
            # A removal waits for a newer checkpoint, and this is not one.
            self._owed_removals = removals
            return
        if removals:
            self._engine.delete(*removals)
            self._known.difference_update(removals)

    def _save(self, trainer: Any, filepath: str, names: list[str], supersedes: list[str]) -> bool:
        assert self._engine is not None and self._session is not None and self._key is not None
        weights_only: bool = self.save_weights_only  # type: ignore[attr-defined]
        if self._engine.pending:
            self._session.fence()
        if _lightning.about_to_end(trainer):
            self._engine.flush(Stage.COMMITTED, timeout=_LAST_SAVE_WAIT)
        state = _lightning.dump_checkpoint(trainer, weights_only)
        rank_state = self._session.rank_state
        per_rank = {"rank_state": rank_state.capture(trainer)} if rank_state is not None and not weights_only else None
        score = self.best_k_models.get(filepath)  # type: ignore[attr-defined]
        monitor: str | None = self.monitor  # type: ignore[attr-defined]
        info = {"epoch": trainer.current_epoch, **({monitor: float(score)} if score is not None and monitor else {})}
        # Not in the middle of gradient accumulation, say: resume prefers another save of this step.
        exact = per_rank is None or not per_rank["rank_state"]["caveats"]
        # Buffers differ between DDP ranks until the next forward, callback tensors may too: rank 0 writes all of those.
        pointers = _lightning.live_pointers(trainer)
        late: list[Tensor] = []

        def lazy(key: str, tensor: Tensor) -> bool:
            if not key.startswith(_LIVE) or tensor.data_ptr() not in pointers.lazy:
                return False
            late.append(tensor)
            return True

        try:
            ticket = self._engine.save(
                trainer.global_step,
                state,
                per_rank=per_rank,
                names=names,
                supersedes=supersedes,
                info=info,
                exact=exact,
                lazy=lazy if self._lazy and self._overlap and self._session.lazy else False,
                replicated=lambda key, tensor: key.startswith(_LIVE) and tensor.data_ptr() in pointers.replicated,
            )
        except OSError:
            logger.warning(
                "no checkpoint at step %d; training goes on, the next save tries again",
                trainer.global_step,
                exc_info=True,
            )
            ticket = None
        if ticket is None:
            self._not_saved(trainer, names)
            return False
        self._saves += 1
        self._saved_as.update(dict.fromkeys(names, self._saves))
        self._known.update(names)
        self._session.expect(self._key, ticket, self)
        if self._engine.pending:
            self._session.watch(self._key, late, names)
        return True

    def _not_saved(self, trainer: Any, names: list[str]) -> None:
        if trainer.world_size == 1:
            self._last_global_step_saved = 0  # the next occasion may try again
        else:
            # Ranks must go on deciding alike, whether or not the others could save.
            self._known.update(names)

    def _may_open_again(self, trainer: Any) -> bool:
        """Tries an engine that could not be opened again, at the 1st, 2nd, 4th, 8th, ... save that is missed.
        Collective: yes."""
        self._missed += 1
        if self._missed & (self._missed - 1) or trainer.state.status == "interrupted":
            return False
        return self._open(trainer)

    def heard(self, trainer: Any, outcome: Outcome) -> None:
        """Called once a save is safe, or failed: loggers are told and stock files it replaces go."""
        announced = outcome.stage is (Stage.COMMITTED if self._announced_tier == "local" else Stage.DURABLE)
        if outcome.tier != self._announced_tier or not announced:
            return
        if trainer.is_global_zero and outcome.names:
            for log in trainer.loggers:
                log.after_save_checkpoint(proxy(self))
        due = [path for step, path in self._stock_removals if step <= outcome.step]
        self._stock_removals = [item for item in self._stock_removals if item[0] > outcome.step]
        for path in due:
            trainer.strategy.remove_checkpoint(path)

    # -- names and removal ---------------------------------------------------------------------------------------------

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        if self._stock_way:
            super()._link_checkpoint(trainer, filepath, linkpath)  # type: ignore[misc]
            return
        if filepath not in self._requests:
            saved = self._saved_as.get(self._relative(filepath) or "")
            if saved is not None and saved == self._saved_as.get(self._relative(linkpath) or ""):
                return  # both mean the same step already
        # A link is one more name of the same step. When that step was saved in an earlier hook, save the name anew.
        if linkpath not in self._requests:
            self._requests.append(linkpath)
        if not self._collecting:
            self._save_requests(trainer)

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        if self._stock_way:
            exists: bool = super().file_exists(filepath, trainer)  # type: ignore[misc]
            return exists
        # Every rank knows the same names, so no talk is needed; names on their way to the disk count too.
        name = self._relative(str(filepath))
        return name in self._known or filepath in self._requests

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        if self._stock_way:
            remove: bool = super()._should_remove_checkpoint(trainer, previous, current)  # type: ignore[misc]
            return remove
        if previous == current or self._relative(str(previous)) is None:
            return False
        # What the user named to resume from is theirs; what we resumed from ourselves is one of a series.
        assert self._session is not None
        return str(previous) not in self._session.protected

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._stock_way:
            super()._remove_checkpoint(trainer, filepath)  # type: ignore[misc]
            return
        name = self._relative(str(filepath))
        if name is None or is_stock(str(filepath)):
            self._stock_removals.append((trainer.global_step, filepath))
            return
        self._removals.append(name)
        if not self._collecting:
            self._save_requests(trainer)
