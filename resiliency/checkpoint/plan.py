"""Which rank writes which box of a sharded state. Pure: each rank works out the same answer for any rank by itself.

A leaf with a :class:`~resiliency.state.layouts.Layout` is held in one or more copies; the ranks of one of them write
their boxes. Large leaves first, each is given to the copy with the fewest bytes so far, so that replicas (HSDP) share
the writing. A leaf without a layout is held whole by every rank, and rank 0 writes it.

Nothing here depends on the rank that asks, and ranks do not talk to each other: if their states differ, so do their
digests, and the agent refuses the step.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from resiliency.state.layouts import Layout
from resiliency.storage.shard_file import Chunk

__all__ = ["PlannedLeaf", "ShardedPlan"]


class PlannedLeaf(NamedTuple):
    """What the plan needs to know of a leaf; equal on every rank.

    Attributes:
        key: the leaf's key in the state.
        shape: of the whole tensor.
        dtype: torch dtype name ("float32").
        itemsize: bytes per element.
        layout: which ranks hold which boxes; None: every rank holds the whole tensor, and rank 0 writes it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    layout: Layout | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class ShardedPlan:
    """Which rank writes which box of a sharded state.

    Attributes:
        leaves: of the state: those with the most copies first, then by key.
        writers: for each leaf, the number of the copy that is written.
        digest: hex digest of the leaves; equal on ranks whose states have the same structure.
    """

    leaves: tuple[PlannedLeaf, ...]
    writers: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, leaves: Iterable[PlannedLeaf]) -> ShardedPlan:
        """The plan for a state. Takes some microseconds a leaf, whatever the number of ranks."""
        # By key, because ranks may hold the same dict in different orders. First what the most ranks will read: small
        # tensors that all want, between large ones, would make all read the large ones, too.
        ordered = tuple(sorted(leaves, key=lambda leaf: (-_copies(leaf), leaf.key)))
        digest = hashlib.blake2b(digest_size=8)
        for leaf in ordered:
            layout = "" if leaf.layout is None else leaf.layout.digest
            digest.update(repr((leaf.key, leaf.shape, leaf.dtype, layout)).encode())
        return cls(ordered, _choose_copies(ordered), digest.hexdigest())

    def boxes_of_rank(self, rank: int) -> tuple[Chunk, ...]:
        """The boxes that a rank writes, in the order in which they are in its file: as the leaves, those of one tensor
        by offsets. Takes some microseconds a leaf."""
        chunks: list[Chunk] = []
        for (key, shape, dtype, itemsize, layout), writer in zip(self.leaves, self.writers, strict=True):
            if layout is None:
                if rank == 0:
                    chunks.append(Chunk(key, (0,) * len(shape), shape, dtype, itemsize, shape))
            elif layout.copy_of(rank) == writer:
                for offsets, sizes in layout.boxes(shape, rank):
                    chunks.append(Chunk(key, offsets, sizes, dtype, itemsize, shape))
        return tuple(chunks)


def _copies(leaf: PlannedLeaf) -> float:
    return math.inf if leaf.layout is None else leaf.layout.copies


def _choose_copies(leaves: tuple[PlannedLeaf, ...]) -> tuple[int, ...]:
    """The number of the copy that is written, for each leaf.

    Leaves whose copies are held by the same ranks are balanced by bytes among them.
    """
    writers = [0] * len(leaves)
    loads: dict[Hashable, list[tuple[int, int]]] = {}
    for index in sorted(range(len(leaves)), key=lambda index: -leaves[index].nbytes):
        leaf = leaves[index]
        if leaf.layout is not None and leaf.layout.copies > 1:
            heap = loads.setdefault(leaf.layout.copies_key, [(0, copy) for copy in range(leaf.layout.copies)])
            nbytes, writers[index] = heap[0]
            heapq.heapreplace(heap, (nbytes + leaf.nbytes, writers[index]))
    return tuple(writers)
