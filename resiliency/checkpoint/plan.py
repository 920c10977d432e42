"""Assigns every box of every tensor to exactly one rank that writes it.

Every rank describes the boxes it holds. torch DCP's ``DefaultSavePlanner`` finds which boxes are replicas of each
other, assigns each to the rank with the fewest bytes, and refuses tensors with holes or overlaps. Large replicated
tensors are first cut by rows, so that a few big tensors can be balanced too.

When ranks hold parts of tensors, descriptions are exchanged once per structure. When every tensor is replicated (plain
DDP), each rank computes the whole plan from its own description, without communication; if ranks differ, so do their
plan digests, and the step is not committed. In that case the planner checks one description, and the boxes are assigned
here by the planner's rule. The planner itself would make one pass per rank (12 s for 64 tensors at 64 ranks, on every
rank), and counts a piece of a tensor as the whole tensor, so its shares would differ more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from resiliency.checkpoint.rank_messages import HeldBox
from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import Box, kind_of
from resiliency.state.tree import dtype_from_name, dtype_name
from resiliency.storage.shard_file import Chunk

__all__ = ["RankShare", "box_nbytes", "describe", "held_box", "itemsize", "plan_writes"]


#: Stand-ins, by item size in bytes, for dtypes in DCP's planner, which only counts bytes and does not know all dtypes.
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def describe(leaves: Mapping[str, Any]) -> tuple[HeldBox, ...]:
    """This rank's boxes, largest first.

    Args:
        leaves: leaves by key; they may be on the meta device.
    """
    boxes: list[HeldBox] = []
    for key, leaf in leaves.items():
        kind = kind_of(leaf)
        known = kind.describe(leaf)
        boxes += [held_box(key, box, known.shape, known.dtype, replicated=kind.replicated) for box in known.boxes]
    # DCP gives each box to the rank with the fewest bytes so far, which balances well when large boxes come first.
    return tuple(sorted(boxes, key=lambda box: -box_nbytes(box.sizes, dtype_from_name(box.dtype))))


def held_box(key: str, box: Box, shape: Sequence[int], dtype: torch.dtype, *, replicated: bool) -> HeldBox:
    """A box in the form in which ranks report it to each other."""
    return HeldBox(
        key=key,
        offsets=tuple(box.offsets),
        sizes=tuple(box.sizes),
        shape=tuple(shape),
        dtype=dtype_name(dtype),
        replicated=replicated,
    )


def itemsize(dtype: torch.dtype) -> int:
    """Bytes per element."""
    return torch.empty((), dtype=dtype, device="meta").element_size()


def box_nbytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a box."""
    return math.prod(sizes) * itemsize(dtype)


@dataclass(frozen=True)
class RankShare:
    """The boxes one rank writes.

    Attributes:
        chunks: boxes this rank writes.
        digest: hex digest of the boxes of all ranks; equal on every rank.
    """

    chunks: tuple[Chunk, ...]
    digest: str


def plan_writes(descriptions: Sequence[Sequence[HeldBox]], *, rank: int) -> RankShare:
    """Assigns every box to one rank that holds it, balanced by bytes. Pure: same input, same plan on every rank.

    Args:
        descriptions: what :func:`describe` returned on each rank, indexed by rank, ``[world_size]``.
        rank: the rank whose share is returned.

    Raises:
        ConfigError: ranks disagree about a tensor's shape or dtype, or a tensor has holes or overlaps.
    """
    boxes = [[box for box in mine if all(box.sizes) or not all(box.shape)] for mine in descriptions]
    dtypes = {box.key: dtype_from_name(box.dtype) for mine in boxes for box in mine}
    shares = [[_chunk(item, dtypes[item.index.fqn]) for item in plan.items] for plan in _global_plan(boxes)]
    _check_volume(shares)
    return _finish(shares, rank)


def _check_volume(shares: Sequence[Sequence[Chunk]]) -> None:
    """Checks that each tensor's boxes cover it exactly; DCP's planner checks this only when there are several plans.

    Raises:
        ConfigError: a tensor has holes or overlaps.
    """
    missing: dict[str, int] = {}
    for chunk in (chunk for share in shares for chunk in share):
        missing.setdefault(chunk.key, math.prod(chunk.shape))
        missing[chunk.key] -= math.prod(chunk.sizes)
    wrong = next((key for key, elements in missing.items() if elements), None)
    if wrong is not None:
        raise ConfigError(
            f"the ranks' boxes of tensor {wrong!r} have holes or overlap: {abs(missing[wrong])} elements too"
            f" {'few' if missing[wrong] > 0 else 'many'}; each element must be in one box"
        )


def _global_plan(descriptions: Sequence[Sequence[HeldBox]]) -> list[SavePlan]:
    known: dict[str, tuple[Any, ...]] = {}
    plans = []
    for writer, boxes in enumerate(descriptions):
        items = []
        for box in boxes:
            facts = (box.shape, box.dtype)
            if known.setdefault(box.key, facts) != facts:
                raise ConfigError(
                    f"rank {writer} has tensor {box.key!r} as {facts}, another rank as {known[box.key]}; "
                    "tensors that differ from rank to rank belong into per_rank"
                )
            properties = TensorProperties(dtype=_OF_SIZE[itemsize(dtype_from_name(box.dtype))])
            stored = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            items.append(
                WriteItem(
                    index=MetadataIndex(box.key, torch.Size(box.offsets)),
                    type=WriteItemType.TENSOR if box.replicated else WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk=stored, properties=properties, size=torch.Size(box.shape)),
                )
            )
        plans.append(SavePlan(items))
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
    )
    planner.set_up_planner({}, is_coordinator=True)
    try:
        final, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise ConfigError(
            f"the ranks' boxes do not make a whole tensor: {error}; the log above names the tensor"
        ) from error
    return final


def _chunk(item: WriteItem, dtype: torch.dtype) -> Chunk:
    data = item.tensor_data
    assert data is not None
    return Chunk(
        item.index.fqn,
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        dtype_name(dtype),
        itemsize(dtype),
        tuple(data.size),
    )


def _finish(shares: Sequence[Sequence[Chunk]], rank: int) -> RankShare:
    digest = hashlib.blake2b(digest_size=8)
    for writer, chunks in enumerate(shares):
        for chunk in chunks:
            digest.update(repr((writer, chunk)).encode())
    return RankShare(tuple(shares[rank]), digest.hexdigest())
