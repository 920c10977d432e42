"""What one save writes and where: the state cut into this rank's share, laid out in one file, as a list of copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.plan import (
    WritePlan,
    box_of,
    describe,
    fingerprint,
    is_sharded,
    plan_replicated,
    plan_writes,
    sharding,
)
from resiliency.checkpoint.snapshot import CopyTask
from resiliency.checkpoint.state import dtype_name, flatten
from resiliency.errors import ConfigError
from resiliency.storage.layout import Chunk, ShardLayout, make_layout, objects_reserve

__all__ = ["ShardPlan", "ShardPlanner", "Wanted"]

_json = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode

#: True or False for all tensors, or a function of (key, tensor).
Wanted = bool | Callable[[str, Tensor], bool]


class _Place(NamedTuple):
    """Where a tensor, or a box of it, goes; ``box`` is None for the whole of a plain tensor."""

    key: str
    start: int
    nbytes: int
    own: bool
    box: Chunk | None


@dataclass(frozen=True)
class ShardPlan:
    """A save that is laid out and not copied yet.

    Attributes:
        layout: of the shard file.
        plan: digest of the plan all ranks follow.
        on_cuda: a tensor of the state lives on a GPU.
        shared, own: tensors by key: of the state, and of this rank alone.
        objects: everything that is not a tensor, as JSON.
        places: where each tensor goes, in file order.
    """

    layout: ShardLayout
    plan: str
    on_cuda: bool
    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    objects: bytes
    places: Sequence[_Place]

    def copies(self, stamp: bytes, *, lazy: Wanted, lazy_nbytes: int) -> tuple[list[CopyTask], int]:
        """Everything that goes into the file, in file order, and the bytes that may be copied late.

        The training thread never writes to the mapping: while the file system commits its journal (an fsync of the step
        before), even one byte there can wait for tens of milliseconds. What must be taken now is taken into private
        memory.

        Args:
            stamp: which save this is, for the file's header.
            lazy: which tensors of the state may be copied after this call.
            lazy_nbytes: tensors smaller than this are always copied now.
        """
        layout, shared = self.layout, self.shared
        header = bytearray(layout.header)
        header[layout.stamp_at : layout.stamp_at + len(stamp)] = stamp
        copies = [CopyTask(torch.frombuffer(header, dtype=torch.uint8), 0, len(header))]
        late_nbytes = 0
        for key, at, nbytes, own, box in self.places:
            source = self.own[key] if own else shared[key]
            if box is not None:
                source = _cut(source, box)
            if lazy is False:
                # Takes the same road with a fence at its end, so that two threads share the copy.
                copies.append(CopyTask(source, at, nbytes, key))
            elif not own and nbytes >= lazy_nbytes and (lazy is True or lazy(key, shared[key])):
                copies.append(CopyTask(source, at, nbytes, key))
                late_nbytes += nbytes
            elif nbytes:
                copies.append(CopyTask(source.detach().clone(memory_format=torch.contiguous_format), at, nbytes))
        start, end = layout.objects
        copies.append(
            CopyTask(
                torch.frombuffer(bytearray(self.objects.ljust(end - start)), dtype=torch.uint8), start, end - start
            )
        )
        return copies, late_nbytes


@dataclass(frozen=True)
class _Laid:
    """What is kept from save to save: what the state looked like, and the layout made for it."""

    structure: object
    plan: str
    layout: ShardLayout
    places: tuple[_Place, ...]
    on_cuda: bool


class ShardPlanner:
    """Makes drafts, and keeps plan and layout for as long as the state keeps its structure. Thread: training.

    Args:
        run, rank, world_size: whose shards.
        small_nbytes: plain tensors below this many bytes are written by rank 0 alone.
    """

    def __init__(self, *, run: str, rank: int, world_size: int, small_nbytes: int) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size
        self._small_nbytes = small_nbytes
        self._planned: tuple[int, WritePlan] | None = None
        self._laid: _Laid | None = None
        self._reserve = 0

    def plan(
        self,
        state: Any,
        per_rank: Any,
        *,
        info: Mapping[str, Any],
        coordinator: Coordinator,
        agree_timeout: timedelta,
        replicated: Callable[[str, Tensor], bool] | None = None,
    ) -> ShardPlan:
        """Lays out a save. Collective: only at the first save of a structure that holds DTensors; blocks up to
        ``agree_timeout`` then.

        Raises:
            ConfigError: a state that cannot be stored.
        """
        shared, own = flatten(state), flatten(per_rank)
        objects = _json(
            {"state": shared.skeleton if self._rank == 0 else None, "per_rank": own.skeleton, "info": dict(info)}
        ).encode()
        # What one rank alone has, when not all is replicated. None: nothing, without asking for each tensor.
        alone = None if replicated is None else [not replicated(key, tensor) for key, tensor in shared.tensors.items()]
        structure = (_structure_key(shared.tensors), _structure_key(own.tensors), alone)
        laid = self._laid
        if laid is None or laid.structure != structure or self._reserve < len(objects):
            laid = self._laid = self._lay(
                structure, shared.tensors, own.tensors, alone, len(objects), coordinator, agree_timeout
            )
        return ShardPlan(laid.layout, laid.plan, laid.on_cuda, shared.tensors, own.tensors, objects, laid.places)

    def estimate(self, tensors: Mapping[str, Tensor]) -> int:
        """About how many bytes this rank's shard of such tensors (also on the meta device) takes, rather too many."""
        _, large = self._split(tensors, None)
        plan = plan_replicated(
            describe(large, world_size=self._world_size), rank=self._rank, world_size=self._world_size
        )
        # Room for the header, the Python objects and what is small; a slot that is too large is shortened for free.
        return int(sum(chunk.nbytes for chunk in plan.chunks) * 1.02) + (1 << 20)

    def _lay(
        self,
        structure: object,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        alone: Sequence[bool] | None,
        objects_nbytes: int,
        coordinator: Coordinator,
        agree_timeout: timedelta,
    ) -> _Laid:
        small, large = self._split(shared, alone)
        plan = self._plan(large, coordinator, agree_timeout)
        if self._reserve < objects_nbytes:
            self._reserve = objects_reserve(objects_nbytes)
        chunks = [*plan.chunks]
        for group, per_rank in ((small, False), (own, True)):
            for name, tensor in group.items():
                shape = tuple(tensor.shape)
                dtype, size = dtype_name(tensor.dtype), tensor.element_size()
                chunks.append(Chunk(name, (0,) * len(shape), shape, dtype, size, shape, per_rank=per_rank))
        layout = make_layout(
            chunks,
            objects_nbytes=self._reserve,
            meta={"run": self._run, "rank": self._rank, "world_size": self._world_size, "plan": plan.digest},
        )
        places = tuple(
            _Place(
                placed.chunk.key,
                placed.start,
                placed.end - placed.start,
                placed.chunk.per_rank,
                None
                if placed.chunk.per_rank or (placed.chunk.whole and not is_sharded(shared[placed.chunk.key]))
                else placed.chunk,
            )
            for placed in layout.placed
        )
        return _Laid(structure, plan.digest, layout, places, any(tensor.is_cuda for tensor in shared.values()))

    def _split(
        self, tensors: Mapping[str, Tensor], alone: Sequence[bool] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Plain tensors that rank 0 writes for all (small ones, and those not replicated), and the rest, which is
        shared out.

        Callbacks and metrics may hold small tensors on some ranks only; the shared plan must not depend on them.
        """
        small: dict[str, Tensor] = {}
        large: dict[str, Tensor] = {}
        for (key, tensor), only in zip(tensors.items(), alone or [False] * len(tensors), strict=True):
            is_small = tensor.numel() * tensor.element_size() < self._small_nbytes
            (small if (only or is_small) and not is_sharded(tensor) else large)[key] = tensor
        return small if self._rank == 0 else {}, large

    def _plan(self, tensors: Mapping[str, Tensor], coordinator: Coordinator, agree_timeout: timedelta) -> WritePlan:
        mark = fingerprint(tensors)
        if self._planned is None or self._planned[0] != mark:
            mine = describe(tensors, world_size=self._world_size)
            if self._world_size > 1 and any(is_sharded(t) for t in tensors.values()):
                said = coordinator.all_gather("plan", json.dumps(mine).encode(), timeout=agree_timeout)
                plan = plan_writes([json.loads(data) for data in said], rank=self._rank)
            else:
                plan = plan_replicated(mine, rank=self._rank, world_size=self._world_size)
            self._planned = (mark, plan)
        return self._planned[1]


def _structure_key(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    """Equal for tensors one layout fits. A quarter of a microsecond per tensor, as it is asked at every save."""
    return [
        (key, t.dtype, t.shape, t.device, None if type(t) is Tensor or not is_sharded(t) else sharding(t))
        for key, t in tensors.items()
    ]


def _cut(tensor: Tensor, chunk: Chunk) -> Tensor:
    """The part of a tensor that a chunk describes; for a DTensor its local shard."""
    if is_sharded(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
        if tuple(tensor.shape) != chunk.sizes:
            raise ConfigError(
                f"tensor {chunk.key!r}: local shard {tuple(tensor.shape)} is not the planned box {chunk.sizes}"
            )
        return tensor.detach()
    return box_of(tensor, chunk.offsets, chunk.sizes)
