"""Reads one shard file of the local tier through a mapping, and checks its end against its record."""

from __future__ import annotations

import ctypes
import mmap
import os
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
from resiliency.storage.shard_file import IDENTITY_BYTES, Placed, read_identity

__all__ = ["ShardReader", "shard_reader"]


class ShardReader:
    """A local shard file, mapped for reading. Close after use; tensors from it are invalid after that.

    Attributes:
        entries: of the archive, by name.
    """

    def __init__(self, path: str, record: ShardRecord) -> None:
        self.path = path
        self.record = record
        self._map: mmap.mmap | None = None
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
        # Copy-on-write, because torch warns about read-only memory; nothing is written.
        self._map = mmap.mmap(self._fd, record.nbytes, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.tail_start = record.sections[-1] if record.sections else 0
        self.check(self.tail_start)  # what follows the storages, because it says where all other bytes are
        identity = read_identity(bytes(self.view(0, IDENTITY_BYTES)), where=path)
        expected = (record.id, record.run, record.rank)
        if identity is None or (identity.id, identity.run, identity.rank) != expected:
            holds = f"{identity.id}, shard {identity.rank}" if identity is not None else "something else"
            raise CorruptShard(f"{path}: holds {holds}, not {record.id}, shard {record.rank}", path=path)
        self.entries: dict[str, ArchiveEntry] = read_directory(
            lambda start, end: bytes(self.view(start, end)), record.nbytes, where=path
        )

    def check(self, start: int = 0) -> None:
        """Checks the blocks from an offset on against their digests. Blocks: for reading them.

        Raises:
            CorruptShard: names the first that does not match.
        """
        blocks = self.record.blocks
        for index in blocks.within(start, self.record.nbytes):
            first, end = blocks.bounds(index)
            if block_digest(self.view(first, end)) != self.record.digests[index]:
                raise CorruptShard(
                    f"{self.path}: bytes {[(first, end)]} do not match their digests",
                    path=self.path,
                    ranges=[(first, end)],
                )

    def view(self, start: int, end: int) -> memoryview:
        """Bytes of the file; checked only from ``tail_start`` on."""
        return view(self._address + start, end - start)

    def entry(self, name: str) -> bytes:
        """The data of an entry that follows the storages.

        Raises:
            CorruptShard: there is none of that name.
        """
        found = self.entries.get(name)
        if found is None or found.at < self.tail_start:
            raise CorruptShard(f"{self.path}: entry {name} is missing", path=self.path)
        return bytes(self.view(found.start, found.end))

    def take(self, start: int, address: int, nbytes: int, digest: Any) -> None:
        """Copies bytes of the file to memory and adds them to a digest. Thread: any; without the GIL.

        Reads with ``preadv``, not through the mapping: that would fault for each page (on a ramdisk twice the time),
        and a failing disk would end the process with a signal.

        Raises:
            OSError: the disk failed.
        """
        target = view(address, nbytes)
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [target[done:]], start + done)
            if count == 0:
                break  # the file was shortened: the digest will not match
            done += count
        digest.update(target)

    def copy(self, start: int, address: int, nbytes: int) -> None:
        """Copies bytes of the file to memory."""
        ctypes.memmove(address, self._address + start, nbytes)

    def tensor(self, placed: Placed) -> Tensor:
        """The stored chunk as a CPU tensor that aliases the mapping."""
        chunk = placed.chunk
        dtype = dtype_from_name(chunk.dtype)
        if placed.end == placed.start:
            return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
        assert self._map is not None
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=placed.end - placed.start, offset=placed.start)
        elements = raw.view(dtype)
        if placed.strides is not None:
            return elements.as_strided(chunk.sizes, placed.strides)
        return elements.view(chunk.sizes)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # A view is still referenced, for example by an exception's frame; it is unmapped with the last view.
            return


def shard_reader(root: str, run: str, record: ShardRecord) -> ShardReader:
    """Opens a shard of the local tier.

    Raises:
        CorruptShard: the file is missing, of another size, damaged at its end, or not the shard of the record.
    """
    return ShardReader(os.path.join(root, step_prefix(run, record.id), record.file), record)
