"""Layouts: which boxes of a tensor each rank of a job holds, worked out from a mesh and placements. Pure.

The boxes of any rank follow from the layout alone, so each rank knows what it writes, and what every other rank writes,
without talking to anyone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Box", "Layout", "MeshLayout", "Piece", "Split", "pieces_at"]


class Box(NamedTuple):
    """A box of a tensor: its first index and its length in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Layout(Protocol):
    """Which ranks hold which boxes of a tensor; equal on every rank of the job.

    The tensor is held in one or more *copies*. The ranks of one copy hold every element once.

    Attributes:
        copies: number of copies.
        copies_key: equal for layouts whose copies are held by the same ranks.
        digest: hex digest, equal for equal layouts on any rank.
    """

    @property
    def copies(self) -> int: ...

    @property
    def copies_key(self) -> Hashable: ...

    @property
    def digest(self) -> str: ...

    def copy_of(self, rank: int) -> int | None:
        """Number of the copy that a rank holds a part of; None: the rank holds no part."""
        ...

    def boxes(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        """The boxes that a rank holds of a tensor of this shape; none of them is empty, unless the tensor is."""
        ...


class Split(NamedTuple):
    """How one dimension of a mesh divides a tensor.

    Attributes:
        dim: dimension of the tensor.
        factor: 1: into consecutive parts, as torch's ``Shard``; more: each of ``factor`` parts is divided, as by
            ``_StridedShard``.
    """

    dim: int
    factor: int = 1


class Piece(NamedTuple):
    """A box that a rank holds, and where it begins in the rank's local tensor."""

    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True)
class MeshLayout:
    """A layout over a mesh of ranks: each dimension of the mesh either divides the tensor, or holds copies of it.

    Attributes:
        shape: of the mesh.
        ranks: of the job, in C order of the mesh.
        splits: one for each dimension of the mesh; None: its ranks hold copies.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    splits: tuple[Split | None, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks) or len(self.shape) != len(self.splits):
            raise ValueError(f"a mesh of shape {self.shape} has neither {len(self.ranks)} ranks nor {self.splits}")

    @functools.cached_property
    def copies(self) -> int:
        return math.prod(size for size, split in zip(self.shape, self.splits, strict=True) if split is None)

    @functools.cached_property
    def copies_key(self) -> Hashable:
        return self.shape, self.ranks, tuple(split is None for split in self.splits)

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()

    @functools.cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True))

    def copy_of(self, rank: int) -> int | None:
        at = self._coordinates.get(rank)
        if at is None:
            return None
        number = 0
        for size, split, index in zip(self.shape, self.splits, at, strict=True):
            if split is None:
                number = number * size + index
        return number

    def boxes(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        return tuple([piece.box for piece in self.pieces(shape, rank)])

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Piece, ...]:
        """The boxes that a rank holds, and where each begins in the rank's local tensor."""
        at = self._coordinates.get(rank)
        return () if at is None else pieces_at(shape, self.shape, self.splits, at)


@functools.lru_cache(maxsize=1 << 14)
def pieces_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], splits: tuple[Split | None, ...], at: tuple[int, ...]
) -> tuple[Piece, ...]:
    """The boxes at one coordinate of a mesh.

    Divides as torch does, from the first dimension of the mesh to the last one, parts as equal as ``torch.chunk`` makes
    them. Several boxes when a strided division of uneven lengths leaves gaps; none when nothing is left for this
    coordinate. Of a tensor without elements the first coordinate holds everything.
    """
    if not all(shape):
        divided = [index for index, split in zip(at, splits, strict=True) if split is not None]
        return () if any(divided) else (Piece(Box((0,) * len(shape), shape), (0,) * len(shape)),)
    ranges = [[(0, length)] for length in shape]
    for size, split, index in zip(mesh, splits, at, strict=True):
        if split is not None:
            ranges[split.dim] = _part(ranges[split.dim], split.factor, size, index)
    found = [_with_places(held) for held in ranges]
    return tuple(
        Piece(
            Box(tuple(start for _, start, _ in parts), tuple(end - start for _, start, end in parts)),
            tuple(at for at, _, _ in parts),
        )
        for parts in itertools.product(*found)
    )


def _with_places(held: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Index ranges, each behind its place in a sequence of them all."""
    places = itertools.accumulate((end - start for start, end in held), initial=0)
    return [(at, start, end) for at, (start, end) in zip(places, held, strict=False)]


def _part(held: Sequence[tuple[int, int]], factor: int, parts: int, index: int) -> list[tuple[int, int]]:
    """One of ``parts`` parts of a sequence of index ranges: of each of ``factor`` chunks of it the chunk ``index``."""
    found: list[tuple[int, int]] = []
    for first, end in [_chunk(0, sum(end - start for start, end in held), factor, number) for number in range(factor)]:
        wanted = _chunk(first, end, parts, index)
        position = 0
        for start, stop in held:
            low, high = max(wanted[0], position), min(wanted[1], position + stop - start)
            if low < high:
                begin, finish = start + low - position, start + high - position
                if found and found[-1][1] == begin:
                    begin = found.pop()[0]
                found.append((begin, finish))
            position += stop - start
    return found


def _chunk(first: int, end: int, chunks: int, index: int) -> tuple[int, int]:
    """Bounds of one of the chunks into which ``torch.chunk`` divides a range; empty behind its last one."""
    size = -(-(end - first) // chunks)
    return min(first + size * index, end), min(first + size * (index + 1), end)
