"""This library's engine, copying lazily (default of the callback on GPUs) or before it returns."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._contenders.base import Contender, Flush, Pending, State

if TYPE_CHECKING:
    from resiliency.checkpoint import Checkpointer

__all__ = ["OursEager", "OursLazy"]

_PATIENCE = timedelta(seconds=300)


class OursLazy(Contender):
    """A thread copies into the arena while training goes on; the fence waits for what is not copied yet."""

    flush = Flush.OWN
    lazy = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from resiliency.checkpoint import Checkpointer
        from resiliency.checkpoint.options import LocalTierOptions

        # the newest step is kept, like every other contender's in this benchmark; the engine prunes and recycles
        self._checkpointer = Checkpointer(LocalTierOptions(directory=str(folder), keep=1), rank=0, world_size=1)

    def warm_up(self, state: State) -> None:
        self._checkpointer.warm_up(state)

    def save(self, step: int, state: State) -> Pending:
        ticket = self._checkpointer.save(step, state, lazy=self.lazy)
        if ticket is None:
            raise RuntimeError(f"the engine skipped the save of step {step}")

        def poll() -> bool:
            self._checkpointer.poll()
            if ticket.failed is not None:
                raise RuntimeError(f"the save of step {step} failed: {ticket.failed}")
            return "durable" in ticket.reached

        return Pending(
            safe=lambda: _fence(self._checkpointer),
            committed=lambda: ticket.wait("committed", timeout=_PATIENCE),
            durable=lambda: ticket.wait("durable", timeout=_PATIENCE),
            poll=poll,
        )

    def restore(self, step: int, state: State) -> None:
        self._checkpointer.load(into=state)

    def forget(self, step: int) -> None:
        """Nothing: the engine prunes by itself."""

    def close(self) -> None:
        self._checkpointer.close()


class OursEager(OursLazy):
    """The copy is done when the call returns."""

    lazy = False


def _fence(checkpointer: Checkpointer) -> None:
    checkpointer.fence()
