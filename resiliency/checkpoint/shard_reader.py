"""Reads one shard file of the local tier, and checks the end of the file against its record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.errors import CorruptShard
from resiliency.regular_file import open_regular
from resiliency.state.tree import dtype_from_name
from resiliency.storage.archive import ArchiveEntry, read_directory
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.shard_file import IDENTITY_BYTES, RANK_STATE, Placed, read_identity
from resiliency.storage.tiers.base import Tier

__all__ = ["ShardReader", "shard_reader"]


class ShardReader:
    """A local shard file, open for reading. Close it after use.

    It is read with ``pread``, not through a mapping: a mapping would fault for each page (on a ramdisk this takes twice
    the time), and a failing disk, or somebody who truncates the file meanwhile, would end the process with a signal.

    Attributes:
        entries: of the archive, by name.
    """

    def __init__(self, path: str, record: ShardRecord) -> None:
        self.path = path
        self.record = record
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise CorruptShard(f"{path}: {error.strerror}", path=path) from error
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path, record = self.path, self.record
        size = os.fstat(self._fd).st_size
        if size != record.nbytes or size < IDENTITY_BYTES:
            raise CorruptShard(f"{path}: {size} bytes instead of {record.nbytes}", path=path)
        self.tail_start = record.sections[-1] if record.sections else 0
        self.check(self.tail_start)  # first, because the end says where all other bytes are
        identity = read_identity(self._checked(0, IDENTITY_BYTES), where=path)
        expected = (record.id, record.run, record.rank)
        if identity is None or (identity.id, identity.run, identity.rank) != expected:
            holds = f"{identity.id}, shard {identity.rank}" if identity is not None else "something else"
            raise CorruptShard(f"{path}: holds {holds}, not {record.id}, shard {record.rank}", path=path)
        self.entries: dict[str, ArchiveEntry] = read_directory(self._checked, record.nbytes, where=path)

    @property
    def has_rank_state(self) -> bool:
        """True when this shard holds its rank's own state. False for a copy of shard 0 that a host without rank 0 wrote
        into its own folder: only rank 0's host has rank 0's own state."""
        return RANK_STATE in self.entries

    def check(self, start: int = 0) -> None:
        """Compares the blocks from an offset on with their digests. Blocks: while it reads them.

        Raises:
            CorruptShard: a block does not match; names the first.
        """
        blocks = self.record.blocks
        for index in blocks.within(start, self.record.nbytes):
            first, end = blocks.bounds(index)
            if block_digest(memoryview(self._checked(first, end))) != self.record.digests[index]:
                raise CorruptShard(
                    f"{self.path}: bytes {[(first, end)]} do not match their digests",
                    path=self.path,
                    ranges=[(first, end)],
                )

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``[start, end)`` of the file; fewer when it was truncated. Thread: any; releases the GIL.

        Raises:
            OSError: the disk failed.
        """
        pieces = []
        while start < end and (piece := os.pread(self._fd, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _checked(self, start: int, end: int) -> bytes:
        """Like :meth:`read`, but never fewer bytes.

        Raises:
            CorruptShard: the bytes cannot be read.
        """
        try:
            found = self.read(start, end)
        except OSError as error:
            raise CorruptShard(f"{self.path}: {error.strerror}", path=self.path, ranges=[(start, end)]) from error
        if len(found) < end - start:
            raise CorruptShard(f"{self.path}: was made shorter", path=self.path, ranges=[(start, end)])
        return found

    def entry(self, name: str) -> bytes:
        """The data of an entry that follows the storages.

        Raises:
            CorruptShard: there is no entry of that name.
        """
        found = self.entries.get(name)
        if found is None or found.at < self.tail_start:
            raise CorruptShard(f"{self.path}: entry {name} is missing", path=self.path)
        return self._checked(found.start, found.end)

    def take(self, start: int, targets: Sequence[bytearray | memoryview], digest: Any) -> None:
        """Copies bytes of the file, from ``start`` on, to one target after the other, and adds them to a digest.
        Thread: any; releases the GIL.

        Args:
            targets: at most 1024, none of them empty.

        Raises:
            OSError: the disk failed.
            CorruptShard: the file has fewer bytes.
        """
        self._fill(start, targets)
        for target in targets:
            digest.update(target)

    def copy(self, start: int, address: int, nbytes: int) -> None:
        """Copies bytes of the file to memory.

        Raises:
            CorruptShard: the bytes cannot be read.
        """
        if not nbytes:
            return
        try:
            self._fill(start, [view(address, nbytes)])
        except OSError as error:
            raise CorruptShard(f"{self.path}: {error.strerror}", path=self.path) from error

    def _fill(self, start: int, targets: Sequence[bytearray | memoryview]) -> None:
        left = list(targets)
        while left:
            count = os.preadv(self._fd, left, start)
            if not count:
                raise CorruptShard(f"{self.path}: was made shorter", path=self.path)
            start += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = memoryview(left[0])[count:]

    def tensor(self, placed: Placed) -> Tensor:
        """A copy of the stored chunk, on the CPU.

        Raises:
            CorruptShard: it cannot be read.
        """
        chunk = placed.chunk
        dtype = dtype_from_name(chunk.dtype)
        if placed.end == placed.start:
            return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
        raw = torch.empty(placed.end - placed.start, dtype=torch.uint8, device="cpu")
        self.copy(placed.start, raw.data_ptr(), raw.numel())
        elements = raw.view(dtype)
        tensor = (
            elements.view(chunk.sizes) if placed.strides is None else elements.as_strided(chunk.sizes, placed.strides)
        )
        tensor = tensor.conj() if placed.conjugated else tensor
        return torch._neg_view(tensor) if placed.negated else tensor

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def shard_reader(tier: Tier, run: str, record: ShardRecord) -> ShardReader:
    """Opens a shard of a local tier.

    Raises:
        CorruptShard: the file is missing, of another size, damaged at its end, or not the shard of the record.
    """
    return ShardReader(tier.location(step_prefix(run, record.id) + record.file), record)
