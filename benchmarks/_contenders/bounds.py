"""Lower bounds for a copy with digests, and for a copy into a file: they explain targets that are missed.

All cores share the work, and nothing else is done: no plan, no manifest, no agent. Where the library is as fast as a
bound, only dropping that work (a digest of every byte, files on a disk) would make it faster.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import xxhash

from benchmarks._contenders.base import Flush, Pending, State
from benchmarks._contenders.floor import CopyFloor

__all__ = ["DigestBound", "FileBound"]

_PIECE = 8 * 1024 * 1024
_STRIDE = 512 * 1024
_HUGE = 2 * 1024 * 1024


class DigestBound(CopyFloor):
    """The copy floor with xxh3-64 of every byte, taken just before it is copied."""

    def warm_up(self, state: State) -> None:
        super().warm_up(state)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pieces: list[tuple[memoryview, int]] = []
        offset = 0
        for tensor in state.values():
            view = memoryview(tensor.numpy()).cast("B")
            self._pieces += [(view[at : at + _PIECE], offset + at) for at in range(0, len(view), _PIECE)]
            offset += len(view)
        self._helpers = max(1, len(os.sched_getaffinity(0)) - 1)
        self._pool = ThreadPoolExecutor(self._helpers)
        list(self._pool.map(lambda _: None, range(self._helpers)))

    def save(self, step: int, state: State) -> Pending:
        self._share(lambda piece, offset: _store(piece, self._address + offset, digest=True))
        return Pending()

    def _share(self, work: Callable[[memoryview, int], None]) -> None:
        """Processes every piece once, on this thread and the helpers."""
        turns = count()

        def take_turns() -> None:
            while (turn := next(turns)) < len(self._pieces):
                work(*self._pieces[turn])

        others = [self._pool.submit(take_turns) for _ in range(self._helpers)]
        take_turns()
        for other in others:
            other.result()


class FileBound(DigestBound):
    """A copy, without digests, into a mapping of one file that was fsynced before. Restores read and digest it.

    The file is written so that its pages are as large as the file system supports, which makes stores fastest.
    """

    flush = Flush.OWN

    def warm_up(self, state: State) -> None:
        super().warm_up(state)
        self._file = os.open(self.path(0), os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(self._file, 0, self._bytes)
        zeros = bytes(_HUGE)
        for at in range(0, self._bytes, _HUGE):
            os.pwrite(self._file, zeros[: self._bytes - at], at)
        self._file_map = mmap.mmap(self._file, self._bytes)
        self._file_address = ctypes.addressof(ctypes.c_char.from_buffer(self._file_map))
        self.save(0, state)
        os.fsync(self._file)

    def save(self, step: int, state: State) -> Pending:
        self._share(lambda piece, offset: _store(piece, self._file_address + offset, digest=False))
        return Pending(durable=lambda: os.fsync(self._file))

    def restore(self, step: int, state: State) -> None:
        def read(piece: memoryview, offset: int) -> None:
            digest = xxhash.xxh3_64()
            for at in range(0, len(piece), _STRIDE):
                stride = piece[at : at + _STRIDE]
                os.preadv(self._file, [stride], offset + at)
                digest.update(stride)
            digest.hexdigest()

        self._share(read)


def _store(piece: memoryview, target: int, *, digest: bool) -> None:
    source = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    total = xxhash.xxh3_64()
    for at in range(0, len(piece), _STRIDE):
        if digest:
            total.update(piece[at : at + _STRIDE])
        ctypes.memmove(target + at, source + at, min(_STRIDE, len(piece) - at))
    total.hexdigest()
