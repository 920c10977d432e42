"""torch-checkpointing, with staging on the caller or in its own thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._contenders.base import Contender, Pending, State, copy_into

__all__ = ["TorchCheckpointingAsync", "TorchCheckpointingSync", "make_manager"]


def make_manager(*, async_staging: bool) -> Any:
    """A manager for CPU states: shared-memory staging, buffered files (its O_DIRECT default is refused by many
    disks)."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=async_staging, use_shared_memory=True
    )
    return CheckpointManager(
        CheckpointManager.Config(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            save=AsyncCheckpointSaverConfig(staging_config=staging),
        )
    )


class TorchCheckpointingSync(Contender):
    """Staging on the caller, a spawned process writes. Its warm-up of the staging buffers is used."""

    async_staging = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._manager = make_manager(async_staging=self.async_staging)

    def warm_up(self, state: State) -> None:
        self._manager.prewarm_staging({"model": state})

    def save(self, step: int, state: State) -> Pending:
        future = self._manager.save(str(self.path(step)), {"model": state})

        def wait() -> None:
            future.result(timeout=300)

        return Pending(safe=self._staged, committed=wait)

    def _staged(self) -> None:
        """Its documented fence: the lock around an in-place update."""
        with self._manager.lock():
            pass

    def restore(self, step: int, state: State) -> None:
        copy_into(state, self._manager.load(str(self.path(step)), into={"model": state})["model"])

    def close(self) -> None:
        self._manager.close()


class TorchCheckpointingAsync(TorchCheckpointingSync):
    """Staging in a thread: the call returns at once, the state must not change until it is staged."""

    async_staging = True
