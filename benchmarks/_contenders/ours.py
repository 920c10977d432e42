"""This library's engine: lazy copies (the callback's default) or eager ones, on a disk, or on a ramdisk with uploads to
the disk."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._contenders.base import Contender, Flush, Pending, State

if TYPE_CHECKING:
    from resiliency.checkpoint import Checkpointer

__all__ = ["OursEager", "OursLazy", "OursRamdisk"]

_PATIENCE = timedelta(seconds=300)


class OursLazy(Contender):
    """A thread copies into the arena while training goes on; the fence waits for what is not copied yet."""

    flush = Flush.OWN
    lazy = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checkpointer = self._make(folder)

    def _make(self, folder: Path) -> Checkpointer:
        from resiliency.checkpoint import Checkpointer, LocalTierOptions

        # the newest step is kept, like every other contender's in this benchmark; the engine prunes by itself
        return Checkpointer(LocalTierOptions(directory=str(folder), keep=1), rank=0, world_size=1)

    def warm_up(self, state: State) -> None:
        self._checkpointer.warm_up(state)

    def save(self, step: int, state: State) -> Pending:
        from resiliency.checkpoint import Stage

        ticket = self._checkpointer.save(step, state, lazy=self.lazy)
        if ticket is None:
            raise RuntimeError(f"the engine skipped the save of step {step}")

        def poll() -> bool:
            self._checkpointer.poll()
            if ticket.failed is not None:
                raise RuntimeError(f"the save of step {step} failed: {ticket.failed}")
            return ticket.has_reached(Stage.DURABLE)

        return Pending(
            safe=lambda: _fence(self._checkpointer),
            committed=lambda: ticket.wait(Stage.COMMITTED, timeout=_PATIENCE),
            durable=lambda: ticket.wait(Stage.DURABLE, timeout=_PATIENCE),
            poll=poll,
        )

    def restore(self, step: int, state: State) -> None:
        self._checkpointer.load(into=state)

    def forget(self, step: int) -> None:
        """Does nothing: the engine prunes by itself."""

    def close(self) -> None:
        self._checkpointer.close()


class OursEager(OursLazy):
    """The copy is done when the call returns."""

    lazy = False


class OursRamdisk(OursLazy):
    """The local tier is a ramdisk; a save is durable when the agent has uploaded it to the disk."""

    def _make(self, folder: Path) -> Checkpointer:
        from resiliency.checkpoint import Checkpointer, LocalTierOptions, RemoteTierOptions

        self._memory = Path(tempfile.mkdtemp(prefix="resiliency-bench-", dir="/dev/shm"))
        local = LocalTierOptions(directory=str(self._memory), keep=1, keep_named=False, durable=False)
        return Checkpointer(
            local, remotes=[RemoteTierOptions(address=str(folder), name="disk", keep=1)], rank=0, world_size=1
        )

    def save(self, step: int, state: State) -> Pending:
        from resiliency.checkpoint import Stage

        pending = super().save(step, state)
        sent = False

        def durable() -> None:
            if not self._checkpointer.flush(Stage.DURABLE, timeout=_PATIENCE):
                raise TimeoutError(f"step {step} was not on the disk after {_PATIENCE}")

        def poll() -> bool:
            nonlocal sent
            for outcome in self._checkpointer.poll():
                if outcome.failed:
                    raise RuntimeError(f"the save of step {outcome.step} failed: {outcome.reason}")
                sent = sent or (outcome.step, outcome.tier, outcome.stage) == (step, "disk", Stage.DURABLE)
            return sent

        return replace(pending, durable=durable, poll=poll)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._memory, ignore_errors=True)


def _fence(checkpointer: Checkpointer) -> None:
    checkpointer.fence()
