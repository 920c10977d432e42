"""Plans a save: turns a state tree, or a caller's write plan, into the files this rank writes.

A state that every rank holds whole is *replicated*: shard 0 is a stock checkpoint with the whole state, written by the
ranks of one host together (of every host, where each host has its own folder). Large storages come first, at offsets
that follow from their sizes, so that every rank knows where its part goes without communication; then comes what only
the first rank of the host knows (small tensors, Python objects). Every other rank writes a small shard with its own
data.

A state of which ranks hold parts (DTensors, a :class:`WritePlan`) is *sharded*: each rank writes one shard with its
boxes, as :mod:`resiliency.checkpoint.plan` assigns them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.plan import RankShare, describe, held_box, plan_writes
from resiliency.checkpoint.rank_messages import HeldBox, HeldBoxes, gather
from resiliency.checkpoint.shard_writer import FilePlan, OwnState, ShardPlan, StateFile
from resiliency.checkpoint.write_plan import WritePlan
from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import Box, has_memory, kind_of, kind_of_class, refusal
from resiliency.state.structure import Structure, dump, without_refused
from resiliency.state.tree import count_leaves, dtype_from_name, keyed_leaves
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.shard_file import (
    CHUNKS,
    DATA_PICKLE,
    IDENTITY_BYTES,
    STRUCTURE,
    chunks_to_json,
    lay_out_storages,
)

__all__ = ["HostPart", "ShardPlanner", "Wanted"]

#: True or False for all tensors, or a function of the tensor.
Wanted = bool | Callable[[Tensor], bool]

_MIN_BLOCK = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """This rank's part in writing its host's copy of shard 0.

    Attributes:
        writers: number of ranks of this host that write shard 0 together; 0: ranks of another host write it for all.
        index: number of this rank among them. 0: it also writes what is not shared.
    """

    writers: int = 1
    index: int = 0


@dataclass(frozen=True)
class _CachedLayout:
    """What follows from the structure of a replicated state alone; kept for later saves while the structure stays.

    Attributes:
        signature: equal for all states that this layout fits.
        order: numbers of the storages, in file order.
        file: what this rank writes; None: nothing.
        large: for each storage, in file order, whether it is large enough to be copied late.
        on_cuda: a storage is on a GPU.
        plan: digest of what the ranks share.
        structure: the structure that the layout was made from.
    """

    signature: object
    order: tuple[int, ...]
    file: FilePlan | None
    large: tuple[bool, ...]
    on_cuda: bool
    plan: str
    structure: Structure


@dataclass(frozen=True)
class _CachedShare:
    """The boxes of this rank at the last exchange, the share that was planned from all boxes, and the keys of all
    ranks."""

    boxes: tuple[HeldBox, ...]
    share: RankShare
    keys: tuple[str, ...]


class ShardPlanner:
    """Plans saves; caches what follows from the structure of the state. Thread: training.

    Args:
        rank, world_size: of this process in the job.
        small_nbytes: tensors with fewer bytes are written by the first rank of a host, and never copied late.
    """

    def __init__(self, *, rank: int, world_size: int, small_nbytes: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._small_nbytes = small_nbytes
        self._cached_layout: _CachedLayout | None = None
        self._cached_share: _CachedShare | None = None

    def plan(
        self,
        state: Any,
        per_rank: Any,
        *,
        host: HostPart,
        coordinator: Coordinator,
        agree_timeout: timedelta,
        lazy: Wanted = False,
        replicated: Callable[[Tensor], bool] | None = None,
    ) -> ShardPlan:
        """Plans a save.

        Collective: only with more than one rank, at the first save of a structure with sharded tensors or of a
        :class:`WritePlan`. Blocks: up to ``agree_timeout`` then.

        Args:
            state: a state tree, or a :class:`WritePlan`.
            per_rank: this rank's own tree.
            host: what this rank writes of shard 0.
            lazy: which tensors of the state may be copied late; called for large ones only.
            replicated: which plain tensors of a state tree are equal on all ranks; None: all.

        Raises:
            ConfigError: a state that cannot be stored.
        """
        own = OwnState.of(_dump_own(per_rank))
        if isinstance(state, WritePlan):
            if replicated is not None:
                raise ConfigError("replicated= is for state trees; a WritePlan says what each rank holds")
            return self._plan_given(state, own, lazy, coordinator, agree_timeout)
        try:
            structure = dump(state, is_leaf=_is_sharded)
        except ConfigError:
            if host.writers and host.index == 0:
                raise
            # The file gets its objects from the first rank of a host, so objects that only this rank cannot store are
            # no error.
            structure = dump(without_refused(state, is_leaf=_is_sharded), is_leaf=_is_sharded)
        if structure.leaves:
            return self._plan_sharded(state, own, lazy, coordinator, agree_timeout)
        return self._plan_replicated(state, structure, own, lazy, replicated, host)

    def estimate(self, tensors: Mapping[str, Tensor], *, host: HostPart) -> int:
        """An upper estimate, in bytes, of the file that this rank takes part in writing, for tensors that may be on the
        meta device; 0 when it takes part in none."""
        if not host.writers:
            return 0
        # Adds room for headers, Python objects and small tensors; a file that is too long is cut.
        return int(sum(tensor.nbytes for tensor in tensors.values()) * 1.02) + (1 << 20)

    # -- a replicated state -------------------------------------------------------------------------------------------

    def _plan_replicated(
        self,
        state: Any,
        structure: Structure,
        own: OwnState,
        lazy: Wanted,
        replicated: Callable[[Tensor], bool] | None,
        host: HostPart,
    ) -> ShardPlan:
        # Which tensors ranks may share matters only when there are several ranks.
        shared = None
        if self._world_size > 1 and replicated is not None:
            shared = [
                nbytes >= self._small_nbytes and bool(replicated(tensor)) for tensor, _, nbytes in structure.extents
            ]
        signature = (structure.signature, shared, host)
        cached = self._cached_layout
        if cached is None or cached.signature != signature:
            cached = self._cached_layout = self._lay_out(state, structure, shared, host, signature)
        structure.reuse(cached.structure)
        extents = [structure.extents[index] for index in cached.order]
        late = None if lazy is False else cached.large
        if late is not None and not isinstance(lazy, bool):
            late = tuple(
                large and bool(lazy(structure.extents[index][0]))
                for large, index in zip(late, cached.order, strict=True)
            )
        file = None
        if cached.file is not None:
            file = StateFile(
                plan=cached.file,
                extents=extents,
                storages=cached.order,
                lazy=late,
                on_cuda=cached.on_cuda,
                tail=lambda: [(DATA_PICKLE, structure.data_pickle())],
                key_of=structure.key_of,
            )
        return ShardPlan(replicated=True, plan=cached.plan, own=own, file=file)

    def _lay_out(
        self, state: Any, structure: Structure, shared: Sequence[bool] | None, host: HostPart, signature: object
    ) -> _CachedLayout:
        sizes = [nbytes for nbytes, _ in structure.signature[1]]
        if self._world_size == 1:
            shared = [False] * len(sizes)
        elif shared is None:
            shared = [nbytes >= self._small_nbytes for nbytes in sizes]
        # A storage that torch itself describes has its number in the pickle, and the number may differ between ranks.
        first = [i for i, together in enumerate(shared) if together and i not in structure.torch_described]
        # Sorted by path, because ranks may hold the same dict in different orders, and must not confuse two tensors.
        paths = _paths(state, structure) if first else {}
        first.sort(key=lambda index: paths.get(index, ""))
        chosen = set(first)
        rest = [index for index in range(len(sizes)) if index not in chosen]
        order = (*first, *rest)
        keys = structure.set_keys(order)
        layout = lay_out_storages([(key, sizes[index]) for key, index in zip(keys, order, strict=True)])
        shared_end = layout.storages[len(first) - 1].end if first else IDENTITY_BYTES
        # Halved until the blocks are small enough for the ranks of a host to share the work evenly.
        block_bytes = BLOCK_BYTES
        while host.writers > 1 and block_bytes > _MIN_BLOCK and shared_end < 4 * host.writers * block_bytes:
            block_bytes //= 2
        positions = {index: position for position, index in enumerate(first)}
        described = sorted(
            (positions[i], paths.get(i, ""), sizes[i], repr(what))
            for i, what in structure.first_uses()
            if i in positions
        )
        file = None
        if host.writers:
            file = FilePlan.of(
                layout, shared_end=shared_end, block_bytes=block_bytes, writers=host.writers, index=host.index
            )
        return _CachedLayout(
            signature=signature,
            order=order,
            file=file,
            large=tuple(sizes[index] >= self._small_nbytes for index in order),
            on_cuda=any(location.startswith("cuda") for _, location in structure.signature[1]),
            plan=hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest(),
            # without parts that would keep the tensors of this save in memory
            structure=dataclasses.replace(structure, extents=[], leaves=[], _template=b""),
        )

    # -- a sharded state ----------------------------------------------------------------------------------------------

    def _plan_sharded(
        self, state: Any, own: OwnState, lazy: Wanted, coordinator: Coordinator, agree_timeout: timedelta
    ) -> ShardPlan:
        # Plain tensors, too, are described and divided between ranks: every tensor is a leaf.
        structure = dump(state, is_leaf=_is_leaf)
        keys = {id(leaf): key for key, leaf in reversed(keyed_leaves(state).items())}
        if structure.extents:
            raise ConfigError("a state with sharded tensors holds a bare torch storage; store it as a tensor")
        leaves: dict[str, Any] = {}
        given: dict[str, Tensor] = {}
        for leaf in structure.leaves:
            key = keys.get(id(leaf))
            if key is None:
                raise ConfigError(
                    f"a {type(leaf).__qualname__} is inside an object that is no dict, list or tuple; a state with"
                    " sharded tensors may hold tensors in those only"
                )
            leaves[key] = kind_of(leaf).detach(leaf, key)
            if isinstance(leaf, Tensor):
                given[key] = leaf
        _refuse_hidden(state, structure, keys)
        agreed = self._agree(describe(leaves), coordinator, agree_timeout)
        sources = [
            _source(chunk.key, leaves[chunk.key], Box(chunk.offsets, chunk.sizes)) for chunk in agreed.share.chunks
        ]
        entries: list[tuple[str, bytes]] = []
        if self._rank == 0:
            table = [keys[id(leaf)] for leaf in structure.leaves]
            entries = [(STRUCTURE, json.dumps(table).encode() + b"\n" + structure.data_pickle())]
        # Torch counts changes of a DTensor in the DTensor itself, not in the local tensor that is copied.
        counted = [given.get(chunk.key, source) for chunk, source in zip(agreed.share.chunks, sources, strict=True)]
        return self._sharded(agreed.share, sources, entries, own, lazy, counted=counted)

    def _plan_given(
        self, given: WritePlan, own: OwnState, lazy: Wanted, coordinator: Coordinator, agree_timeout: timedelta
    ) -> ShardPlan:
        held = {(chunk.key, chunk.offsets): chunk.tensor.detach() for chunk in given.chunks}
        for (key, _), tensor in held.items():
            if not has_memory(tensor):  # it may have been freed since the write plan was made
                raise refusal(tensor, key)
        boxes = tuple(
            held_box(chunk.key, chunk.box, chunk.shape or (), chunk.tensor.dtype, replicated=False)
            for chunk in given.chunks
        )
        agreed = self._agree(boxes, coordinator, agree_timeout)
        sources = [held[chunk.key, chunk.offsets] for chunk in agreed.share.chunks]
        # Every rank checks its objects, so that all ranks refuse a state that rank 0 would refuse.
        objects = _flat_structure(agreed.keys, given.objects)
        entries = [(STRUCTURE, objects)] if self._rank == 0 else []
        return self._sharded(agreed.share, sources, entries, own, lazy)

    def _sharded(
        self,
        share: RankShare,
        sources: Sequence[Tensor],
        entries: Sequence[tuple[str, bytes]],
        own: OwnState,
        lazy: Wanted,
        *,
        counted: Sequence[Tensor] = (),
    ) -> ShardPlan:
        chunks = share.chunks
        # For torch.load: a flat dict of what this file holds. The stand-in tensors have the sizes of the chunks and are
        # in the same order, so storage i is chunk i.
        flat = dump(
            {
                chunk.key if chunk.whole else f"{chunk.key}@{','.join(map(str, chunk.offsets))}": torch.empty(
                    chunk.sizes, dtype=dtype_from_name(chunk.dtype), device="cpu"
                )
                for chunk in chunks
            }
        )
        keys = flat.set_keys(range(len(chunks)))
        layout = lay_out_storages([(key, chunk.nbytes) for key, chunk in zip(keys, chunks, strict=True)])
        extents = [(source, 0, chunk.nbytes) for source, chunk in zip(sources, chunks, strict=True)]
        late: Sequence[bool] | None = None
        if lazy is not False:
            late = [
                chunk.nbytes >= self._small_nbytes and (lazy is True or bool(lazy(source)))
                for chunk, source in zip(chunks, sources, strict=True)
            ]
        stored = dict(zip(keys, chunks, strict=True))

        def tail() -> list[tuple[str, bytes]]:
            return [(DATA_PICKLE, flat.data_pickle()), *entries, (CHUNKS, chunks_to_json(stored))]

        return ShardPlan(
            replicated=False,
            plan=share.digest,
            own=own,
            file=StateFile(
                plan=FilePlan.of(layout, shared_end=IDENTITY_BYTES, block_bytes=BLOCK_BYTES, writers=1, index=0),
                extents=extents,
                storages=range(len(chunks)),
                lazy=late,
                counted=counted,
                on_cuda=any(source.is_cuda for source in sources),
                tail=tail,
                key_of=lambda index: chunks[index].key,
            ),
        )

    def _agree(self, boxes: tuple[HeldBox, ...], coordinator: Coordinator, agree_timeout: timedelta) -> _CachedShare:
        """Plans which rank writes which box. Collective when the boxes of any rank have changed.

        Raises:
            ConfigError: the boxes of the ranks do not fit together.
            Timeout: a rank is missing.
        """
        known = self._cached_share
        if known is None or known.boxes != boxes:
            described = [boxes]
            if self._world_size > 1:
                messages = gather(coordinator, "plan", HeldBoxes(boxes=boxes), timeout=agree_timeout)
                described = [message.boxes for message in messages]
            share = plan_writes(described, rank=self._rank)
            keys = tuple(dict.fromkeys(box.key for of_rank in described for box in of_rank))
            known = self._cached_share = _CachedShare(boxes, share, keys)
        return known


def _refuse_hidden(state: Any, structure: Structure, keys: Mapping[int, str]) -> None:
    """Refuses leaves that could not all be restored. A plain tensor that is also a key of a dict, or inside an object,
    is stored once and restored in all places; but a leaf of another class is restored only in places that
    :func:`keyed_leaves` looks into.

    Raises:
        ConfigError: a leaf of another class is in another place, too.
    """
    several = [
        leaf
        for leaf in structure.leaves
        if structure.leaf_uses[id(leaf)] > 1 and type(leaf) not in (Tensor, torch.nn.Parameter)
    ]
    if not several:
        return
    seen = count_leaves(state)
    for leaf in several:
        if structure.leaf_uses[id(leaf)] > seen[id(leaf)]:
            raise ConfigError(
                f"the {type(leaf).__qualname__} {keys[id(leaf)]!r} is also a key of a dict or in an object; a state"
                " may hold sharded tensors in dicts, lists and tuples only"
            )


def _paths(state: Any, structure: Structure) -> dict[int, str]:
    """Storage number -> path in the state; for tied tensors the alphabetically first path. Takes about 3 microseconds
    per tensor; a tensor inside an object has no path."""
    at: dict[tuple[int, int], str] = {}
    for key, leaf in keyed_leaves(state).items():
        if type(leaf) in (Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and has_memory(leaf):
            place = (leaf.data_ptr(), leaf.nbytes)
            at[place] = min(at.get(place, key), key)
    found = ((index, at.get((address, nbytes))) for index, (_, address, nbytes) in enumerate(structure.extents))
    return {index: path for index, path in found if path is not None}


def _dump_own(per_rank: Any) -> Structure:
    """The structure of this rank's own state.

    Raises:
        ConfigError: it holds a tensor of which this rank has only a part, which nobody could reassemble.
    """
    structure = dump(per_rank, is_leaf=_is_sharded)
    if structure.leaves:
        first = structure.leaves[0]
        keys = [key for key, leaf in keyed_leaves(per_rank).items() if leaf is first]
        raise ConfigError(
            f"per_rank holds tensor {keys[0] if keys else '?'!r}, a {type(first).__qualname__} of which this rank has a"
            " part; put it into the state, or store its local tensor"
        )
    return structure


def _is_sharded(class_: type) -> bool:
    """True for leaf classes of which a rank may hold only a part."""
    if class_ is Tensor or class_ is torch.nn.Parameter:
        return False
    kind = kind_of_class(class_)
    return kind is not None and not kind.replicated


def _is_leaf(class_: type) -> bool:
    return kind_of_class(class_) is not None


def _flat_structure(keys: Sequence[str], objects: Mapping[str, Any]) -> bytes:
    """The structure of a flat dict with a tensor under each of ``keys``, and with ``objects``.

    Raises:
        ConfigError: an object cannot be stored, holds a tensor, or has the key of a tensor.
    """
    for key, value in objects.items():
        flat = dump(value, is_leaf=_is_leaf)
        if flat.leaves or flat.extents or key in keys:
            what = "has the key of a tensor" if key in keys else "holds a tensor, which belongs into a chunk"
            raise ConfigError(f"the object {key!r} {what}")
    stand_ins = {key: torch.empty(0, device="cpu") for key in keys}
    structure = dump({**stand_ins, **objects}, is_leaf=_is_leaf)
    return json.dumps(list(keys)).encode() + b"\n" + structure.data_pickle()


def _source(key: str, leaf: Any, box: Box) -> Tensor:
    """The tensor whose memory a chunk is copied from.

    Raises:
        ConfigError: the leaf kind returned a tensor that does not fit the box.
    """
    kind = kind_of(leaf)
    try:
        local = kind.local(leaf, box)
    except ConfigError as error:
        raise ConfigError(f"tensor {key!r}: {error}") from error
    # Checked, because the copy reads this many bytes from the tensor's address, and would read other memory.
    if type(leaf) is not Tensor:
        dtype = kind.describe(leaf).dtype
        if tuple(local.shape) != tuple(box.sizes) or local.dtype != dtype or not has_memory(local):
            raise ConfigError(
                f"tensor {key!r}: leaf kind {kind.name!r} gave {local.dtype} {tuple(local.shape)} for a box of"
                f" {dtype} {tuple(box.sizes)}"
            )
    return local
