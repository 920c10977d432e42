"""Carries out a read plan over the shards of a step, checking every byte on its way into place.

A block of a shard is read once, in strides that fit into a core's cache: each stride is digested, and copied to where
it belongs while it is in the cache. Several threads share the blocks. Checking
everything first and copying then would read the file twice (1 GiB on two cores: 101 ms, against 66 ms like this; a
bare copy takes 52 to 60). The price: after damage was found, the tensors to be filled hold undefined values until
another copy has been read over them, or the restore has failed.

Boxes that are cut across rows, converted, or go to a GPU are copied by torch, after their blocks were found good.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.leaf_kinds import box_of
from resiliency.checkpoint.read_plan import Read, ReadPlanner
from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.checkpoint.state import dtype_from_name, unflatten
from resiliency.storage.blocks import new_digest
from resiliency.storage.layout import Chunk

__all__ = ["ShardAssembler", "threads_for"]

logger = logging.getLogger(__name__)

#: Bytes copied and digested at a time, see :mod:`resiliency.checkpoint.snapshot`.
_STRIDE = 512 * 1024
#: More threads only wait for memory.
_MAX_THREADS = 4


def threads_for(ranks: int) -> int:
    """Threads each of ``ranks`` ranks of this host may use to read."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


@dataclass(frozen=True)
class _ByteRange:
    """Bytes ``[start, start + nbytes)`` of a file, which go to memory at ``address``."""

    start: int
    nbytes: int
    address: int


class ShardAssembler:
    """Carries out a read plan over the shards of a step. Made, :meth:`read`, then asked for its :meth:`result`.

    Args:
        readers: one per shard, ``readers[i]`` being rank i's; they stay open until the result was taken.
        rank: whose per-rank part is wanted.
        planner: called once with every chunk stored for all ranks; says what to read into which memory.

    Raises:
        ConfigError: of the planner: what is stored and what is wanted do not fit.
    """

    def __init__(self, readers: Sequence[ShardReader], *, rank: int, planner: ReadPlanner) -> None:
        self._readers, self._rank = readers, rank
        shared = [placed.chunk for reader in readers for placed in reader.header.placed if not placed.chunk.per_rank]
        self._plan = planner(shared)
        where = {
            (key, offsets): (index, placed)
            for index, reader in enumerate(readers)
            for (key, offsets, own), placed in reader.placed.items()
            if not own
        }
        self._segments: list[list[_ByteRange]] = [[] for _ in readers]
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in readers]  # bytes that must be good, segments aside
        self._by_torch: list[tuple[int, Read]] = []
        self._direct: list[Tensor] = []
        for read in self._plan.reads:
            index, placed = where[read.key, read.chunk_offsets]
            segment = _segment(read, placed.chunk, placed.start)
            if segment is not None:
                self._segments[index].append(segment)
                self._direct.append(read.destination)
            else:
                self._ranges[index].append((placed.start, placed.end))
                self._by_torch.append((index, read))
        self._where = where
        for index in {0, rank} & set(range(len(readers))):
            self._ranges[index].append(readers[index].header.objects)
        if rank < len(readers):
            self._ranges[rank] += [
                (placed.start, placed.end) for placed in readers[rank].header.placed if placed.chunk.per_rank
            ]

    @torch.no_grad()
    def read(self, *, threads: int) -> dict[int, list[tuple[int, int]]]:
        """Reads and checks every block that holds something wanted. Blocks: until it is in place.

        Returns:
            Byte ranges that do not match their digests, by shard; empty when all is well.
        """
        jobs = [
            (index, block, segments) for index in range(len(self._readers)) for block, segments in self._blocks(index)
        ]
        good = [False] * len(jobs)
        turns = itertools.count()  # asked by all threads, which is safe: one bytecode, or locked where there is no GIL

        def take_turns() -> None:
            while (turn := next(turns)) < len(jobs):
                index, block, segments = jobs[turn]
                good[turn] = _is_good(self._readers[index], block, segments)

        with ThreadPoolExecutor(max(1, threads - 1), "resiliency-read") as pool:
            others = [pool.submit(take_turns) for _ in range(threads - 1)]
            take_turns()
            for other in others:
                other.result()
        bad: dict[int, list[tuple[int, int]]] = {}
        for (index, block, _), fine in zip(jobs, good, strict=True):
            if not fine:
                bad.setdefault(index, []).append(self._readers[index].record.blocks.bounds(block))
        for tensor in self._direct:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # autograd should know, as of any other change in place
        if not bad:
            for index, read in self._by_torch:
                _copy_box(self._readers[index], self._where[read.key, read.chunk_offsets][1], read)
        return bad

    def _blocks(self, index: int) -> list[tuple[int, list[_ByteRange]]]:
        """Blocks of a shard that hold something wanted, in order, each with the segments that lie in it, in order."""
        blocks = self._readers[index].record.blocks
        found: dict[int, list[_ByteRange]] = {}
        for segment in sorted(self._segments[index], key=lambda segment: segment.start):
            for block in blocks.within(segment.start, segment.start + segment.nbytes):
                found.setdefault(block, []).append(segment)
        for start, end in self._ranges[index]:
            for block in blocks.within(start, end):
                found.setdefault(block, [])
        return sorted(found.items())

    def result(self, *, allow_pickle: bool = False) -> tuple[Any, Any]:
        """The state tree and the per-rank tree (None when the step has no such rank); after a :meth:`read` that found
        all well."""
        absent, wanted = torch.empty(0), self._plan.tensors
        lookup: Any = (lambda key: wanted.get(key, absent)) if self._plan.partial else wanted
        state = unflatten(self._readers[0].objects()["state"], lookup, allow_pickle=allow_pickle)
        if self._rank >= len(self._readers):
            return state, None
        mine = self._readers[self._rank]
        own = {p.chunk.key: mine.tensor(p.chunk, p).clone() for p in mine.header.placed if p.chunk.per_rank}
        return state, unflatten(mine.objects()["per_rank"], own, allow_pickle=allow_pickle)


def _segment(read: Read, chunk: Chunk, start: int) -> _ByteRange | None:
    """The read as one run of bytes on both sides, or None when it is not."""
    target = read.destination
    whole_rows = read.lengths[1:] == chunk.sizes[1:] and not any(read.box_offsets[1:])
    plain = (
        target.device.type == "cpu"
        and target.layout == torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )
    if (
        not whole_rows
        or not plain
        or target.dtype != dtype_from_name(chunk.dtype)
        or tuple(target.shape) != read.lengths
    ):
        return None
    row = math.prod(chunk.sizes[1:]) * chunk.itemsize
    first = read.box_offsets[0] if read.box_offsets else 0
    return _ByteRange(start + first * row, math.prod(read.lengths) * chunk.itemsize, target.data_ptr())


def _is_good(reader: ShardReader, block: int, segments: Sequence[_ByteRange]) -> bool:
    try:
        return _read_block(reader, block, segments)
    except OSError as error:
        logger.warning("%s cannot be read at bytes %s: %s", reader.path, reader.record.blocks.bounds(block), error)
        return False


def _read_block(reader: ShardReader, block: int, segments: Sequence[_ByteRange]) -> bool:
    """Puts what lies in the block into place, and tells whether the block is good. Thread: any."""
    begin, end = reader.record.blocks.bounds(block)
    digest = new_digest()
    at = begin
    for segment in segments:
        first, last = max(segment.start, begin), min(segment.start + segment.nbytes, end)
        if first < at:
            # Two destinations for the same bytes: they are digested once and copied twice.
            overlap = min(last, at)
            reader.copy(first, segment.address + first - segment.start, overlap - first)
            first = overlap
        for gap in range(at, first, _STRIDE):
            digest.update(reader.view(gap, min(gap + _STRIDE, first)))
        at = max(at, first)
        while at < last:
            stride = min(_STRIDE, last - at)
            reader.take(at, segment.address + at - segment.start, stride, digest)
            at += stride
    for gap in range(at, end, _STRIDE):
        digest.update(reader.view(gap, min(gap + _STRIDE, end)))
    return digest.hexdigest() == reader.record.digests[block]


def _copy_box(reader: ShardReader, placed: Any, read: Read) -> None:
    source = reader.tensor(placed.chunk, placed)
    read.destination.detach().copy_(box_of(source, read.box_offsets, read.lengths))
