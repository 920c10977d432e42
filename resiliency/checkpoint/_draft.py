"""What one save writes and where: the state cut into this rank's share, laid out in one file, as a list of copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.exchange import Exchange
from resiliency.checkpoint.layout import Chunk, ShardLayout, make_layout, objects_reserve
from resiliency.checkpoint.plan import WritePlan, describe, fingerprint, is_sharded, plan_replicated, plan_writes
from resiliency.checkpoint.snapshot import Copy
from resiliency.checkpoint.state import dtype_name, flatten
from resiliency.errors import ConfigError

__all__ = ["Draft", "Drafter", "Wanted"]

#: True or False for all tensors, or a function of (key, tensor).
Wanted = bool | Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Draft:
    """A save that is laid out and not copied yet.

    Attributes:
        layout: of the shard file.
        plan: digest of the plan all ranks follow.
        shared, own: tensors by key: of the state, and of this rank alone.
        objects: everything that is not a tensor, as JSON.
    """

    layout: ShardLayout
    plan: str
    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    objects: bytes

    @property
    def on_cuda(self) -> bool:
        """True when a tensor of the state lives on a GPU."""
        return any(tensor.device.type == "cuda" for tensor in self.shared.values())

    def copies(self, stamp: bytes, *, lazy: Wanted, lazy_nbytes: int) -> tuple[list[Copy], int]:
        """Everything that goes into the file, in file order, and the bytes that may be copied late.

        The training thread never writes to the mapping: while the file system commits its journal (an fsync of the step
        before), even one byte there can wait for tens of milliseconds. What must be taken now is taken into private memory.

        Args:
            stamp: which save this is, for the file's header.
            lazy: which tensors of the state may be copied after this call.
            lazy_nbytes: tensors smaller than this are always copied now.
        """
        layout = self.layout
        header = bytearray(layout.header)
        header[layout.stamp_at : layout.stamp_at + len(stamp)] = stamp
        copies = [Copy(torch.frombuffer(header, dtype=torch.uint8), 0)]
        late_nbytes = 0
        for placed in layout.placed:
            chunk = placed.chunk
            nbytes = placed.end - placed.start
            source = self.own[chunk.key] if chunk.per_rank else _box(self.shared[chunk.key], chunk)
            if lazy is False:
                # Takes the same road with a fence at its end, so that two threads share the copy.
                copies.append(Copy(source, placed.start, chunk.key))
            elif not chunk.per_rank and nbytes >= lazy_nbytes and (lazy is True or lazy(chunk.key, self.shared[chunk.key])):
                copies.append(Copy(source, placed.start, chunk.key))
                late_nbytes += nbytes
            elif nbytes:
                copies.append(Copy(source.detach().clone(memory_format=torch.contiguous_format), placed.start))
        start, end = layout.objects
        copies.append(Copy(torch.frombuffer(bytearray(self.objects.ljust(end - start)), dtype=torch.uint8), start))
        return copies, late_nbytes


@dataclass
class _Planned:
    """A cached write plan and, per set of tensors the plan does not know, the layout made from it."""

    fingerprint: int
    plan: WritePlan
    layout: ShardLayout | None = None
    layout_key: object = None
    reserve: int = 0


class Drafter:
    """Makes drafts, and keeps plan and layout for as long as the state keeps its structure. Thread: training.

    Args:
        run, rank, world_size: whose shards.
        small_nbytes: plain tensors below this many bytes are written by rank 0 alone.
    """

    def __init__(self, *, run: str, rank: int, world_size: int, small_nbytes: int) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size
        self._small_nbytes = small_nbytes
        self._planned: _Planned | None = None

    def draft(
        self, state: Any, per_rank: Any, *, info: Mapping[str, Any], exchange: Exchange, agree: timedelta,
        replicated: Callable[[str, Tensor], bool] | None = None,
    ) -> Draft:  # fmt: skip
        """Lays out a save. Collective: only at the first save of a structure that holds DTensors; blocks up to ``agree`` then.

        Raises:
            ConfigError: a state that cannot be stored.
        """
        shared, own = flatten(state), flatten(per_rank)
        small, large = self._split(shared.tensors, replicated)
        plan = self._plan(large, exchange, agree)
        objects = json.dumps(
            {"state": shared.skeleton if self._rank == 0 else None, "per_rank": own.skeleton, "info": dict(info)},
            separators=(",", ":"), allow_nan=True,
        ).encode()  # fmt: skip
        return Draft(self._layout(plan, small, own.tensors, len(objects)), plan.digest, shared.tensors, own.tensors, objects)

    def estimate(self, tensors: Mapping[str, Tensor]) -> int:
        """About how many bytes this rank's shard of such tensors (also on the meta device) takes, rather too many."""
        _, large = self._split(tensors, None)
        plan = plan_replicated(describe(large, world_size=self._world_size), rank=self._rank, world_size=self._world_size)
        # Room for the header, the Python objects and what is small; a slot that is too large is shortened for free.
        return int(sum(chunk.nbytes for chunk in plan.chunks) * 1.02) + (1 << 20)

    def _split(
        self, tensors: Mapping[str, Tensor], replicated: Callable[[str, Tensor], bool] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Plain tensors that rank 0 writes for all (small ones, and those not replicated), and the rest, which is shared out.

        Callbacks and metrics may hold small tensors on some ranks only; the shared plan must not depend on them.
        """
        small: dict[str, Tensor] = {}
        large: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            alone = not is_sharded(tensor) and (
                tensor.numel() * tensor.element_size() < self._small_nbytes or (replicated is not None and not replicated(key, tensor))
            )
            (small if alone else large)[key] = tensor
        return small if self._rank == 0 else {}, large

    def _plan(self, tensors: Mapping[str, Tensor], exchange: Exchange, agree: timedelta) -> WritePlan:
        mark = fingerprint(tensors)
        if self._planned is None or self._planned.fingerprint != mark:
            mine = describe(tensors, world_size=self._world_size)
            if self._world_size > 1 and any(is_sharded(t) for t in tensors.values()):
                said = exchange.all("plan", json.dumps(mine).encode(), timeout=agree)
                plan = plan_writes([json.loads(data) for data in said], rank=self._rank)
            else:
                plan = plan_replicated(mine, rank=self._rank, world_size=self._world_size)
            self._planned = _Planned(mark, plan)
        return self._planned.plan

    def _layout(
        self, plan: WritePlan, small: Mapping[str, Tensor], own: Mapping[str, Tensor], objects_nbytes: int
    ) -> ShardLayout:
        planned = self._planned
        assert planned is not None
        key = tuple((name, t.dtype, tuple(t.shape)) for group in (small, own) for name, t in group.items())
        if planned.layout is None or planned.layout_key != key or planned.reserve < objects_nbytes:
            planned.layout_key, planned.reserve = key, max(planned.reserve, objects_reserve(objects_nbytes))
            chunks = [*plan.chunks]
            for group, per_rank in ((small, False), (own, True)):
                for name, tensor in group.items():
                    shape = tuple(tensor.shape)
                    dtype, size = dtype_name(tensor.dtype), tensor.element_size()
                    chunks.append(Chunk(name, (0,) * len(shape), shape, dtype, size, shape, per_rank=per_rank))
            planned.layout = make_layout(
                chunks, objects_nbytes=planned.reserve,
                meta={"run": self._run, "rank": self._rank, "world_size": self._world_size, "plan": plan.digest},
            )  # fmt: skip
        return planned.layout


def _box(tensor: Tensor, chunk: Chunk) -> Tensor:
    """The part of a tensor that a chunk describes; for a DTensor its local shard."""
    if is_sharded(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
        if tuple(tensor.shape) != chunk.sizes:
            raise ConfigError(f"tensor {chunk.key!r}: local shard {tuple(tensor.shape)} is not the planned box {chunk.sizes}")
        return tensor.detach()
    if not chunk.whole:
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
    return tensor
