"""Reads one shard, and checks it against its record: a file of this machine, or ranges of a tier.

A file is read once, in strides that fit into a core's cache: each stride is digested, and copied to its destination
while it is in the cache. Of a tier each block is one request, and is compared with its digest before it is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.errors import CorruptShard
from resiliency.regular_file import open_regular
from resiliency.state.tree import dtype_from_name
from resiliency.storage.archive import ArchiveEntry, read_directory
from resiliency.storage.blocks import block_digest, new_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.shard_file import IDENTITY_BYTES, RANK_STATE, Placed, read_identity
from resiliency.storage.tiers.base import Tier

__all__ = ["MAX_OPEN_FILES", "ByteRange", "RangeReader", "ShardReader", "shard_reader", "tensor_of"]

#: Most shard files that a process keeps open at once. Of a step with more shards each read opens its file.
MAX_OPEN_FILES = 128
#: Bytes copied and digested at a time, small enough for a cache. After each stride a thread needs the interpreter's
#: lock, which another may hold: 256 MiB by two threads took 55 ms in strides of 256 KiB, 52 of 512 KiB, 51 of 1 MiB and
#: 55 of 4 MiB (512 KiB of cache per core, 32 MiB for all).
_STRIDE = 1024 * 1024
#: Most destinations of one system call; Linux takes 1024.
_MAX_TARGETS = 256


class ByteRange(NamedTuple):
    """Bytes ``[start, start + nbytes)`` of a shard, to be copied to memory at ``address``."""

    start: int
    nbytes: int
    address: int


class ShardReader:
    """A local shard file, open for reading. Close it after use; what is read later opens it for that read alone.

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

    @contextmanager
    def _file(self) -> Iterator[int]:
        """The file's descriptor; of a closed reader one for this use.

        Raises:
            OSError: the file cannot be opened.
        """
        if self._fd >= 0:
            yield self._fd
            return
        fd = open_regular(self.path)
        try:
            yield fd
        finally:
            os.close(fd)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``[start, end)`` of the file; fewer when it was truncated. Thread: any; releases the GIL.

        Raises:
            OSError: the disk failed.
        """
        pieces = []
        with self._file() as fd:
            while start < end and (piece := os.pread(fd, end - start, start)):
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

    def read_block(self, block: int, segments: Sequence[ByteRange]) -> bool:
        """Copies the bytes of one block to their destinations; True when the block matches its digest. Thread: any;
        releases the GIL.

        Args:
            block: its number.
            segments: sorted; those that have bytes of the block.

        Raises:
            OSError: the disk failed.
            CorruptShard: the file has fewer bytes.
        """
        begin, end = self.record.blocks.bounds(block)
        digest = new_digest()
        # A call for each tensor and each header would take most of the time when tensors are small.
        targets: list[bytearray | memoryview] = []
        taken = 0
        with self._file() as fd:
            for first, last, address in self._parts(begin, end, segments):
                while first < last:
                    nbytes = min(_STRIDE - taken, last - first)
                    if address is None:
                        targets.append(bytearray(nbytes))
                    else:
                        targets.append(view(address, nbytes))
                        address += nbytes
                    first += nbytes
                    taken += nbytes
                    if taken == _STRIDE or len(targets) == _MAX_TARGETS or first == end:
                        self._fill(fd, first - taken, targets)
                        for target in targets:
                            digest.update(target)
                        targets, taken = [], 0
        return digest.hexdigest() == self.record.digests[block]

    def _parts(self, begin: int, end: int, segments: Sequence[ByteRange]) -> Iterator[tuple[int, int, int | None]]:
        """Bytes ``[begin, end)`` in order, in parts: (first, end, address they go to; None: they are only checked)."""
        at = begin
        for segment in segments:
            first, last = max(segment.start, begin), min(segment.start + segment.nbytes, end)
            if first < at:
                # Bytes with two destinations are digested once and copied twice.
                overlap = min(last, at)
                self.copy(first, segment.address + first - segment.start, overlap - first)
                first = overlap
            elif first > at:
                yield at, first, None
                at = first
            if first < last:
                yield first, last, segment.address + first - segment.start
                at = last
        if at < end:
            yield at, end, None

    def copy(self, start: int, address: int, nbytes: int) -> None:
        """Copies bytes of the shard to memory.

        Raises:
            CorruptShard: the bytes cannot be read.
        """
        if nbytes <= 0:
            return
        try:
            with self._file() as fd:
                self._fill(fd, start, [view(address, nbytes)])
        except OSError as error:
            raise CorruptShard(f"{self.path}: {error.strerror}", path=self.path) from error

    def _fill(self, fd: int, start: int, targets: Sequence[bytearray | memoryview]) -> None:
        left = list(targets)
        while left:
            count = os.preadv(fd, left, start)
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
        raw = torch.empty(placed.end - placed.start, dtype=torch.uint8, device="cpu")
        self.copy(placed.start, raw.data_ptr(), raw.numel())
        return tensor_of(raw, placed)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RangeReader(ShardReader):
    """A shard of any tier, read by ranges: one request for each block. Keeps nothing open.

    The end of the shard stays in memory. Which shard of which step it is follows from the digests in its record.

    Args:
        tier: where the shard is.
        key: of the shard.
        record: of the shard.

    Raises:
        CorruptShard: it is missing, or its end is damaged.
        TierError: the tier cannot be read.
    """

    def __init__(self, tier: Tier, key: str, record: ShardRecord) -> None:
        self._tier, self._key = tier, key
        self.path, self.record = tier.location(key), record
        self.tail_start = record.sections[-1] if record.sections else 0
        self._tail = b""
        self._tail = self.read(self.tail_start, record.nbytes)
        self.entries = read_directory(self._checked, record.nbytes, where=self.path)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``, checked. Blocks: for a request for each block that has some of them.

        Raises:
            CorruptShard: a block is damaged or missing.
            TierError: the tier cannot be read.
        """
        if self._tail and start >= self.tail_start:
            return self._tail[start - self.tail_start : end - self.tail_start]
        found = self.record.blocks.within(start, end)
        begin = self.record.blocks.bounds(found[0])[0] if found else start
        return b"".join(map(self._block, found))[start - begin : end - begin]

    def _block(self, block: int) -> bytes:
        first, end = self.record.blocks.bounds(block)
        try:
            data = self._tier.read_range(self._key, first, end)
        except FileNotFoundError as error:
            raise CorruptShard(f"{self.path}: is missing", path=self.path) from error
        if len(data) != end - first or block_digest(data) != self.record.digests[block]:
            raise CorruptShard(
                f"{self.path}: bytes {[(first, end)]} do not match their digests", path=self.path, ranges=[(first, end)]
            )
        return data

    def read_block(self, block: int, segments: Sequence[ByteRange]) -> bool:
        """As of a file, but nothing is copied before the block was found good.

        Raises:
            CorruptShard: the block is damaged, or the shard is missing.
            TierError: the tier cannot be read.
        """
        begin, end = self.record.blocks.bounds(block)
        data = memoryview(self._block(block))
        for start, nbytes, address in segments:
            first, last = max(start, begin), min(start + nbytes, end)
            if first < last:
                view(address + first - start, last - first)[:] = data[first - begin : last - begin]
        return True

    def copy(self, start: int, address: int, nbytes: int) -> None:
        """Copies bytes of the shard to memory, checked.

        Raises:
            CorruptShard: a block is damaged, or the shard is missing.
            TierError: the tier cannot be read.
        """
        if nbytes > 0:
            view(address, nbytes)[:] = self.read(start, start + nbytes)

    def close(self) -> None:
        """Does nothing: there is nothing open."""


def tensor_of(raw: Tensor, placed: Placed) -> Tensor:
    """A stored chunk as a tensor that uses the memory of its bytes (uint8, on the CPU)."""
    chunk = placed.chunk
    dtype = dtype_from_name(chunk.dtype)
    if not raw.numel():
        return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
    elements = raw.view(dtype)
    tensor = elements.view(chunk.sizes) if placed.strides is None else elements.as_strided(chunk.sizes, placed.strides)
    tensor = tensor.conj() if placed.conjugated else tensor
    return torch._neg_view(tensor) if placed.negated else tensor


def shard_reader(tier: Tier, run: str, record: ShardRecord) -> ShardReader:
    """Opens a shard of a local tier.

    Raises:
        CorruptShard: the file is missing, of another size, damaged at its end, or not the shard of the record.
    """
    return ShardReader(tier.location(step_prefix(run, record.id) + record.file), record)
