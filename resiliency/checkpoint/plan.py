"""Who writes what, who reads what: torch DCP's planners decide, this module asks them.

Writing: every rank describes its tensors; DCP's ``DefaultSavePlanner`` finds which boxes are replicas of each other
and gives each to the rank with the fewest bytes. Large replicated tensors are cut by rows first, so that the shares of
a few big tensors balance too. When no tensor is sharded (plain DDP) every rank can work out the whole plan alone from
its own description, without talking; a difference between ranks shows as different plan digests, which a manifest
refuses. There every box is a replica everywhere, so the planner checks one description and the boxes are dealt out
here, by the planner's rule. The planner itself makes one pass per rank (12 s for 64 tensors at 64 ranks, on every
rank), and counts a piece of a tensor as the whole of it, so its shares differ more. Otherwise descriptions are
exchanged once per structure.

Reading: of a plain tensor every stored box is wanted. For the shards of DTensors, DCP's ``DefaultLoadPlanner`` cuts
what this rank wants, at any world size, into ranges of the stored boxes.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType

from resiliency.checkpoint.state import dtype_from_name, dtype_name
from resiliency.errors import ConfigError
from resiliency.storage.layout import Chunk

__all__ = [
    "Read",
    "WritePlan",
    "box_of",
    "describe",
    "fingerprint",
    "is_sharded",
    "plan_reads",
    "plan_replicated",
    "plan_writes",
    "sharding",
]

#: Large replicated tensors are cut so that no piece is larger than this part of a rank's share: the shares then differ
#: by less than one piece.
_PIECES_PER_RANK = 8
#: Tensors below this size are not cut.
_CUT_BYTES = 4 * 1024 * 1024


def is_sharded(tensor: Tensor) -> bool:
    """True for DTensor and the like: a tensor whose local part differs from rank to rank."""
    return hasattr(tensor, "__create_chunk_list__") or (
        hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
    )


def fingerprint(tensors: Mapping[str, Tensor]) -> int:
    """Changes when the plan must be made anew. In-process only; microseconds per tensor."""
    return hash(tuple((key, t.dtype, t.shape, sharding(t) if is_sharded(t) else None) for key, t in tensors.items()))


def sharding(tensor: Any) -> tuple[Any, ...]:
    """Equal for DTensors that are sharded alike on one mesh. In-process only."""
    return str(tensor.placements), id(tensor.device_mesh)


def box_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of one box of a plain tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class _CuttingPlanner(DefaultSavePlanner):
    """DCP's planner, with large plain tensors described as several row blocks."""

    def __init__(self, world_size: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False)
        self._world_size = world_size

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        total = sum(_nbytes(item) for item in plan.items if item.type is WriteItemType.TENSOR)
        piece = max(1, total // (self._world_size * _PIECES_PER_RANK))
        self.plan = SavePlan([part for item in plan.items for part in self._cut(item, piece)])
        return self.plan

    def _cut(self, item: WriteItem, piece_nbytes: int) -> list[WriteItem]:
        data = item.tensor_data
        if item.type is not WriteItemType.TENSOR or data is None or self._world_size == 1 or not data.size:
            return [item]
        rows = data.size[0]
        nbytes = _nbytes(item)
        pieces = min(rows, -(-nbytes // piece_nbytes), nbytes // _CUT_BYTES)
        if pieces < 2:
            return [item]
        bounds = [rows * i // pieces for i in range(pieces + 1)]
        cut = []
        for first, last in zip(bounds, bounds[1:], strict=False):
            offsets = torch.Size((first, *[0] * (len(data.size) - 1)))
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((last - first, *data.size[1:])))
            cut.append(
                WriteItem(
                    index=MetadataIndex(item.index.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk=chunk, properties=data.properties, size=data.size),
                )
            )
        return cut


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype, device="meta").element_size()


def _nbytes(item: WriteItem) -> int:
    return (
        0 if item.tensor_data is None else item.tensor_data.size.numel() * _itemsize(item.tensor_data.properties.dtype)
    )


def describe(tensors: Mapping[str, Tensor], *, world_size: int) -> list[dict[str, Any]]:
    """This rank's boxes as plain data, to be exchanged between ranks.

    Returns:
        One dict per box with ``key, offsets, sizes, shape, dtype`` and ``shard`` (True: not a replica by nature).
    """
    planner = _CuttingPlanner(world_size)
    planner.set_up_planner(cast(Any, dict(tensors)), is_coordinator=True)
    boxes: list[dict[str, Any]] = []
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        if data is None:
            raise ConfigError(
                f"the planner described {item.index.fqn!r} without tensor data; report this with your torch version"
            )
        boxes.append(
            {
                "key": item.index.fqn,
                "offsets": list(data.chunk.offsets),
                "sizes": list(data.chunk.sizes),
                "shape": list(data.size),
                "dtype": dtype_name(data.properties.dtype),
                "shard": item.type is WriteItemType.SHARD,
            }
        )
    # Largest first: DCP gives each box to the rank with the fewest bytes so far, which balances well in this order.
    boxes.sort(key=lambda box: -math.prod(box["sizes"]) * _itemsize(dtype_from_name(box["dtype"])))
    return boxes


@dataclass(frozen=True)
class WritePlan:
    """What one rank writes.

    Attributes:
        chunks: boxes this rank writes.
        digest: hex digest of the whole plan, equal on every rank.
    """

    chunks: tuple[Chunk, ...]
    digest: str


def plan_writes(descriptions: Sequence[Sequence[Mapping[str, Any]]], *, rank: int) -> WritePlan:
    """Gives every box to exactly one rank, balanced by bytes. Pure: same input, same plan on every rank.

    Args:
        descriptions: what :func:`describe` returned on each rank, indexed by rank, ``[world_size]``.
        rank: whose part to return.

    Raises:
        ConfigError: ranks disagree about a tensor's shape or dtype, or a tensor has holes or overlaps.
    """
    return _finish([[_chunk(item) for item in plan.items] for plan in _global_plan(descriptions)], rank)


def plan_replicated(boxes: Sequence[Mapping[str, Any]], *, rank: int, world_size: int) -> WritePlan:
    """As :func:`plan_writes` with the same description on every rank, in time that does not grow with their number.

    Args:
        boxes: what :func:`describe` returned here, and would return on every other rank.
        rank, world_size: whose part to return, and how many share.

    Raises:
        ConfigError: a tensor has holes or overlaps.
    """
    (whole,) = _global_plan([boxes])
    shares: list[list[Chunk]] = [[] for _ in range(world_size)]
    loads = [(0, writer) for writer in range(world_size)]
    for chunk in map(_chunk, whole.items):
        load, writer = loads[0]
        shares[writer].append(chunk)
        heapq.heapreplace(loads, (load + (chunk.nbytes or 1), writer))
    return _finish(shares, rank)


def _global_plan(descriptions: Sequence[Sequence[Mapping[str, Any]]]) -> list[SavePlan]:
    known: dict[str, tuple[Any, ...]] = {}
    plans = []
    for writer, boxes in enumerate(descriptions):
        items = []
        for box in boxes:
            facts = (tuple(box["shape"]), box["dtype"])
            if known.setdefault(box["key"], facts) != facts:
                raise ConfigError(
                    f"rank {writer} has tensor {box['key']!r} as {facts}, another rank as {known[box['key']]}; "
                    "tensors that differ from rank to rank belong into per_rank"
                )
            properties = TensorProperties(dtype=dtype_from_name(box["dtype"]))
            stored = ChunkStorageMetadata(offsets=torch.Size(box["offsets"]), sizes=torch.Size(box["sizes"]))
            items.append(
                WriteItem(
                    index=MetadataIndex(box["key"], torch.Size(box["offsets"])),
                    type=WriteItemType.SHARD if box["shard"] else WriteItemType.TENSOR,
                    tensor_data=TensorWriteData(chunk=stored, properties=properties, size=torch.Size(box["shape"])),
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
            f"the ranks' tensors do not make a whole: {error}; see the log above for the tensor"
        ) from error
    return final


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    assert data is not None
    return Chunk(
        item.index.fqn,
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        dtype_name(data.properties.dtype),
        _itemsize(data.properties.dtype),
        tuple(data.size),
    )


def _finish(shares: Sequence[Sequence[Chunk]], rank: int) -> WritePlan:
    digest = hashlib.blake2b(digest_size=8)
    for writer, chunks in enumerate(shares):
        for chunk in chunks:
            digest.update(repr((writer, chunk)).encode())
    return WritePlan(tuple(shares[rank]), digest.hexdigest())


@dataclass(frozen=True)
class Read:
    """One copy of a restore: ``destination`` (a view of the wanted tensor) gets this box of a stored chunk."""

    key: str
    chunk_offsets: tuple[int, ...]
    box_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    destination: Tensor


def plan_reads(wanted: Mapping[str, Tensor], stored: Sequence[Chunk]) -> list[Read]:
    """Cuts the wanted tensors into ranges of stored chunks.

    Args:
        wanted: key -> tensor to fill (plain or DTensor, any device).
        stored: every chunk of the step, of all shards.

    Raises:
        ConfigError: a key is not stored, or its global shape differs.
    """
    by_key: dict[str, list[Chunk]] = {}
    for chunk in stored:
        if not chunk.per_rank:
            by_key.setdefault(chunk.key, []).append(chunk)
    reads: list[Read] = []
    sharded: dict[str, Tensor] = {}
    for key, tensor in wanted.items():
        found = by_key.get(key)
        if found is None:
            raise ConfigError(
                f"tensor {key!r} is not in the checkpoint; it holds {len(by_key)} tensors such as {sorted(by_key)[:3]}"
            )
        if found[0].shape != tensor.shape:
            raise ConfigError(
                f"tensor {key!r} has shape {tuple(tensor.shape)} here but {found[0].shape} in the checkpoint"
            )
        if type(tensor) is not Tensor and is_sharded(tensor):
            sharded[key] = tensor
            continue
        # All of a plain tensor is wanted, so every stored box is, whole.
        for chunk in found:
            destination = tensor if chunk.whole else box_of(tensor, chunk.offsets, chunk.sizes)
            reads.append(Read(key, chunk.offsets, (0,) * len(chunk.sizes), chunk.sizes, destination))
    reads += _plan_sharded(sharded, by_key)
    found_elements = dict.fromkeys(wanted, 0)
    for read in reads:
        found_elements[read.key] += math.prod(read.lengths)
    for key, tensor in wanted.items():
        local = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if found_elements[key] != local.numel():
            raise ConfigError(
                f"tensor {key!r}: only {found_elements[key]} of {local.numel()} elements are in the checkpoint"
            )
    return reads


def _plan_sharded(wanted: Mapping[str, Tensor], stored: Mapping[str, Sequence[Chunk]]) -> list[Read]:
    """What DCP's planner reads for this rank's shards."""
    if not wanted:
        return []
    known = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype_from_name(stored[key][0].dtype)),
            size=torch.Size(stored[key][0].shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes)) for c in stored[key]
            ],
        )
        for key in wanted
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(cast(Any, dict(wanted)), Metadata(state_dict_metadata=cast(Any, known)), is_coordinator=True)
    plan: LoadPlan = planner.create_local_plan()
    reads = []
    for item in plan.items:
        offset = item.storage_index.offset
        assert offset is not None
        reads.append(
            Read(
                item.storage_index.fqn,
                tuple(offset),
                tuple(item.storage_offsets),
                tuple(item.lengths),
                planner.resolve_tensor(item),
            )
        )
    return reads
