"""torchsnapshot: ``Snapshot.async_take``."""

from __future__ import annotations

from pathlib import Path

from benchmarks._contenders.base import Contender, Pending, State, copy_into

__all__ = ["TorchSnapshot"]


class TorchSnapshot(Contender):
    """Copies part of the state on the caller and writes from threads of the trainer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torchsnapshot

        self._lib = torchsnapshot

    def save(self, step: int, state: State) -> Pending:
        pending = self._lib.Snapshot.async_take(str(self.path(step)), {"model": self._lib.StateDict(**state)})

        def wait() -> None:
            pending.wait()

        return Pending(committed=wait)

    def restore(self, step: int, state: State) -> None:
        target = self._lib.StateDict(**state)
        self._lib.Snapshot(str(self.path(step))).restore({"model": target})
        copy_into(state, target)
