"""Carries out a read plan: reads the shards of a step into tensors and checks every byte in the same pass.

A block of a shard is read once, and several threads share the blocks (:mod:`resiliency.checkpoint.shard_reader`).
Checking a file first and copying afterwards would read it twice (1 GiB on two cores: 101 ms instead of 66 ms; a bare
copy takes 52 to 60). The disadvantage: once damage is found, the tensors hold undefined values until another copy is
read, or the restore fails.

Boxes that are cut across rows, converted, or go to a GPU are staged in memory, a bounded number of bytes at a time, and
copied by torch after their blocks were checked.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resiliency.checkpoint.read_plan import Read, ReadPlan, ReadPlanner, plan_new
from resiliency.checkpoint.shard_reader import ByteRange, ShardReader, tensor_of
from resiliency.checkpoint.stored_state import ReplicatedState, ShardedState, load_rank_state, sharded_chunks
from resiliency.errors import CorruptShard, TierError
from resiliency.state.leaf_kinds import box_of
from resiliency.state.tree import dtype_from_name
from resiliency.storage.blocks import Blocks
from resiliency.storage.shard_file import IDENTITY_BYTES, Placed, storage_name

__all__ = ["ShardAssembler", "threads_for"]

logger = logging.getLogger(__name__)

#: Most bytes staged for torch at a time, unless one box has more. A block across two such parts is read twice.
_STAGED_BYTES = 512 * 1024 * 1024
#: Most threads; more are not faster, because memory bandwidth is the limit.
_MAX_THREADS = 4


def threads_for(ranks: int) -> int:
    """Number of threads with which each of ``ranks`` ranks of this host may read."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


class _Staged(NamedTuple):
    """A box that torch copies from a stretch of whole rows of its chunk.

    Attributes:
        shard: number of the shard.
        rows: the stretch.
        offsets: first index of the box in the stretch.
        lengths: shape of the box.
        destination: of the box.
    """

    shard: int
    rows: Placed
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    destination: Tensor


@dataclass
class _Window:
    """A part of the plan that is read in one go.

    Attributes:
        segments: shard number -> bytes that go to their destination at once.
        ranges: shard number -> further bytes to check.
        staged: boxes that torch copies afterwards.
    """

    segments: dict[int, list[ByteRange]] = field(default_factory=dict)
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    staged: list[_Staged] = field(default_factory=list)


class ShardAssembler:
    """Carries out a read plan over the shards of a step. Call :meth:`read`, then :meth:`result`.

    Attributes:
        nbytes: bytes that :meth:`read` has read so far, and those of the ends of the shards.

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
        self.nbytes = sum(reader.record.nbytes - reader.tail_start for reader in readers.values())
        self._segments: dict[int, list[ByteRange]] = {index: [] for index in readers}
        # Further byte ranges to check, which no segment reads.
        self._ranges: dict[int, list[tuple[int, int]]] = {index: [] for index in readers}
        self._staged: list[_Staged] = []
        self._direct: list[Tensor] = []
        self._replicated: ReplicatedState | None = None
        self._sharded: ShardedState | None = None
        self._plan: ReadPlan | None = None
        first = readers[0]
        where: dict[tuple[str, tuple[int, ...]], tuple[int, Placed]] = {}
        if first.record.replicated:
            state = self._replicated = ReplicatedState(first, allow_pickle=allow_pickle)
            self._ranges = {index: [(0, IDENTITY_BYTES)] for index in readers}
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
                self._staged.append(_stage(index, read, placed))

    def _read_storages(self, state: ReplicatedState, keys: Iterable[str]) -> None:
        """Adds whole storages to the plan, as they are stored, so that views, strides and shared memory are restored
        too."""
        for key in keys:
            storage, entry = state.storages[key], self._readers[0].entries[storage_name(key)]
            if entry.nbytes:
                self._segments[0].append(ByteRange(entry.start, entry.nbytes, storage.data_ptr()))

    @torch.no_grad()
    def read(self, *, threads: int) -> dict[int, CorruptShard | TierError]:
        """Reads and checks every block that has bytes of the plan. Blocks: until all are read.

        Returns:
            Shard number -> what is wrong with it: the byte ranges that do not match their digests, or the failure of
            its tier. Empty when all is well; otherwise what was to be filled holds undefined values.
        """
        damaged: dict[int, list[tuple[int, int]]] = {}
        failed: dict[int, TierError] = {}
        for window in self._windows():
            self._read_window(window, threads, damaged, failed)
        for tensor in self._direct:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # tells autograd of the change in place
        problems: dict[int, CorruptShard | TierError] = {}
        for index, ranges in damaged.items():
            path = self._readers[index].path
            problems[index] = CorruptShard(
                f"{path}: bytes {ranges} do not match their digests", path=path, ranges=ranges
            )
        return {**problems, **failed}

    def _windows(self) -> list[_Window]:
        """The plan in file order, cut where more than :data:`_STAGED_BYTES` would have to be staged."""
        cuts: list[tuple[int, int]] = []
        boxes: list[list[_Staged]] = [[]]
        nbytes = 0
        for box in sorted(self._staged, key=lambda box: (box.shard, box.rows.start)):
            size = box.rows.end - box.rows.start
            if boxes[-1] and nbytes + size > _STAGED_BYTES:
                cuts.append((box.shard, box.rows.start))
                boxes.append([])
                nbytes = 0
            boxes[-1].append(box)
            nbytes += size
        if not cuts:
            return [_Window(self._segments, self._ranges, self._staged)]
        windows = [_Window(staged=staged) for staged in boxes]
        for index, segments in self._segments.items():
            for segment in segments:
                windows[bisect.bisect(cuts, (index, segment.start))].segments.setdefault(index, []).append(segment)
        for index, ranges in self._ranges.items():
            for start, end in ranges:
                windows[bisect.bisect(cuts, (index, start))].ranges.setdefault(index, []).append((start, end))
        return windows

    def _read_window(
        self, window: _Window, threads: int, damaged: dict[int, list[tuple[int, int]]], failed: dict[int, TierError]
    ) -> None:
        """Reads one window, and adds what is wrong to ``damaged`` and ``failed``."""
        segments = (
            {index: list(found) for index, found in window.segments.items()} if window.staged else window.segments
        )
        staged = []
        for box in window.staged:
            raw = torch.empty(box.rows.end - box.rows.start, dtype=torch.uint8, device="cpu")
            segments.setdefault(box.shard, []).append(ByteRange(box.rows.start, raw.numel(), raw.data_ptr()))
            staged.append((box, raw))
        jobs = [
            (index, block, inside)
            for index, reader in self._readers.items()
            for block, inside in _by_block(reader.record.blocks, segments.get(index, ()), window.ranges.get(index, ()))
        ]
        good = [False] * len(jobs)
        numbers = itertools.count()  # shared by all threads: next() is atomic with the GIL, and locked without

        def run_jobs() -> None:
            while (number := next(numbers)) < len(jobs):
                index, block, inside = jobs[number]
                if index in failed:
                    continue
                try:
                    good[number] = _read_and_check(self._readers[index], block, inside)
                except TierError as error:
                    failed[index] = error

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
        for (index, block, _), fine in zip(jobs, good, strict=True):
            start, end = self._readers[index].record.blocks.bounds(block)
            self.nbytes += end - start
            if not fine and index not in failed:
                damaged.setdefault(index, []).append((start, end))
        if not damaged and not failed:
            for box, raw in staged:
                box.destination.detach().copy_(box_of(tensor_of(raw, box.rows), box.offsets, box.lengths))

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


def _segment(read: Read, placed: Placed) -> ByteRange | None:
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
        return ByteRange(start, end - start, target.data_ptr())
    if lengths[1:] != chunk.sizes[1:] or any(box_offsets[1:]):  # not whole rows
        return None
    row = math.prod(chunk.sizes[1:]) * chunk.itemsize
    first = box_offsets[0] if box_offsets else 0
    return ByteRange(start + first * row, math.prod(lengths) * chunk.itemsize, target.data_ptr())


def _stage(index: int, read: Read, placed: Placed) -> _Staged:
    """The read as a copy from the rows of the chunk that hold the box; from the whole chunk when its elements are in
    another order."""
    chunk, lengths = placed.chunk, read.lengths
    if placed.strides is not None or not lengths:
        return _Staged(index, placed, read.box_offsets, lengths, read.destination)
    row = math.prod(chunk.sizes[1:]) * chunk.itemsize
    start = placed.start + read.box_offsets[0] * row
    rows = placed._replace(
        chunk=chunk._replace(sizes=(lengths[0], *chunk.sizes[1:])), start=start, end=start + lengths[0] * row
    )
    return _Staged(index, rows, (0, *read.box_offsets[1:]), lengths, read.destination)


def _by_block(
    blocks: Blocks, segments: Iterable[ByteRange], ranges: Iterable[tuple[int, int]]
) -> list[tuple[int, list[ByteRange]]]:
    """The blocks that have bytes of segments or ranges, in order, each with its segments in order. Pure."""
    found: dict[int, list[ByteRange]] = {}
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


def _read_and_check(reader: ShardReader, block: int, segments: Sequence[ByteRange]) -> bool:
    try:
        return reader.read_block(block, segments)
    except (OSError, CorruptShard) as error:
        logger.warning("%s cannot be read at bytes %s: %s", reader.path, reader.record.blocks.bounds(block), error)
        return False
