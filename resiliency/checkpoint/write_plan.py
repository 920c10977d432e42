"""Write plans: a save planned by the caller, as boxes of tensors with the memory they are copied from.

For callers that know which rank holds which part of each tensor: torch DCP's planners, Megatron's sharded state dicts,
or a strategy. :meth:`Checkpointer.save` takes a :class:`WritePlan` instead of a state tree::

    rows = WriteChunk(key="table", tensor=my_rows, offsets=(1000 * rank, 0), shape=(1000 * world_size, 64))
    checkpointer.save(step, WritePlan(chunks=[rows], objects={"epoch": 3}))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.stock_view import StockView, view_of_flat
from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import Box, has_memory, refusal

__all__ = ["WriteChunk", "WritePlan"]


@dataclass(frozen=True, kw_only=True)
class WriteChunk:
    """A box of a tensor that this rank offers to write.

    Attributes:
        key: of the tensor; parts joined by "/" are its path in a state tree given to ``load(into=...)``.
        tensor: the box's elements: dense, any strides, CPU or CUDA, of the box's shape.
        offsets: first index of the box in the whole tensor; empty: all zeros.
        shape: of the whole tensor; None: the box is the whole tensor.

    Raises:
        ConfigError: the box is not within the shape, or the tensor has no plain bytes.
    """

    key: str
    tensor: Tensor
    offsets: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not isinstance(self.tensor, Tensor):
            raise TypeError(f"chunk {self.key!r}: pass key as a str and tensor as a torch tensor")
        sizes = tuple(self.tensor.shape)
        offsets = tuple(self.offsets) or (0,) * len(sizes)
        shape = sizes if self.shape is None else tuple(self.shape)
        inside = len(offsets) == len(sizes) == len(shape) and all(
            0 <= first and first + size <= length for first, size, length in zip(offsets, sizes, shape, strict=True)
        )
        if not self.key or not inside:
            raise ConfigError(f"chunk of tensor {self.key!r}: box {sizes} at {offsets} is not within shape {shape}")
        tensor = self.tensor
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or not has_memory(tensor):
            raise refusal(tensor, self.key)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "shape", shape)

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.tensor.shape))


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """What this rank offers to one save. All ranks together must offer every element of every tensor.

    Rank 0 decides who writes what. Every save is collective: each rank sends rank 0 a digest, and its boxes when those
    of any rank have changed. A box that several ranks offer is written by one of them; boxes that overlap in any other
    way are refused. What one rank cannot save is refused on all ranks.

    ``load()`` of such a step returns a flat dict: each tensor under its key, then the objects.

    Attributes:
        chunks: boxes this rank holds.
        objects: name -> Python object without tensors. Those of rank 0 are stored.
        problem: why this rank cannot offer what it should; the save is refused on all ranks. "": it can.

    Raises:
        ConfigError: two chunks of one tensor have the same offsets.
    """

    chunks: Sequence[WriteChunk]
    objects: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(self.chunks))  # an iterator could be read only once
        if not all(isinstance(chunk, WriteChunk) for chunk in self.chunks) or not isinstance(self.objects, Mapping):
            raise TypeError("a WritePlan takes chunks=[WriteChunk(...), ...] and objects={name: object}")
        seen: set[tuple[str, tuple[int, ...]]] = set()
        for chunk in self.chunks:
            if (chunk.key, chunk.offsets) in seen:
                raise ConfigError(f"two chunks of tensor {chunk.key!r} begin at {chunk.offsets}; pass each box once")
            seen.add((chunk.key, chunk.offsets))

    def complete(self, gather: Callable[[bytes], Sequence[bytes]]) -> WritePlan:
        """The plan with what of it other ranks must be asked for. ``gather``: each rank passes some bytes, and gets
        those of all ranks."""
        return self

    def stock_view(self, structure: bytes) -> StockView:
        """How torch's distributed checkpoint sees the step, see :mod:`resiliency.checkpoint.stock_view`."""
        return view_of_flat(structure, _path_of)


def _path_of(key: str) -> tuple[str, ...]:
    """The path in a state tree that the key of a chunk stands for."""
    return tuple(part.replace("%2F", "/").replace("%25", "%") for part in key.split("/"))
