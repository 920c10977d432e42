"""What several checkpoint callbacks of one trainer share: engines by directory, the rank state, the resume decision."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.manifest import META_DIR, StepId
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.reader import load_path, locate
from resiliency.plugins import _lightning
from resiliency.plugins._rank_state import RankState

__all__ = ["Attachment", "EngineKey", "attachment"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineKey:
    """What tells engines of one trainer apart."""

    directory: str
    run: str


@dataclass
class Attachment:
    """The library's presence in one fit of one trainer. Made by the first callback that is set up, closed by the last.

    Threads: training thread.
    """

    trainer: Any
    rank_state: RankState | None = None
    engines: dict[EngineKey, Checkpointer] = field(default_factory=dict)
    users: dict[EngineKey, int] = field(default_factory=dict)
    resumable: list[EngineKey] = field(default_factory=list)
    explicit_path: str | None = None
    resumed: StepId | None = None
    _intercepted: bool = False
    _handle: Any = None

    def open(
        self, key: EngineKey, *, local: LocalTierOptions, remotes: Sequence[RemoteTierOptions], options: CheckpointerOptions
    ) -> Checkpointer:
        """The engine of a directory and run; opened by its first user. Collective: yes."""
        engine = self.engines.get(key)
        if engine is None:
            engine = Checkpointer(
                local, remotes=remotes, run=key.run, rank=self.trainer.global_rank, world_size=self.trainer.world_size, options=options
            )
            engine.open()
            self.engines[key] = engine
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_any_step)
        self.users[key] = self.users.get(key, 0) + 1
        return engine

    def offer_resume(self, key: EngineKey) -> None:
        """Lets the fit that is starting resume from this engine when the user named no checkpoint."""
        self.resumable.append(key)
        if not self._intercepted:
            self._intercepted = True
            _lightning.intercept_resume(self.trainer, self._decide)

    def _decide(self, path: Any) -> Any:
        if path is not None and os.fspath(path) not in {self.virtual(key) for key in self.engines}:
            self.explicit_path = os.fspath(path)
            return path
        newest: tuple[StepId, EngineKey] | None = None
        for key in self.resumable:
            steps = self.engines[key].steps()
            if steps and (newest is None or steps[0][0] > newest[0]):
                newest = (steps[0][0], key)
        if newest is None:
            return None
        if self.trainer.is_global_zero:
            logger.info("resuming from %s of run %r in %s; pass auto_resume=False or another dirpath or run to start afresh",
                        newest[0], newest[1].run, newest[1].directory)  # fmt: skip
        return self.virtual(newest[1])

    @staticmethod
    def virtual(key: EngineKey) -> str:
        """A path that means the newest step of an engine, the same on every rank."""
        return os.path.join(key.directory, META_DIR, key.run)

    def load(self, path: str, *, weights_only: bool | None) -> dict[str, Any] | None:
        """Loads one of our checkpoints for Lightning; None when ``path`` is a stock one. Collective: yes.

        Raises:
            CorruptShard, NoCheckpointFound: the path means one of our steps and it cannot be restored.
        """
        allow_pickle = weights_only is False
        for key, engine in self.engines.items():
            if path == self.virtual(key):
                restored = engine.load(allow_pickle=allow_pickle)
            else:
                name = _relative(path, key.directory)
                step = next((step for step, names in engine.steps() if name in names), None) if name else None
                if step is None:
                    continue
                restored = engine.load(step=step, allow_pickle=allow_pickle)
            if restored is None:
                continue
            self.resumed = restored.id
            state: dict[str, Any] = restored.state
            self._place_rank_state(state, restored.per_rank, restored.world_size)
            return state
        located = locate(path)
        if located is None:
            return None
        state, per_rank = load_path(located, rank=self.trainer.global_rank, allow_pickle=allow_pickle)
        if self.engines:
            manifest = located.listing.manifest
            assert manifest is not None
            self._place_rank_state(state, per_rank, manifest.world_size)
        loaded: dict[str, Any] = state
        return loaded

    def _place_rank_state(self, state: dict[str, Any], per_rank: Any, world_size: int) -> None:
        if self.rank_state is None or "loops" not in state:
            return
        own = per_rank.get("rank_state") if isinstance(per_rank, Mapping) else None
        if world_size != self.trainer.world_size or own is None:
            if "optimizer_states" in state:
                logger.warning(
                    "rank %d: the checkpoint was written by %d ranks, this job has %d: random generators and data loaders start anew on"
                    " this rank, everything else continues exactly", self.trainer.global_rank, world_size, self.trainer.world_size,
                )  # fmt: skip
            return
        self.rank_state.load(own)
        self.rank_state.patch_loaded_checkpoint(state, own)

    def fence(self) -> float:
        """Waits until no pending copy of any engine reads live tensors. Returns seconds."""
        return sum(engine.fence() for engine in self.engines.values() if engine.pending)

    def _before_any_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # With a closure (automatic optimisation) the forward is still to come; on_before_optimizer_step fences then.
        if not args[1:] and not kwargs.get("closure"):
            self.fence()

    def release(self, key: EngineKey, *, close: Callable[[Checkpointer], None]) -> None:
        """One user of an engine is done; the last one closes it, and the last engine ends the attachment."""
        left = self.users.get(key, 0) - 1
        if left > 0:
            self.users[key] = left
            return
        self.users.pop(key, None)
        engine = self.engines.pop(key, None)
        if engine is not None:
            close(engine)
        if not self.engines:
            if self._handle is not None:
                self._handle.remove()
                self._handle = None
            if self.rank_state is not None:
                self.rank_state.detach(self.trainer)
            _attached.pop(self.trainer, None)


_attached: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()


def attachment(trainer: Any) -> Attachment:
    """The trainer's attachment, made when there is none."""
    found = _attached.get(trainer)
    if found is None:
        found = _attached[trainer] = Attachment(weakref.proxy(trainer))
        found.trainer = trainer
    return found


def _relative(path: str, directory: str) -> str | None:
    absolute = path if "://" in path else os.path.abspath(path)
    prefix = directory.rstrip("/") + "/"
    return absolute.removeprefix(prefix) if absolute.startswith(prefix) else None


def lazy_filter(trainer: Any) -> Callable[[str, Tensor], bool]:
    """Which tensors of a Lightning checkpoint may be copied while the next forward and backward run."""
    pointers = _lightning.lazy_pointers(trainer)
    return lambda key, tensor: key.startswith(("state_dict/", "optimizer_states/")) and tensor.data_ptr() in pointers
