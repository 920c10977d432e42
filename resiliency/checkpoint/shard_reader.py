"""Reads one shard file of the local tier through a mapping, and checks its header against its record."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.state import dtype_from_name
from resiliency.errors import CorruptShard
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.layout import Chunk, Placed, ShardHeader, header_length, parse_header
from resiliency.storage.manifest import ShardRecord

__all__ = ["ShardReader", "shard_reader"]


class ShardReader:
    """A local shard file, mapped for reading. Close after use; tensors from it are invalid after that."""

    def __init__(self, path: str, record: ShardRecord) -> None:
        self.path = path
        self.record = record
        self._map: mmap.mmap | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptShard(f"{path}: {error.strerror}", path=path) from error
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path, record = self.path, self.record
        if os.fstat(self._fd).st_size != record.nbytes:
            raise CorruptShard(f"{path}: {os.fstat(self._fd).st_size} bytes instead of {record.nbytes}", path=path)
        # Copy-on-write, because torch warns about read-only memory; nothing is written.
        self._map = mmap.mmap(self._fd, record.nbytes, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.header: ShardHeader = parse_header(self._checked_header(), where=path)
        if self.header.id != record.id:
            raise CorruptShard(f"{path}: holds {self.header.id}, not {record.id}", path=path)
        self.placed: dict[tuple[str, tuple[int, ...], bool], Placed] = {
            (p.chunk.key, p.chunk.offsets, p.chunk.per_rank): p for p in self.header.placed
        }

    def _checked_header(self) -> bytes:
        """The header, after checking the digests of its blocks, because it says where all other bytes are."""
        assert self._map is not None
        length, index, blocks = 0, 0, self.record.blocks
        while index == 0 or blocks.bounds(index)[0] < min(length, self.record.nbytes):
            start, end = blocks.bounds(index)
            if block_digest(self.view(start, end)) != self.record.digests[index]:
                raise CorruptShard(
                    f"{self.path}: bytes {[(start, end)]} do not match their digests",
                    path=self.path,
                    ranges=[(start, end)],
                )
            length = length or header_length(self._map[:8], where=self.path)
            index += 1
        return self._map[:length]

    def view(self, start: int, end: int) -> memoryview:
        """Bytes of the file, unchecked."""
        return view(self._address + start, end - start)

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

    def tensor(self, chunk: Chunk, placed: Placed) -> Tensor:
        """The stored chunk as a CPU tensor that aliases the mapping."""
        dtype = dtype_from_name(chunk.dtype)
        if placed.end == placed.start:
            return torch.empty(chunk.sizes, dtype=dtype)
        assert self._map is not None
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=placed.end - placed.start, offset=placed.start)
        return raw.view(dtype).view(chunk.sizes)

    def objects(self) -> Any:
        """The JSON of everything that is not a tensor."""
        start, end = self.header.objects
        return json.loads(bytes(self.view(start, end)))

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
        CorruptShard: the file is missing, of another size, or not the shard of the record.
    """
    return ShardReader(os.path.join(root, step_prefix(run, record.id), record.file), record)
