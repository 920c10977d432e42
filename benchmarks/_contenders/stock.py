"""torch.save and Lightning's AsyncCheckpointIO over it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks._contenders.base import Contender, Pending, State, copy_into

__all__ = ["LightningAsync", "TorchSave"]


class TorchSave(Contender):
    """One file by ``torch.save``, one ``torch.load`` back."""

    def save(self, step: int, state: State) -> Pending:
        torch.save(state, self.path(step))
        return Pending()

    def restore(self, step: int, state: State) -> None:
        copy_into(state, torch.load(self.path(step), map_location="cpu", weights_only=True))


class LightningAsync(Contender):
    """``AsyncCheckpointIO``: clones every tensor on the caller, writes from one thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        done = self._done = {}  # type: dict[str, threading.Event]

        class Announcing(TorchCheckpointIO):  # the plugin has no public way to wait for one save
            def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
                super().save_checkpoint(checkpoint, path, storage_options)
                done[str(path)].set()

        self._io = AsyncCheckpointIO(Announcing())

    def save(self, step: int, state: State) -> Pending:
        finished = self._done[str(self.path(step))] = threading.Event()
        self._io.save_checkpoint(dict(state), self.path(step))

        def wait() -> None:
            if not finished.wait(timeout=300):
                raise TimeoutError(f"AsyncCheckpointIO did not finish step {step} within 300 s")

        return Pending(committed=wait)

    def restore(self, step: int, state: State) -> None:
        copy_into(state, self._io.load_checkpoint(self.path(step), map_location="cpu"))

    def close(self) -> None:
        self._io.teardown()
