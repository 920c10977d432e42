"""torch.distributed.checkpoint: synchronous, async by thread, async by process with a shared-memory stager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks._contenders.base import Contender, Flush, Pending, State

__all__ = ["DcpProcess", "DcpSync", "DcpThread", "shared_stager"]


def shared_stager() -> Any:
    """The stager that keeps its shared-memory buffers between saves; every option a CPU state can use."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )


class DcpSync(Contender):
    """``dcp.save``; the file system writer fsyncs each file."""

    flush = Flush.OWN

    def save(self, step: int, state: State) -> Pending:
        dcp.save(state, checkpoint_id=self.path(step))
        return Pending()

    def restore(self, step: int, state: State) -> None:
        dcp.load(state, checkpoint_id=self.path(step))


class DcpThread(DcpSync):
    """``dcp.async_save``: copies on the caller, writes from a thread."""

    def save(self, step: int, state: State) -> Pending:
        future = dcp.async_save(state, checkpoint_id=self.path(step))

        def wait() -> None:
            future.result(timeout=300)  # type: ignore[union-attr]

        return Pending(committed=wait)


class DcpProcess(DcpSync):
    """``dcp.async_save`` with a writer process; tensors reach it through shared memory that is kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stager = shared_stager()

    def save(self, step: int, state: State) -> Pending:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        response = dcp.async_save(
            state,
            checkpoint_id=self.path(step),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        future = getattr(response, "upload_completion", response)

        def wait() -> None:
            future.result(timeout=300)

        return Pending(committed=wait)

    def close(self) -> None:
        self._stager.close()
