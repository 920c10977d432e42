"""Read plans: which box of which stored chunk a restore copies into which tensor.

A read plan is made from the list of all chunks of the chosen step: :func:`plan_into` fills the leaves of a given state,
:func:`plan_new` makes CPU tensors, :func:`plan_given` takes reads planned by the caller.
:class:`~resiliency.checkpoint.shard_assembler.ShardAssembler` carries a plan out; it needs no leaves and no trees.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import Box, box_of, has_memory, kind_of, refusal
from resiliency.state.tree import dtype_from_name, keyed_leaves
from resiliency.storage.shard_file import Chunk

__all__ = ["Read", "ReadPlan", "ReadPlanner", "plan_given", "plan_into", "plan_new", "plan_reads"]

logger = logging.getLogger(__name__)


class Read(NamedTuple):
    """One copy of a restore: a box of a stored chunk into a tensor.

    Attributes:
        key: of the tensor the chunk belongs to.
        chunk_offsets: first index of the chunk in the whole tensor; with ``key`` it identifies the chunk.
        box_offsets: first index of the box within the chunk.
        lengths: shape of the box.
        destination: receives the elements; of shape ``lengths``, any strides, dtype and device. Detached from autograd.
    """

    key: str
    chunk_offsets: tuple[int, ...]
    box_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    destination: Tensor


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """What one rank reads of a step.

    Attributes:
        reads: the copies to make.
        tensors: key -> leaf to put into the restored state.
        partial: True when the stored state may have further tensors, which become empty tensors.
    """

    reads: Sequence[Read]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False


#: Makes a read plan from the chunks of a step, without per-rank chunks. Called again for each copy or step that is
#: tried.
ReadPlanner = Callable[[Sequence[Chunk]], ReadPlan]


def plan_into(into: Any) -> ReadPlanner:
    """A planner that fills the leaves of a state tree in place.

    Raises (when the planner is called):
        ConfigError: checkpoint and state do not hold the same tensors.
    """

    def plan(stored: Sequence[Chunk]) -> ReadPlan:
        wanted = {key: _target(leaf, key) for key, leaf in keyed_leaves(into).items()}
        absent = sorted({chunk.key for chunk in stored if chunk.key not in wanted})
        if absent:
            raise ConfigError(
                f"the checkpoint holds tensor {absent[0]!r} (and {len(absent) - 1} more), which the state passed lacks"
            )
        return ReadPlan(reads=plan_reads(wanted, stored), tensors=wanted)

    return plan


def _target(leaf: Any, key: str) -> Any:
    """The leaf, detached and checked to be fillable.

    Raises:
        ConfigError: it cannot be filled; the error names it.
    """
    kind = kind_of(leaf)
    try:
        target = kind.detach(leaf, key)
        if (
            type(target) is Tensor
            and not target.is_contiguous()
            and any(size > 1 and not stride for size, stride in zip(target.shape, target.stride(), strict=True))
        ):
            raise ConfigError(f"tensor {key!r} is expanded: several elements have one place in memory; clone it first")
    except ConfigError:
        raise
    except Exception as error:  # Boundary: the user's classes may raise anything.
        raise ConfigError(
            f"tensor {key!r} is a {type(leaf).__qualname__} and cannot be filled: {type(error).__name__}: {error}"
        ) from error
    return target


def plan_new(keys: Callable[[str], bool] | None = None) -> ReadPlanner:
    """A planner that makes new CPU tensors.

    Args:
        keys: makes only tensors whose key passes; None: all.
    """

    def plan(stored: Sequence[Chunk]) -> ReadPlan:
        wanted = {
            chunk.key: torch.empty(chunk.shape, dtype=dtype_from_name(chunk.dtype), device="cpu")
            for chunk in stored
            if keys is None or keys(chunk.key)
        }
        return ReadPlan(reads=plan_reads(wanted, stored), tensors=wanted, partial=keys is not None)

    return plan


def plan_given(reads: Callable[[Sequence[Chunk]], Sequence[Read] | ReadPlan]) -> ReadPlanner:
    """A planner that takes the reads of a caller, who keeps the destinations; or a caller's whole read plan. Each read
    is checked against the stored chunks.

    Raises (when the planner is called):
        ConfigError: ``reads`` failed, or a read does not fit the chunk it names.
    """

    def plan(stored: Sequence[Chunk]) -> ReadPlan:
        try:
            given = reads(stored)
        except ConfigError:
            raise
        except Exception as error:  # Boundary: the caller's code; reported to the other ranks as a ConfigError.
            raise ConfigError(f"reads= failed: {type(error).__name__}: {error}") from error
        chunks = {(chunk.key, chunk.offsets): chunk for chunk in stored}
        planned = given if isinstance(given, ReadPlan) else ReadPlan(reads=list(given), partial=True)
        for read in planned.reads:
            _check(read, chunks.get((read.key, read.chunk_offsets)))
        return planned

    return plan


def _check(read: Read, chunk: Chunk | None) -> None:
    where = f"a read of tensor {read.key!r}, chunk at {read.chunk_offsets}"
    if chunk is None:
        raise ConfigError(f"{where}: the checkpoint has no such chunk; plan reads from the chunks passed to reads=")
    inside = len(read.box_offsets) == len(read.lengths) == len(chunk.sizes) and all(
        0 <= first and 0 <= length and first + length <= size
        for first, length, size in zip(read.box_offsets, read.lengths, chunk.sizes, strict=True)
    )
    if not inside:
        raise ConfigError(f"{where}: box {read.lengths} at {read.box_offsets} is not within the chunk's {chunk.sizes}")
    if read.destination.is_meta:
        raise ConfigError(f"{where}: the destination is on the meta device and has no memory")
    if not has_memory(read.destination):
        raise ConfigError(f"{where}: the destination has no memory (it wraps other tensors, or its storage was freed)")
    if tuple(read.destination.shape) != tuple(read.lengths):
        raise ConfigError(f"{where}: the destination has shape {tuple(read.destination.shape)}, not {read.lengths}")


def plan_reads(wanted: Mapping[str, Any], stored: Sequence[Chunk]) -> list[Read]:
    """Cuts the boxes this process holds of the wanted leaves into ranges of stored chunks.

    Args:
        wanted: key -> leaf to fill (of any registered kind, any device).
        stored: every chunk of the step, of all shards; the chunks of a tensor do not overlap.

    Raises:
        ConfigError: a key is not stored, elements of it are missing, or its global shape differs.
    """
    by_key: dict[str, list[Chunk]] = {}
    for chunk in stored:
        by_key.setdefault(chunk.key, []).append(chunk)
    reads: list[Read] = []
    converted: list[tuple[str, str, torch.dtype]] = []
    for key, leaf in wanted.items():
        # Most leaves are plain tensors, which need every chunk whole.
        plain = type(leaf) is Tensor
        known, found = leaf if plain else kind_of(leaf).describe(leaf), by_key.get(key)
        if found is None:
            raise ConfigError(
                f"tensor {key!r} is not in the checkpoint; it holds {len(by_key)} tensors such as {sorted(by_key)[:3]}"
            )
        first = found[0]
        if first.shape != known.shape:
            shape = tuple(known.shape)
            raise ConfigError(f"tensor {key!r} has shape {shape} here but {first.shape} in the checkpoint")
        if known.dtype != dtype_from_name(first.dtype):
            converted.append((key, first.dtype, known.dtype))
        if plain and first.whole and len(found) == 1:  # a whole chunk begins at 0
            reads.append(Read(key, first.offsets, first.offsets, first.sizes, leaf))
            continue
        if plain:
            needed = leaf.numel()
            reads_of_leaf = [_whole_read(key, leaf, chunk) for chunk in found]
        else:
            needed = sum(math.prod(box.sizes) for box in known.boxes)
            reads_of_leaf = []
            for box in known.boxes:
                target = kind_of(leaf).local(leaf, box)
                if not has_memory(target):
                    raise refusal(target, key)
                reads_of_leaf += _reads_of(key, box, target, found)
        elements = sum([math.prod(read.lengths) for read in reads_of_leaf])
        if elements != needed:
            raise ConfigError(f"tensor {key!r}: only {elements} of {needed} elements are in the checkpoint")
        reads += reads_of_leaf
    _warn_of_conversions(sorted(converted, key=lambda entry: entry[0]))
    return reads


def _whole_read(key: str, tensor: Tensor, chunk: Chunk) -> Read:
    """The read of a whole chunk into its box of a plain tensor."""
    target = tensor if chunk.whole else box_of(tensor, chunk.offsets, chunk.sizes)
    return Read(key, chunk.offsets, (0,) * len(chunk.sizes), chunk.sizes, target)


def _reads_of(key: str, box: Box, target: Tensor, chunks: Sequence[Chunk]) -> list[Read]:
    """The reads that fill a box, one per chunk that overlaps it; ``target`` is the box's memory."""
    reads = []
    for chunk in chunks:
        first = tuple(map(max, box.offsets, chunk.offsets))
        last = tuple(
            min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
        )
        lengths = tuple(end - start for start, end in zip(first, last, strict=True))
        if any(length <= 0 for length in lengths):
            continue
        at = tuple(start - offset for start, offset in zip(first, box.offsets, strict=True))
        within = tuple(start - offset for start, offset in zip(first, chunk.offsets, strict=True))
        reads.append(Read(key, chunk.offsets, within, lengths, box_of(target, at, lengths)))
    return reads


def _warn_of_conversions(converted: Sequence[tuple[str, str, torch.dtype]]) -> None:
    """Warns that tensors are restored into another dtype, which is allowed but not exact."""
    if converted:
        key, stored, here = converted[0]
        logger.warning(
            "tensor %r is stored as %s and restored into %s (%d more are converted): the resumed run is not"
            " bit-equal to the run that saved it",
            key,
            stored,
            here,
            len(converted) - 1,
        )
