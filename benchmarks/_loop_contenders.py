"""The contenders of the training loop, each as the callbacks and plugins its users would pass to the Trainer.

Each function takes the folder for its checkpoints and the number of steps between saves. Imports of contenders stay
inside the functions: each run has one contender.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

__all__ = [
    "Parts",
    "dcp_process",
    "dcp_thread",
    "lightning_async",
    "none",
    "ours",
    "ours_eager",
    "stock",
    "torch_checkpointing_async",
]

_PATIENCE_S = 300.0

#: Starts a save: path and state; returns the wait for its end.
Save = Callable[[Path, dict[str, Any]], Callable[[], Any]]
Restore = Callable[[Path, dict[str, Any]], Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Arguments for the Trainer.

    Attributes:
        restore: saves a state in an empty folder; returns what loads it into the same tensors. On every rank.
    """

    callbacks: list[pl.Callback] = field(default_factory=list)
    plugins: list[Any] = field(default_factory=list)
    restore: Restore | None = None


def none(folder: Path, every: int) -> Parts:
    """No saves at all: its loss per save is the noise of the method."""
    return Parts()


def stock(folder: Path, every: int) -> Parts:
    """Lightning's own callback; rank 0 writes, both wait."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return Parts(callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=1)])


def lightning_async(folder: Path, every: int) -> Parts:
    """The same with ``AsyncCheckpointIO``."""
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    return Parts(callbacks=stock(folder, every).callbacks, plugins=[AsyncCheckpointIO()])


def dcp_thread(folder: Path, every: int) -> Parts:
    """All ranks call ``dcp.async_save``, with a gloo group of their own, because the collectives of its thread must not
    mix with DDP's."""
    import torch.distributed.checkpoint as dcp

    group = _Group()

    def save(path: Path, state: dict[str, Any]) -> Callable[[], Any]:
        future = dcp.async_save(state, checkpoint_id=path, process_group=group.value)
        return lambda: future.result(timeout=_PATIENCE_S)  # type: ignore[union-attr]

    return Parts(callbacks=[group, _Periodic(folder, every, save)], restore=_dcp_restore)


def dcp_process(folder: Path, every: int) -> Parts:
    """The same with writer processes, one a rank, and stagers that keep their shared memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from benchmarks._contenders.dcp import shared_stager

    group, stager = _Group(), shared_stager()

    def save(path: Path, state: dict[str, Any]) -> Callable[[], Any]:
        response = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=group.value,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        future = getattr(response, "upload_completion", response)
        return lambda: future.result(timeout=_PATIENCE_S)

    return Parts(callbacks=[group, _Periodic(folder, every, save)], restore=_dcp_restore)


def torch_checkpointing_async(folder: Path, every: int) -> Parts:
    """torch-checkpointing with staging in a thread; its lock is taken before the optimizer step.

    Only rank 0 saves, because the default layout is one file a rank, which would write replicated state twice. The
    manager is made before the process group exists, so that it waits for no other rank.
    """
    from benchmarks._contenders.torch_checkpointing import make_manager

    if rank_zero_only.rank != 0:
        return Parts()
    manager = make_manager(async_staging=True)

    def save(path: Path, state: dict[str, Any]) -> Callable[[], Any]:
        future = manager.save(str(path), state)
        return lambda: future.result(timeout=_PATIENCE_S)

    def fence() -> None:
        with manager.lock():
            pass

    return Parts(callbacks=[_Periodic(folder, every, save, fence, manager.prewarm_staging)])


def ours(folder: Path, every: int) -> Parts:
    """This library's callback with the arguments of the stock one."""
    from resiliency import ModelCheckpoint

    callback = ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=1)
    return Parts(callbacks=[callback], restore=_our_restore)


def ours_eager(folder: Path, every: int) -> Parts:
    """The same, but no tensor is large enough to be copied late."""
    from resiliency import CheckpointerOptions, ModelCheckpoint

    options = CheckpointerOptions(lazy_bytes=1 << 60)
    return Parts(
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=1, options=options)],
        restore=_our_restore,
    )


def _dcp_restore(folder: Path, state: dict[str, Any]) -> Callable[[], Any]:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder)
    return lambda: dcp.load(state, checkpoint_id=folder)


def _our_restore(folder: Path, state: dict[str, Any]) -> Callable[[], Any]:
    from resiliency import Checkpointer

    with Checkpointer(str(folder)) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.flush()
    reader = Checkpointer(str(folder))
    return lambda: reader.load(into=state)


class _Group(pl.Callback):
    """A gloo group besides DDP's, made when training starts. Collective: yes."""

    def __init__(self) -> None:
        self.value: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.value = dist.new_group(backend="gloo")


class _Periodic(pl.Callback):
    """Saves model and optimizer on every rank, each ``every`` steps, after a wait for the previous save. Keeps the two
    newest saves.

    Args:
        save: starts a save.
        fence: called before each optimizer step.
        warm_up: called with the full state, after the first step.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        save: Save,
        fence: Callable[[], None] | None = None,
        warm_up: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._folder, self._every, self._save, self._fence, self._warm_up = folder, every, save, fence, warm_up
        self._wait: Callable[[], Any] | None = None
        self._kept: list[Path] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._warm_up is not None and trainer.global_step == 1:
            self._warm_up(self._state(trainer, pl_module))
        if trainer.global_step % self._every:
            return
        if self._wait is not None:
            self._wait()
        while len(self._kept) > 1:
            oldest = self._kept.pop(0)
            if trainer.is_global_zero:  # not timed: deletion is not part of what is compared
                threading.Thread(
                    target=shutil.rmtree, args=(oldest,), kwargs={"ignore_errors": True}, daemon=True
                ).start()
        path = self._folder / f"step={trainer.global_step}"
        self._kept.append(path)
        self._wait = self._save(path, self._state(trainer, pl_module))

    @staticmethod
    def _state(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._fence is not None:
            self._fence()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._wait is not None:
            self._wait()
