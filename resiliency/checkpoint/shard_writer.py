"""Turns a shard plan into the list of copies that fill its file. Independent of state trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from resiliency.checkpoint.snapshot import CopyTask
from resiliency.storage.layout import ShardLayout

__all__ = ["Place", "ShardPlan", "copy_tasks"]


class Place(NamedTuple):
    """The byte range of a chunk: ``nbytes`` bytes at file offset ``start``; ``key`` is for messages."""

    key: str
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One rank's shard of one save: its layout, and the tensors to copy.

    Attributes:
        layout: of the shard file.
        plan: hex digest of what all ranks write; equal in all shards of a step.
        places: byte range of each chunk, in file order.
        sources: source tensor of each chunk, ``[len(places)]``; any strides, CPU or CUDA.
        lazy: which chunks may be copied after ``save`` has returned, ``[len(places)]``. None: none may; the caller
            fences before it returns, so that no private copy is needed.
        objects: everything that is not a tensor, as JSON; not longer than the layout reserves for it.
        on_cuda: a source is on a GPU.
    """

    layout: ShardLayout
    plan: str
    places: Sequence[Place]
    sources: Sequence[Tensor]
    lazy: Sequence[bool] | None
    objects: bytes
    on_cuda: bool


def copy_tasks(plan: ShardPlan, stamp: bytes) -> tuple[list[CopyTask], int]:
    """The copies that fill the file, in file order, and the number of bytes that may be copied late.

    The training thread never writes to the mapping: while the file system commits its journal (during an fsync of the
    previous step), a store of one byte can block for tens of milliseconds. Tensors that must be copied now are copied
    to private memory.

    Args:
        stamp: identity of the save for the file's header, see :func:`resiliency.storage.layout.stamp`.
    """
    layout = plan.layout
    header = bytearray(layout.header)
    header[layout.stamp_at : layout.stamp_at + len(stamp)] = stamp
    copies = [CopyTask(torch.frombuffer(header, dtype=torch.uint8), 0, len(header))]
    late_nbytes = 0
    if plan.lazy is None:
        # Queued like lazy copies and fenced at once, so that two threads share the work.
        copies += [
            CopyTask(source, start, nbytes, key)
            for (key, start, nbytes), source in zip(plan.places, plan.sources, strict=True)
        ]
    else:
        for (key, start, nbytes), source, late in zip(plan.places, plan.sources, plan.lazy, strict=True):
            if late:
                copies.append(CopyTask(source, start, nbytes, key))
                late_nbytes += nbytes
            elif nbytes:
                copies.append(CopyTask(source.detach().clone(memory_format=torch.contiguous_format), start, nbytes))
    start, end = layout.objects
    text = torch.frombuffer(bytearray(plan.objects.ljust(end - start)), dtype=torch.uint8)
    copies.append(CopyTask(text, start, end - start))
    return copies, late_nbytes
