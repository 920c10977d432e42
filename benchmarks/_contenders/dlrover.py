"""DLRover Flash Checkpoint, MEMORY storage: a copy in shared memory, no file."""

from __future__ import annotations

from pathlib import Path

from benchmarks._contenders.base import Contender, Flush, Pending, State, copy_into

__all__ = ["DlroverMemory"]


class DlroverMemory(Contender):
    """``DdpCheckpointer`` outside of its launcher; writing to disk needs the launcher's agent and is left out."""

    flush = Flush.NONE

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        AsyncCheckpointSaver.start_async_saving_ckpt()
        self._checkpointer = DdpCheckpointer(str(folder))
        self._memory = StorageType.MEMORY

    def save(self, step: int, state: State) -> Pending:
        self._checkpointer.save_checkpoint(step, {"model": state}, storage_type=self._memory)
        return Pending()

    def restore(self, step: int, state: State) -> None:
        copy_into(state, self._checkpointer.load_checkpoint()["model"])
