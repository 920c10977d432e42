"""Interface of a contender that is measured in isolation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

__all__ = ["Contender", "Flush", "Pending", "State", "nothing"]

State = dict[str, torch.Tensor]


def nothing() -> None:
    """A wait that returns at once."""


class Flush(Enum):
    """Who calls fsync for the "durable" figure of a contender."""

    OWN = "own fsync"
    """The contender calls fsync itself before it says it is done."""
    ADDED = "fsync by us"
    """It never calls fsync; the harness does on every file it wrote, and that time counts."""
    NONE = "memory only"
    """It writes no file; there is no durable figure."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """One save in flight.

    Attributes:
        safe: blocks until the state may be changed; part of the stall.
        committed: blocks until a complete copy exists that survives a kill of the trainer.
        durable: blocks until the contender reports the save as done.
        poll: True once it is durable, never blocks. Given by contenders that must be asked from the training thread;
            for the others ``committed`` and ``durable`` may be called from any thread.
    """

    safe: Callable[[], None] = nothing
    committed: Callable[[], None] = nothing
    durable: Callable[[], None] = nothing
    poll: Callable[[], bool] | None = None


class Contender:
    """Base of every contender: made once a process, used by one thread, closed by the end of the process.

    Attributes:
        folder: where the checkpoints go, empty at the start.
        flush: what "durable" means here.
    """

    flush: Flush = Flush.ADDED

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def warm_up(self, state: State) -> None:
        """Does what the contender's documentation offers to do before the first save."""

    def save(self, step: int, state: State) -> Pending:
        """Starts a save; the time it blocks is the first part of the stall."""
        raise NotImplementedError

    def restore(self, step: int, state: State) -> None:
        """Fills ``state`` in place with what was saved at ``step``, the newest."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends threads and processes where the contender has a call for it."""

    def path(self, step: int) -> Path:
        """File or folder of the checkpoint of ``step``."""
        return self.folder / str(step)

    def forget(self, step: int) -> None:
        """Deletes an older checkpoint; not timed. Contenders that prune by themselves override it."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def copy_into(state: State, loaded: State) -> None:
    """Copies loaded tensors into the live ones, skipping those that are the same object."""
    for name, tensor in state.items():
        if loaded[name] is not tensor:
            tensor.copy_(loaded[name])
