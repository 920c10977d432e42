"""Carries out a read plan: reads the shards of a step into tensors and checks every byte in the same pass.

A block of a shard is read once, in strides that fit into a core's cache: each stride is digested, and copied to its
destination while it is in the cache. Several threads share the blocks. Checking everything first and copying afterwards
would read the file twice (1 GiB on two cores: 101 ms instead of 66 ms; a bare copy takes 52 to 60). The disadvantage:
once damage is found, the tensors hold undefined values until another copy is read, or the restore fails.

Boxes that are cut across rows, converted, or go to a GPU are copied by torch, after their blocks were checked.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.read_plan import Read, ReadPlan, ReadPlanner, plan_new
from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.checkpoint.stored_state import ReplicatedState, ShardedState, load_rank_state, sharded_chunks
from resiliency.errors import CorruptShard
from resiliency.state.leaf_kinds import box_of
from resiliency.state.tree import dtype_from_name
from resiliency.storage.blocks import Blocks, new_digest
from resiliency.storage.shard_file import IDENTITY_BYTES, Placed, storage_name

__all__ = ["ShardAssembler", "threads_for"]

logger = logging.getLogger(__name__)

#: Bytes copied and digested at a time, small enough for a cache. After each stride a thread needs the interpreter's
#: lock, which another may hold: 256 MiB by two threads took 55 ms in strides of 256 KiB, 52 of 512 KiB, 51 of 1 MiB and
#: 55 of 4 MiB (512 KiB of cache per core, 32 MiB for all).
_STRIDE = 1024 * 1024
#: Most destinations of one system call; Linux takes 1024.
_MAX_TARGETS = 256
#: Most threads; more are not faster, because memory bandwidth is the limit.
_MAX_THREADS = 4


def threads_for(ranks: int) -> int:
    """Number of threads with which each of ``ranks`` ranks of this host may read."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


class _ByteRange(NamedTuple):
    """Bytes ``[start, start + nbytes)`` of a file, to be copied to memory at ``address``."""

    start: int
    nbytes: int
    address: int


class ShardAssembler:
    """Carries out a read plan over the shards of a step. Call :meth:`read`, then :meth:`result`.

    Args:
        readers: by rank; must stay open until :meth:`result` has returned. For a replicated step: shard 0 and, if there
            is one, the own shard of ``rank``; for a sharded step: all shards.
        rank: the rank whose own state is read.
        planner: called once with every chunk; returns the read plan. None: everything is read into new tensors.
        allow_pickle: also restore objects of any class.

    Raises:
        ConfigError: raised by the planner: the stored chunks do not fit what is to be filled.
        pickle.UnpicklingError: the state holds objects of classes that may not be loaded.
    """

    def __init__(
        self, readers: Mapping[int, ShardReader], *, rank: int, planner: ReadPlanner | None, allow_pickle: bool
    ) -> None:
        self._readers, self._rank, self._allow_pickle = readers, rank, allow_pickle
        self._segments: dict[int, list[_ByteRange]] = {index: [] for index in readers}
        # Further byte ranges to check, which no segment reads.
        self._ranges: dict[int, list[tuple[int, int]]] = {index: [(0, IDENTITY_BYTES)] for index in readers}
        self._by_torch: list[tuple[ShardReader, Placed, Read]] = []
        self._direct: list[Tensor] = []
        self._replicated: ReplicatedState | None = None
        self._sharded: ShardedState | None = None
        self._plan: ReadPlan | None = None
        first = readers[0]
        where: dict[tuple[str, tuple[int, ...]], tuple[int, Placed]] = {}
        if first.record.replicated:
            state = self._replicated = ReplicatedState(first, allow_pickle=allow_pickle)
            if planner is None:
                self._read_storages(state, state.storages)
                # Checks headers too, because torch uses them when it reads the file.
                self._ranges[0].append((0, first.record.nbytes))
                return
            places, hidden = state.place()
            self._read_storages(state, hidden)
            where = {(key, placed.chunk.offsets): (0, placed) for key, placed in places.items()}
        else:
            self._sharded = ShardedState(first, allow_pickle=allow_pickle)
            for index, reader in readers.items():
                for placed in sharded_chunks(reader):
                    where[placed.chunk.key, placed.chunk.offsets] = (index, placed)
            if planner is not None:  # the planner may want several keys of one stored tensor
                _add_further_keys(where, self._sharded.further_keys)
        planner = planner or plan_new()
        self._plan = planner([placed.chunk for _, placed in where.values()])
        for read in self._plan.reads:
            index, placed = where[read.key, read.chunk_offsets]
            segment = _segment(read, placed)
            if segment is not None:
                self._segments[index].append(segment)
                self._direct.append(read.destination)
            else:
                self._ranges[index].append((placed.start, placed.end))
                self._by_torch.append((readers[index], placed, read))

    def _read_storages(self, state: ReplicatedState, keys: Iterable[str]) -> None:
        """Adds whole storages to the plan, as they are stored, so that views, strides and shared memory are restored
        too."""
        for key in keys:
            storage, entry = state.storages[key], self._readers[0].entries[storage_name(key)]
            if entry.nbytes:
                self._segments[0].append(_ByteRange(entry.start, entry.nbytes, storage.data_ptr()))

    @torch.no_grad()
    def read(self, *, threads: int) -> dict[int, list[tuple[int, int]]]:
        """Reads and checks every block that has bytes of the plan. Blocks: until all are read.

        Returns:
            Shard number -> byte ranges that do not match their digests; empty when all match.
        """
        jobs = [
            (index, block, segments)
            for index, reader in self._readers.items()
            for block, segments in _by_block(reader.record.blocks, self._segments[index], self._ranges[index])
        ]
        good = [False] * len(jobs)
        numbers = itertools.count()  # shared by all threads: next() is atomic with the GIL, and locked without

        def run_jobs() -> None:
            while (number := next(numbers)) < len(jobs):
                index, block, segments = jobs[number]
                good[number] = _read_and_check(self._readers[index], block, segments)

        with ThreadPoolExecutor(max(1, threads - 1), "resiliency-read") as pool:
            others = []
            try:
                for _ in range(min(threads, len(jobs)) - 1):
                    others.append(pool.submit(run_jobs))
            except RuntimeError as error:  # a limit of threads: fewer read, this one at least
                logger.debug("%d threads read, not %d: %s", len(others) + 1, threads, error)
            run_jobs()
            for other in others:
                other.result()
        bad: dict[int, list[tuple[int, int]]] = {}
        for (index, block, _), fine in zip(jobs, good, strict=True):
            if not fine:
                bad.setdefault(index, []).append(self._readers[index].record.blocks.bounds(block))
        for tensor in self._direct:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # tells autograd of the change in place
        if not bad:
            for reader, placed, read in self._by_torch:
                read.destination.detach().copy_(box_of(reader.tensor(placed), read.box_offsets, read.lengths))
        return bad

    def result(self) -> tuple[Any, Any]:
        """The state tree, and the rank's own tree (None when the step has none for this rank).

        Call it only after a :meth:`read` that found no damage.

        Raises:
            pickle.UnpicklingError: the rank's own state holds objects of classes that may not be loaded.
        """
        own, reader = None, self._readers.get(self._rank)
        if reader is not None and reader.has_rank_state:
            own = load_rank_state(reader, allow_pickle=self._allow_pickle)
        plan = self._plan
        if self._replicated is not None:
            if plan is None:
                return self._replicated.tree(), own
            return self._replicated.with_leaves(plan.tensors, partial=plan.partial), own
        assert self._sharded is not None and plan is not None
        return self._sharded.with_leaves(plan.tensors, partial=plan.partial), own


def _add_further_keys(
    where: dict[tuple[str, tuple[int, ...]], tuple[int, Placed]], further_keys: Mapping[str, str]
) -> None:
    """Adds the chunks of each leaf under the leaf's other keys, too."""
    under: dict[str, list[str]] = {}
    for key, stored in further_keys.items():
        under.setdefault(stored, []).append(key)
    for (stored, offsets), (index, placed) in list(where.items()):
        for key in under.get(stored, ()):
            where.setdefault((key, offsets), (index, placed._replace(chunk=placed.chunk._replace(key=key))))


def _segment(read: Read, placed: Placed) -> _ByteRange | None:
    """The read as a copy of contiguous bytes; None when source or destination is not contiguous, or needs
    conversion."""
    _, _, box_offsets, lengths, target = read
    chunk, start, end, strides, conjugated, negated = placed
    if (
        strides is not None
        or conjugated
        or negated
        or not target.is_cpu
        or target.layout is not torch.strided
        or not target.is_contiguous()
        or target.is_conj()
        or target.is_neg()
        or target.dtype is not dtype_from_name(chunk.dtype)
        or target.shape != lengths
    ):
        return None
    if lengths == chunk.sizes:  # a box as large as the chunk begins where the chunk does
        return _ByteRange(start, end - start, target.data_ptr())
    if lengths[1:] != chunk.sizes[1:] or any(box_offsets[1:]):  # not whole rows
        return None
    row = math.prod(chunk.sizes[1:]) * chunk.itemsize
    first = box_offsets[0] if box_offsets else 0
    return _ByteRange(start + first * row, math.prod(lengths) * chunk.itemsize, target.data_ptr())


def _by_block(
    blocks: Blocks, segments: Iterable[_ByteRange], ranges: Iterable[tuple[int, int]]
) -> list[tuple[int, list[_ByteRange]]]:
    """The blocks that have bytes of segments or ranges, in order, each with its segments in order. Pure."""
    found: dict[int, list[_ByteRange]] = {}
    begin, end, in_block = 0, 0, []  # the block that the segment before ends in, and its segments
    for segment in sorted(segments):
        start, last = segment.start, segment.start + segment.nbytes
        if begin <= start and last <= end:  # most segments; to look their block up would take twice the time
            in_block.append(segment)
            continue
        for block in blocks.within(start, last):
            in_block = found.setdefault(block, [])
            in_block.append(segment)
            begin, end = blocks.bounds(block)
    for start, end in ranges:
        for block in blocks.within(start, end):
            found.setdefault(block, [])
    return sorted(found.items())


def _read_and_check(reader: ShardReader, block: int, segments: Sequence[_ByteRange]) -> bool:
    try:
        return _read_block(reader, block, segments)
    except (OSError, CorruptShard) as error:
        logger.warning("%s cannot be read at bytes %s: %s", reader.path, reader.record.blocks.bounds(block), error)
        return False


def _read_block(reader: ShardReader, block: int, segments: Sequence[_ByteRange]) -> bool:
    """Copies the block's bytes to their destinations; True when the block matches its digest. Thread: any."""
    begin, end = reader.record.blocks.bounds(block)
    digest = new_digest()
    # A call for each tensor and each header would take most of the time when tensors are small.
    targets: list[bytearray | memoryview] = []
    taken = 0
    for first, last, address in _parts(reader, begin, end, segments):
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
                reader.take(first - taken, targets, digest)
                targets, taken = [], 0
    return digest.hexdigest() == reader.record.digests[block]


def _parts(
    reader: ShardReader, begin: int, end: int, segments: Sequence[_ByteRange]
) -> Iterator[tuple[int, int, int | None]]:
    """Bytes ``[begin, end)`` in order, in parts: (first, end, address they go to; None: they are only checked)."""
    at = begin
    for segment in segments:
        first, last = max(segment.start, begin), min(segment.start + segment.nbytes, end)
        if first < at:
            # Bytes with two destinations are digested once and copied twice.
            overlap = min(last, at)
            reader.copy(first, segment.address + first - segment.start, overlap - first)
            first = overlap
        elif first > at:
            yield at, first, None
            at = first
        if first < last:
            yield first, last, segment.address + first - segment.start
            at = last
    if at < end:
        yield at, end, None
