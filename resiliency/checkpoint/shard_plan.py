"""Plans a save: turns a state tree, or a caller's write plan, into the layout of one rank's shard."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.leaf_kinds import Box, has_memory, kind_of
from resiliency.checkpoint.plan import (
    RankShare,
    box_fields,
    box_nbytes,
    describe,
    itemsize,
    plan_replicated,
    plan_writes,
)
from resiliency.checkpoint.shard_writer import Place, ShardPlan
from resiliency.checkpoint.state import FlatState, dtype_name, flatten, flatten_by_key
from resiliency.checkpoint.write_plan import WritePlan
from resiliency.errors import ConfigError
from resiliency.storage.layout import Chunk, ShardLayout, make_layout, objects_reserve

__all__ = ["ShardPlanner", "Wanted"]

_json = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode

#: True or False for all tensors, or a function of (key, tensor).
Wanted = bool | Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class _CachedShare:
    """The boxes of this rank at the last exchange between ranks, and the share that was planned from it.

    Attributes:
        boxes: the boxes this rank described.
        exchanged: False when the plan was computed without the other ranks.
        share: the boxes this rank writes.
        keys: keys of the tensors of all ranks.
    """

    boxes: Sequence[Mapping[str, Any]]
    exchanged: bool
    share: RankShare
    keys: tuple[str, ...]


@dataclass(frozen=True)
class _CachedLayout:
    """The layout of the last save, used again while the state keeps its structure.

    Attributes:
        structure: structure key; equal for states this layout fits.
        plan: digest of what all ranks write.
        layout: of the shard file.
        places: byte range of each chunk.
        chunks: for each place, (True for a per-rank chunk, key, box or None for a whole plain tensor).
        large: for each place, whether it may be lazy at all: not per-rank, and not small.
        on_cuda: a chunk comes from a GPU.
    """

    structure: object
    plan: str
    layout: ShardLayout
    places: tuple[Place, ...]
    chunks: tuple[tuple[bool, str, Box | None], ...]
    large: tuple[bool, ...]
    on_cuda: bool = False


class ShardPlanner:
    """Plans saves; caches plan and layout while the state keeps its structure. Thread: training.

    Args:
        run, rank, world_size: run and rank of the shards, and number of ranks.
        small_nbytes: plain tensors below this many bytes are written by rank 0, and never copied late.
    """

    def __init__(self, *, run: str, rank: int, world_size: int, small_nbytes: int) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size
        self._small_nbytes = small_nbytes
        self._cached_share: _CachedShare | None = None
        self._cached_layout: _CachedLayout | None = None
        self._reserve = 0

    def plan(
        self,
        state: Any,
        per_rank: Any,
        *,
        coordinator: Coordinator,
        agree_timeout: timedelta,
        lazy: Wanted = False,
        replicated: Callable[[str, Tensor], bool] | None = None,
    ) -> ShardPlan:
        """Plans a save and lays out this rank's shard.

        Collective: only with more than one rank, at the first save of a structure with sharded tensors or of a
        :class:`WritePlan`. Blocks: up to ``agree_timeout`` then.

        Args:
            state: a state tree, or a :class:`WritePlan`.
            per_rank: this rank's own tree.
            lazy: which tensors of the state may be copied late; called for large ones only.
            replicated: which plain tensors of a state tree are equal on all ranks; None: all.

        Raises:
            ConfigError: a state that cannot be stored.
        """
        own = flatten(per_rank)
        if isinstance(state, WritePlan):
            if replicated is not None:
                raise ConfigError("replicated= is for state trees; a WritePlan says what each rank holds")
            return self._plan_given(state, own, lazy, coordinator, agree_timeout)
        shared = flatten(state)
        tensors = shared.tensors
        objects = self._objects(shared.skeleton, own)
        # For each tensor, whether it is plain and not replicated. None: all plain tensors are replicated.
        not_replicated = (
            None
            if replicated is None
            else [kind_of(leaf).replicated and not replicated(key, leaf) for key, leaf in tensors.items()]
        )
        structure = (_structure(tensors), _structure(own.tensors), not_replicated)
        cached = self._cached_layout
        if cached is None or cached.structure != structure or self._reserve < len(objects):
            small, large = self._split(tensors, not_replicated)
            sharded = any(not kind_of(leaf).replicated for leaf in large.values())
            boxes = describe(large, world_size=self._world_size)
            share = self._agree(boxes, coordinator if sharded else None, agree_timeout).share
            chunks = [*share.chunks, *_whole_chunks(small)]
            cached = self._lay_out(structure, share.digest, chunks, tensors, own.tensors, len(objects))
        own_tensors = own.tensors
        sources = [
            (own_tensors if per_rank_chunk else tensors)[key]
            if box is None
            else _source(key, (own_tensors if per_rank_chunk else tensors)[key], box)
            for per_rank_chunk, key, box in cached.chunks
        ]
        late = _late(lazy, cached, lambda index: tensors[cached.chunks[index][1]])
        return self._planned(cached, sources, late, objects)

    def estimate(self, tensors: Mapping[str, Tensor]) -> int:
        """An upper estimate of the bytes of this rank's shard of such tensors, which may be on the meta device."""
        _, large = self._split(tensors, None)
        share = plan_replicated(
            describe(large, world_size=self._world_size), rank=self._rank, world_size=self._world_size
        )
        # Plus room for the header, the Python objects and small tensors; shortening a slot costs nothing.
        return int(sum(chunk.nbytes for chunk in share.chunks) * 1.02) + (1 << 20)

    def _plan_given(
        self,
        given: WritePlan,
        own: FlatState,
        lazy: Wanted,
        coordinator: Coordinator,
        agree_timeout: timedelta,
    ) -> ShardPlan:
        held = {(chunk.key, chunk.offsets): chunk.tensor.detach() for chunk in given.chunks}
        boxes = [
            box_fields(chunk.key, chunk.box, chunk.shape or (), chunk.tensor.dtype, shard=True)
            for chunk in given.chunks
        ]
        agreed = self._agree(boxes, coordinator, agree_timeout)
        objects = self._objects(flatten_by_key(agreed.keys, given.objects), own)
        structure = (boxes, [tensor.device for tensor in held.values()], _structure(own.tensors))
        cached = self._cached_layout
        if cached is None or cached.structure != structure or self._reserve < len(objects):
            cached = self._lay_out(structure, agreed.share.digest, agreed.share.chunks, {}, own.tensors, len(objects))
        sources = [
            held[key, box.offsets] if box is not None and not per_rank_chunk else _source(key, own.tensors[key], box)
            for per_rank_chunk, key, box in cached.chunks
        ]
        return self._planned(cached, sources, _late(lazy, cached, sources.__getitem__), objects)

    def _planned(
        self, cached: _CachedLayout, sources: Sequence[Tensor], late: Sequence[bool] | None, objects: bytes
    ) -> ShardPlan:
        if cached is not self._cached_layout:
            on_cuda = any(source.is_cuda for source in sources)
            cached = self._cached_layout = dataclasses.replace(cached, on_cuda=on_cuda)
        return ShardPlan(
            layout=cached.layout,
            plan=cached.plan,
            places=cached.places,
            sources=sources,
            lazy=late,
            objects=objects,
            on_cuda=cached.on_cuda,
        )

    def _objects(self, skeleton: Any, own: FlatState) -> bytes:
        state = skeleton if self._rank == 0 else None
        return _json({"state": state, "per_rank": own.skeleton}).encode()

    def _agree(
        self, boxes: Sequence[Mapping[str, Any]], coordinator: Coordinator | None, agree_timeout: timedelta
    ) -> _CachedShare:
        """Plans which rank writes which box. With ``coordinator=None``: every rank has the same boxes."""
        exchanged, known = coordinator is not None, self._cached_share
        if known is None or (known.boxes, known.exchanged) != (boxes, exchanged):
            described = [boxes]
            if coordinator is None:
                share = plan_replicated(boxes, rank=self._rank, world_size=self._world_size)
            else:
                if self._world_size > 1:
                    messages = coordinator.all_gather("plan", json.dumps(boxes).encode(), timeout=agree_timeout)
                    described = [json.loads(data) for data in messages]
                share = plan_writes(described, rank=self._rank)
            keys = tuple(dict.fromkeys(str(box["key"]) for of_rank in described for box in of_rank))
            known = self._cached_share = _CachedShare(boxes, exchanged, share, keys)
        return known

    def _lay_out(
        self,
        structure: object,
        digest: str,
        shared: Sequence[Chunk],
        tensors: Mapping[str, Any],
        own: Mapping[str, Any],
        objects_nbytes: int,
    ) -> _CachedLayout:
        """Lays out this rank's chunks; ``tensors`` are the leaves they come from, empty for a caller's plan."""
        if self._reserve < objects_nbytes:
            self._reserve = objects_reserve(objects_nbytes)
        layout = make_layout(
            [*shared, *_whole_chunks(own, per_rank=True)],
            objects_nbytes=self._reserve,
            meta={"run": self._run, "rank": self._rank, "world_size": self._world_size, "plan": digest},
        )

        def box(chunk: Chunk) -> Box | None:
            leaf = (own if chunk.per_rank else tensors).get(chunk.key)
            return None if chunk.whole and type(leaf) is Tensor else Box(chunk.offsets, chunk.sizes)

        placed = layout.placed
        return _CachedLayout(
            structure=structure,
            plan=digest,
            layout=layout,
            places=tuple(Place(p.chunk.key, p.start, p.end - p.start) for p in placed),
            chunks=tuple((p.chunk.per_rank, p.chunk.key, box(p.chunk)) for p in placed),
            large=tuple(not p.chunk.per_rank and p.end - p.start >= self._small_nbytes for p in placed),
        )

    def _split(
        self, tensors: Mapping[str, Any], not_replicated: Sequence[bool] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain tensors that rank 0 writes (small or not replicated), and the others, which are divided among ranks.

        Callbacks and metrics may hold small tensors on some ranks only; the common plan must not depend on them.
        """
        small: dict[str, Any] = {}
        large: dict[str, Any] = {}
        flags = not_replicated or [False] * len(tensors)
        for (key, leaf), differs in zip(tensors.items(), flags, strict=True):
            known = kind_of(leaf).describe(leaf)
            written_whole = kind_of(leaf).replicated and (
                differs or box_nbytes(known.shape, known.dtype) < self._small_nbytes
            )
            (small if written_whole else large)[key] = leaf
        return small if self._rank == 0 else {}, large


def _source(key: str, leaf: Any, box: Box | None) -> Tensor:
    """The memory a chunk is copied from."""
    if box is None:
        return leaf  # type: ignore[no-any-return]  # a plain tensor, whole
    kind = kind_of(leaf)
    try:
        local = kind.local(leaf, box)
    except ConfigError as error:
        raise ConfigError(f"tensor {key!r}: {error}") from error
    # What is copied is this many bytes from its address on, so a kind that is wrong would read other memory.
    if type(leaf) is not Tensor:
        dtype = kind.describe(leaf).dtype
        if tuple(local.shape) != tuple(box.sizes) or local.dtype != dtype or not has_memory(local):
            raise ConfigError(
                f"tensor {key!r}: leaf kind {kind.name!r} gave {local.dtype} {tuple(local.shape)} for a box of"
                f" {dtype} {tuple(box.sizes)}"
            )
    return local


def _late(lazy: Wanted, cached: _CachedLayout, leaf: Callable[[int], Any]) -> Sequence[bool] | None:
    """Which places may be copied after ``save`` has returned; None: none."""
    if lazy is False:
        return None
    if lazy is True:
        return cached.large
    return [large and bool(lazy(cached.chunks[at][1], leaf(at))) for at, large in enumerate(cached.large)]


def _structure(tensors: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """A structure key, equal for leaves that one layout fits. 0.25 microseconds per tensor; computed at every save."""
    return [
        (key, t.dtype, t.shape, t.device) if type(t) is Tensor else (key, kind_of(t).structure(t))
        for key, t in tensors.items()
    ]


def _whole_chunks(tensors: Mapping[str, Any], *, per_rank: bool = False) -> list[Chunk]:
    """Chunks of tensors this rank writes whole.

    Raises:
        ConfigError: this rank holds only a part of one.
    """
    chunks = []
    for key, leaf in tensors.items():
        if not kind_of(leaf).replicated:
            raise ConfigError(f"per_rank holds tensor {key!r}, of which this rank has only a part; pass that part")
        known = kind_of(leaf).describe(leaf)
        origin = (0,) * len(known.shape)
        chunks.append(
            Chunk(
                key, origin, known.shape, dtype_name(known.dtype), itemsize(known.dtype), known.shape, per_rank=per_rank
            )
        )
    return chunks
