"""Compares live tensors with the bytes that were copied from them, to notice changes that torch does not count."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.copy_sources import Sources
from resiliency.storage.blocks import Blocks, new_digest

__all__ = ["Comparison"]


class Comparison:
    """Reads the tensors of a finished copy once more, block by block. Thread: any; several can work at the same time.

    Args:
        sources: of the copy.
        address: where the file is mapped. It must stay mapped until :meth:`changed` or :meth:`stop` has returned.
        blocks, mine: as in :class:`~resiliency.checkpoint.snapshot.Job`.
        digests: of the blocks as they were copied, by number.
    """

    def __init__(
        self, sources: Sources, address: int, *, blocks: Blocks, mine: Sequence[int], digests: Sequence[str]
    ) -> None:
        self._sources, self._address, self._blocks, self._digests = sources, address, blocks, digests
        self._left = list(reversed(mine))  # the next block is the last entry
        self._running = 0
        self._changed: set[int] = set()
        self._lock = threading.Condition()

    def work(self) -> bool:
        """Compares one block. Returns False when no block is left to start. Blocks: for the block."""
        with self._lock:
            if not self._left:
                return False
            index = self._left.pop()
            self._running += 1
        changed: set[int] = set()
        try:
            changed = self._changed_in(index)
        finally:
            with self._lock:
                self._changed |= changed
                self._running -= 1
                self._lock.notify_all()
        return True

    def _changed_in(self, index: int) -> set[int]:
        pieces = list(self._sources.within(*self._blocks.bounds(index)))
        digest = new_digest()
        for address, _, nbytes in pieces:
            digest.update(view(address, nbytes))
        if digest.hexdigest() == self._digests[index]:
            return set()
        different = [at for address, at, nbytes in pieces if view(address, nbytes) != view(self._address + at, nbytes)]
        return {self._sources.storage_at(at) for at in different}

    def changed(self) -> list[int]:
        """Numbers of the storages whose bytes differ from those in the file, in order; of those compared, if
        :meth:`stop` was called meanwhile. Blocks: until all blocks are compared."""
        while self.work():
            continue
        with self._lock:
            self._lock.wait_for(lambda: not self._running)
            return sorted(self._changed)

    def stop(self) -> None:
        """Starts no further block. Blocks: until no tensor is read any more, for a block at most. Idempotent."""
        with self._lock:
            self._left.clear()
            self._lock.wait_for(lambda: not self._running)
