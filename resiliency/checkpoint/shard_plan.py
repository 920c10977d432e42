"""Planning a save: from a state tree, or from a plan the caller made, to one rank's shard with every chunk placed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.leaf_kinds import Box, kind_of
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
class _Agreed:
    """What came of the last exchange of boxes (or of working it out alone).

    Attributes:
        mine: the boxes this rank described.
        alone: True when it was worked out without the other ranks.
        share: what it writes of them.
        keys: of the tensors of all ranks.
    """

    mine: Sequence[Mapping[str, Any]]
    alone: bool
    share: RankShare
    keys: tuple[str, ...]


@dataclass(frozen=True)
class _Laid:
    """What is kept from save to save: what the state looked like, and the layout made for it.

    Attributes:
        structure: equal for states this layout fits.
        plan: digest of what all ranks write.
        layout: of the shard file.
        places: where each chunk goes.
        chunks: for each place, (True for one of this rank alone, key, box or None for the whole of a plain tensor).
        large: for each place, whether it may be lazy at all: shared by all ranks, and not small.
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
    """Plans saves, and keeps plan and layout for as long as the state keeps its structure. Thread: training.

    Args:
        run, rank, world_size: whose shards.
        small_nbytes: plain tensors below this many bytes are written by rank 0 alone, and never copied late.
    """

    def __init__(self, *, run: str, rank: int, world_size: int, small_nbytes: int) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size
        self._small_nbytes = small_nbytes
        self._agreed: _Agreed | None = None
        self._laid: _Laid | None = None
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
        """Lays out a save. Collective: only at the first save of a structure that some rank holds parts of, or of a
        :class:`WritePlan`, with more than one rank. Blocks: up to ``agree_timeout`` then.

        Args:
            state: a state tree, or a :class:`WritePlan`.
            per_rank: a tree only this rank has.
            lazy: which tensors of the state may be copied late; asked for large ones only.
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
        # What one rank alone has, when not all is replicated. None: nothing, without asking for each tensor.
        alone = (
            None
            if replicated is None
            else [kind_of(leaf).replicated and not replicated(key, leaf) for key, leaf in tensors.items()]
        )
        structure = (_structure(tensors), _structure(own.tensors), alone)
        laid = self._laid
        if laid is None or laid.structure != structure or self._reserve < len(objects):
            small, large = self._split(tensors, alone)
            sharded = any(not kind_of(leaf).replicated for leaf in large.values())
            mine = describe(large, world_size=self._world_size)
            share = self._agree(mine, coordinator if sharded else None, agree_timeout).share
            chunks = [*share.chunks, *_whole_chunks(small)]
            laid = self._lay(structure, share.digest, chunks, tensors, own.tensors, len(objects))
        mine_alone = own.tensors
        sources = [
            (mine_alone if alone_here else tensors)[key]
            if box is None
            else _source(key, (mine_alone if alone_here else tensors)[key], box)
            for alone_here, key, box in laid.chunks
        ]
        late = _late(lazy, laid, lambda index: tensors[laid.chunks[index][1]])
        return self._planned(laid, sources, late, objects)

    def estimate(self, tensors: Mapping[str, Tensor]) -> int:
        """About how many bytes this rank's shard of such tensors (also on the meta device) takes, rather too many."""
        _, large = self._split(tensors, None)
        share = plan_replicated(
            describe(large, world_size=self._world_size), rank=self._rank, world_size=self._world_size
        )
        # Room for the header, the Python objects and what is small; a slot that is too large is shortened for free.
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
        mine = [
            box_fields(chunk.key, chunk.box, chunk.shape or (), chunk.tensor.dtype, shard=True)
            for chunk in given.chunks
        ]
        agreed = self._agree(mine, coordinator, agree_timeout)
        objects = self._objects(flatten_by_key(agreed.keys, given.objects), own)
        structure = (mine, [tensor.device for tensor in held.values()], _structure(own.tensors))
        laid = self._laid
        if laid is None or laid.structure != structure or self._reserve < len(objects):
            laid = self._lay(structure, agreed.share.digest, agreed.share.chunks, {}, own.tensors, len(objects))
        sources = [
            held[key, box.offsets] if box is not None and not alone_here else _source(key, own.tensors[key], box)
            for alone_here, key, box in laid.chunks
        ]
        return self._planned(laid, sources, _late(lazy, laid, sources.__getitem__), objects)

    def _planned(
        self, laid: _Laid, sources: Sequence[Tensor], late: Sequence[bool] | None, objects: bytes
    ) -> ShardPlan:
        if laid is not self._laid:
            laid = self._laid = dataclasses.replace(laid, on_cuda=any(source.is_cuda for source in sources))
        return ShardPlan(
            layout=laid.layout,
            plan=laid.plan,
            places=laid.places,
            sources=sources,
            lazy=late,
            objects=objects,
            on_cuda=laid.on_cuda,
        )

    def _objects(self, skeleton: Any, own: FlatState) -> bytes:
        state = skeleton if self._rank == 0 else None
        return _json({"state": state, "per_rank": own.skeleton}).encode()

    def _agree(
        self, mine: Sequence[Mapping[str, Any]], coordinator: Coordinator | None, agree_timeout: timedelta
    ) -> _Agreed:
        """Who writes which box; worked out alone with ``coordinator=None``, when every rank has the same boxes."""
        alone, known = coordinator is None, self._agreed
        if known is None or (known.mine, known.alone) != (mine, alone):
            described = [mine]
            if coordinator is None:
                share = plan_replicated(mine, rank=self._rank, world_size=self._world_size)
            else:
                if self._world_size > 1:
                    said = coordinator.all_gather("plan", json.dumps(mine).encode(), timeout=agree_timeout)
                    described = [json.loads(data) for data in said]
                share = plan_writes(described, rank=self._rank)
            keys = tuple(dict.fromkeys(str(box["key"]) for boxes in described for box in boxes))
            known = self._agreed = _Agreed(mine, alone, share, keys)
        return known

    def _lay(
        self,
        structure: object,
        digest: str,
        shared: Sequence[Chunk],
        tensors: Mapping[str, Any],
        own: Mapping[str, Any],
        objects_nbytes: int,
    ) -> _Laid:
        """Lays out this rank's chunks; ``tensors`` are the leaves they come from, nothing for a given plan."""
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
        return _Laid(
            structure=structure,
            plan=digest,
            layout=layout,
            places=tuple(Place(p.chunk.key, p.start, p.end - p.start) for p in placed),
            chunks=tuple((p.chunk.per_rank, p.chunk.key, box(p.chunk)) for p in placed),
            large=tuple(not p.chunk.per_rank and p.end - p.start >= self._small_nbytes for p in placed),
        )

    def _split(self, tensors: Mapping[str, Any], alone: Sequence[bool] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain tensors that rank 0 writes for all (small ones, and those not replicated), and the rest, which is
        shared out.

        Callbacks and metrics may hold small tensors on some ranks only; the shared plan must not depend on them.
        """
        small: dict[str, Any] = {}
        large: dict[str, Any] = {}
        for (key, leaf), only in zip(tensors.items(), alone or [False] * len(tensors), strict=True):
            known = kind_of(leaf).describe(leaf)
            written_whole = kind_of(leaf).replicated and (
                only or box_nbytes(known.shape, known.dtype) < self._small_nbytes
            )
            (small if written_whole else large)[key] = leaf
        return small if self._rank == 0 else {}, large


def _source(key: str, leaf: Any, box: Box | None) -> Tensor:
    """The memory a chunk is taken from."""
    if box is None:
        return leaf  # type: ignore[no-any-return]  # a plain tensor, whole
    try:
        return kind_of(leaf).local(leaf, box)
    except ConfigError as error:
        raise ConfigError(f"tensor {key!r}: {error}") from error


def _late(lazy: Wanted, laid: _Laid, leaf: Callable[[int], Any]) -> Sequence[bool] | None:
    """Which places may be copied after the save returned; None: no save is to copy late at all."""
    if lazy is False:
        return None
    if lazy is True:
        return laid.large
    return [large and bool(lazy(laid.chunks[at][1], leaf(at))) for at, large in enumerate(laid.large)]


def _structure(tensors: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Equal for leaves one layout fits. A quarter of a microsecond per tensor, as it is asked at every save."""
    return [
        (key, t.dtype, t.shape, t.device) if type(t) is Tensor else (key, kind_of(t).structure(t))
        for key, t in tensors.items()
    ]


def _whole_chunks(tensors: Mapping[str, Any], *, per_rank: bool = False) -> list[Chunk]:
    """Chunks of tensors this rank writes whole.

    Raises:
        ConfigError: one that no rank holds whole.
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
