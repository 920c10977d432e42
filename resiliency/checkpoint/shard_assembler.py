"""Carries out a read plan: reads the shards of a step into tensors and checks every byte in the same pass.

A block of a shard is read once, in strides that fit into a core's cache: each stride is digested, and copied to its
destination while it is in the cache. Several threads share the blocks. Checking everything first and copying afterwards
would read the file twice (1 GiB on two cores: 101 ms instead of 66 ms; a bare copy takes 52 to 60). The disadvantage:
after damage was found, the tensors hold undefined values until another copy is read, or the restore fails.

Boxes that are cut across rows, converted, or go to a GPU are copied by torch, after their blocks were checked.
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
#: More threads are not faster: memory bandwidth is the limit.
_MAX_THREADS = 4


def threads_for(ranks: int) -> int:
    """Threads each of ``ranks`` ranks of this host may use to read."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


@dataclass(frozen=True)
class _ByteRange:
    """Bytes ``[start, start + nbytes)`` of a file, to be copied to memory at ``address``."""

    start: int
    nbytes: int
    address: int


class ShardAssembler:
    """Carries out a read plan over the shards of a step. Call :meth:`read`, then :meth:`result`.

    Args:
        readers: one per shard, ``readers[i]`` for rank i's; must stay open until the result was returned.
        rank: the rank whose per-rank part is read.
        planner: called once with every chunk that is not per-rank; returns the read plan.

    Raises:
        ConfigError: raised by the planner: the stored chunks do not fit what is to be filled.
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
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in readers]  # further bytes to check, beside the segments
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
        """Reads and checks every block with bytes of the plan. Blocks: until all are read.

        Returns:
            Byte ranges that do not match their digests, by shard; empty when all match.
        """
        jobs = [
            (index, block, segments) for index in range(len(self._readers)) for block, segments in self._blocks(index)
        ]
        good = [False] * len(jobs)
        numbers = itertools.count()  # shared by all threads: next() is atomic with the GIL, and locked without

        def run_jobs() -> None:
            while (number := next(numbers)) < len(jobs):
                index, block, segments = jobs[number]
                good[number] = _read_and_check(self._readers[index], block, segments)

        with ThreadPoolExecutor(max(1, threads - 1), "resiliency-read") as pool:
            others = [pool.submit(run_jobs) for _ in range(threads - 1)]
            run_jobs()
            for other in others:
                other.result()
        bad: dict[int, list[tuple[int, int]]] = {}
        for (index, block, _), fine in zip(jobs, good, strict=True):
            if not fine:
                bad.setdefault(index, []).append(self._readers[index].record.blocks.bounds(block))
        for tensor in self._direct:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # the change in place, for autograd
        if not bad:
            for index, read in self._by_torch:
                _copy_box(self._readers[index], self._where[read.key, read.chunk_offsets][1], read)
        return bad

    def _blocks(self, index: int) -> list[tuple[int, list[_ByteRange]]]:
        """Blocks of a shard with bytes of the plan, in order, each with the segments in it, in order."""
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
        """The state tree and the per-rank tree (None when the step has no such rank).

        Call it only after a :meth:`read` that found no damage.
        """
        absent, wanted = torch.empty(0), self._plan.tensors
        lookup: Any = (lambda key: wanted.get(key, absent)) if self._plan.partial else wanted
        state = unflatten(self._readers[0].objects()["state"], lookup, allow_pickle=allow_pickle)
        if self._rank >= len(self._readers):
            return state, None
        reader = self._readers[self._rank]
        own = {p.chunk.key: reader.tensor(p.chunk, p).clone() for p in reader.header.placed if p.chunk.per_rank}
        return state, unflatten(reader.objects()["per_rank"], own, allow_pickle=allow_pickle)


def _segment(read: Read, chunk: Chunk, start: int) -> _ByteRange | None:
    """The read as a copy of contiguous bytes, or None when source or destination is not contiguous."""
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


def _read_and_check(reader: ShardReader, block: int, segments: Sequence[_ByteRange]) -> bool:
    try:
        return _read_block(reader, block, segments)
    except OSError as error:
        logger.warning("%s cannot be read at bytes %s: %s", reader.path, reader.record.blocks.bounds(block), error)
        return False


def _read_block(reader: ShardReader, block: int, segments: Sequence[_ByteRange]) -> bool:
    """Copies the block's bytes to their destinations; True when the block matches its digest. Thread: any."""
    begin, end = reader.record.blocks.bounds(block)
    digest = new_digest()
    at = begin
    for segment in segments:
        first, last = max(segment.start, begin), min(segment.start + segment.nbytes, end)
        if first < at:
            # Bytes with two destinations are digested once and copied twice.
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
