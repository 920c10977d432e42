"""Compares live tensors with the bytes that were copied from them, to notice changes that torch does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.copy_sources import Sources
from resiliency.errors import Timeout
from resiliency.storage.blocks import Blocks, new_digest

__all__ = ["Comparison"]

#: Seconds after which a thread that has not compared a block hangs; a block takes milliseconds.
_BLOCK_S = 60.0


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
        # One for each block that was begun, held while it is read. The training thread may be interrupted (Ctrl-C) at
        # any moment; a lock, unlike a condition, is entered and left in C, so none stays held then.
        self._begun: list[threading.Lock] = []
        self._taking = threading.Lock()
        self._changed: set[int] = set()
        self._stopped = False

    def work(self) -> bool:
        """Compares one block. Returns False when no block is left to start. Blocks: for the block."""
        reading = threading.Lock()
        with reading:
            self._begun.append(reading)  # before the block is taken, so that others wait for it
            if self._stopped:
                return False
            index: int | None = None
            done = False
            try:
                with self._taking:
                    if self._left:  # without calls, because Python runs the handlers of signals after a call
                        index = self._left[-1]
                        del self._left[-1]
                if index is None:
                    return False
                self._changed |= self._changed_in(index)
                done = True
            finally:
                if index is not None and not done:
                    self._left.append(index)  # for another thread
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
        :meth:`stop` was called meanwhile. Blocks: until all blocks are compared.

        Raises:
            Timeout: another thread has not finished a block within a minute.
        """
        self._work_and_wait()
        while self._left and not self._stopped:  # another thread was interrupted in its block
            self._work_and_wait()
        return sorted(self._changed)

    def stop(self) -> None:
        """Starts no further block. Blocks: until no tensor is read any more, for a block at most. Idempotent.

        Raises:
            Timeout: as :meth:`changed`.
        """
        self._stopped = True
        self._left.clear()
        self._await_begun()

    def _work_and_wait(self) -> None:
        while self.work():
            continue
        self._await_begun()

    def _await_begun(self) -> None:
        deadline = time.monotonic() + _BLOCK_S
        for reading in list(self._begun):
            if not reading.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise Timeout(f"the thread at the fence did not compare its block within {_BLOCK_S:.0f} s")
            reading.release()
