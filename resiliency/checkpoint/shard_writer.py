"""Writing placed chunks: a shard plan becomes the list of copies that fill its file. Knows no state trees."""

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
    """Where a chunk goes: ``nbytes`` bytes at file offset ``start``; ``key`` is for messages."""

    key: str
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One rank's shard of one save: laid out and not copied yet.

    Attributes:
        layout: of the shard file.
        plan: hex digest of what all ranks write; equal in all shards of a step.
        places: where each chunk goes, in file order.
        sources: where each chunk comes from, ``[len(places)]``; any strides, CPU or CUDA.
        lazy: which chunks may be copied after the save returned, ``[len(places)]``. None: no chunk may; the caller
            fences before it returns, so that nothing needs to be copied twice.
        objects: everything that is not a tensor, as JSON; not longer than the layout has room for.
        on_cuda: a tensor of the state lives on a GPU.
    """

    layout: ShardLayout
    plan: str
    places: Sequence[Place]
    sources: Sequence[Tensor]
    lazy: Sequence[bool] | None
    objects: bytes
    on_cuda: bool


def copy_tasks(plan: ShardPlan, stamp: bytes) -> tuple[list[CopyTask], int]:
    """Everything that goes into the file, in file order, and the bytes that may be copied late.

    The training thread never writes to the mapping: while the file system commits its journal (an fsync of the step
    before), even one byte there can wait for tens of milliseconds. What must be taken now is copied to private memory.

    Args:
        stamp: which save this is, for the file's header.
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
