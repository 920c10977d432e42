"""Plans a save: turns a state tree, or a caller's write plan, into the files this rank writes.

A state that every rank holds whole is *replicated*: shard 0 is a stock checkpoint with the whole state, written by the
ranks of one host together (of every host, where each host has its own folder). Large storages come first, at offsets
that follow from their sizes, so that every rank knows where its part goes without communication; then comes what only
the first rank of the host knows (small tensors, Python objects). Every other rank writes a small shard with its own
data.

A state of which ranks hold parts is *sharded*: each rank writes one shard with its boxes. Of a state tree with DTensors
every rank works out for itself what it writes (:mod:`resiliency.checkpoint.plan`); only for a caller's own
:class:`WritePlan` do the ranks agree (:mod:`resiliency.checkpoint.write_agreement`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.plan import PlannedLeaf, ShardedPlan
from resiliency.checkpoint.shard_writer import FilePlan, OwnState, ShardPlan, StateFile
from resiliency.checkpoint.stock_view import BoxFile, StockFolder, StockView, view_of_tree
from resiliency.checkpoint.write_agreement import Agreed, LeftOut, WriteAgreement
from resiliency.checkpoint.write_plan import WritePlan
from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import Box, has_memory, kind_of, kind_of_class, refusal
from resiliency.state.structure import Structure, dump, without_refused
from resiliency.state.tree import count_leaves, dtype_from_name, dtype_name, keyed_leaves
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.shard_file import (
    CHUNKS,
    DATA_PICKLE,
    IDENTITY_BYTES,
    IN_FOLDER,
    STOCK_METADATA,
    STRUCTURE,
    Chunk,
    chunks_to_json,
    lay_out_storages,
)
from resiliency.storage.stock_folder import is_stock_file

__all__ = ["Agree", "HostPart", "ShardPlanner", "Wanted"]

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, kw_only=True)
class Agree:
    """How the ranks agree on a write plan.

    Attributes:
        coordinator: exchanges messages with rank 0.
        topic: unique for each save of this start.
        timeout: how long to wait for the other ranks.
    """

    coordinator: Coordinator
    topic: str
    timeout: timedelta


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
class _CachedFile:
    """What follows from the boxes that this rank writes; kept while they stay.

    Attributes:
        of_all: digest of what all ranks write.
        box_file: what the file is but for the data of the boxes.
        folder: what makes a stock checkpoint of all ranks' files; used by rank 0.
    """

    of_all: str
    chunks: tuple[Chunk, ...]
    box_file: BoxFile
    folder: StockFolder
    file: FilePlan
    nbytes: tuple[int, ...]
    large: tuple[bool, ...]

    @functools.cached_property
    def table(self) -> bytes:
        """Of the boxes. Thread: the one that writes the tail."""
        return chunks_to_json({str(number): chunk for number, chunk in enumerate(self.chunks)})


@dataclass(frozen=True)
class _CachedSharded:
    """What follows from the structure of a sharded state tree.

    Attributes:
        signature: equal for all states that this fits.
        mine: for each box that this rank writes, the number of its leaf, the box, and the dtype.
        table: the keys of the leaves, in the order of the structure, as JSON.
        file: what this rank writes.
        structure: the structure that this was made from.
    """

    signature: object
    mine: tuple[tuple[int, Box, torch.dtype], ...]
    table: bytes
    file: _CachedFile
    structure: Structure


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
        self._cached_sharded: _CachedSharded | None = None
        self._cached_given: _CachedFile | None = None
        self._agreement = WriteAgreement()
        self._warned_of_form = False

    def plan(
        self,
        state: Any,
        per_rank: Any,
        *,
        host: HostPart,
        agree: Agree,
        lazy: Wanted = False,
        replicated: Callable[[Tensor], bool] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> ShardPlan:
        """Plans a save.

        Collective: only for a :class:`WritePlan`. Blocks: up to ``agree.timeout`` then.

        Args:
            state: a state tree, or a :class:`WritePlan`.
            per_rank: this rank's own tree.
            host: what this rank writes of shard 0.
            agree: how the ranks agree on a :class:`WritePlan`.
            lazy: which tensors of the state may be copied late; called for large ones only.
            replicated: which plain tensors of a state tree are equal on all ranks; None: all. Of a state with sharded
                tensors rank 0 writes all plain tensors.
            beside: file name -> what else of rank 0 is put into the folder of a sharded step, a tree or the bytes of
                the file; not for a replicated one.

        Raises:
            ConfigError: a state that cannot be stored.
            LeftOut: another rank leaves out the save of this write plan.
            Timeout: a rank does not take part in a write plan.
        """
        if isinstance(state, WritePlan):
            return self._plan_given(state, per_rank, beside or {}, lazy, replicated, agree)
        own = OwnState.of(_dump_own(per_rank))
        files = self._files_beside(beside or {})
        if self._cached_sharded is not None:
            # Most likely it is sharded again; otherwise this was done for nothing.
            structure = dump(state, is_leaf=_is_leaf)
            if any(map(_is_sharded, set(map(type, structure.leaves)))):
                return self._plan_sharded(state, structure, own, files, lazy)
            self._cached_sharded = None
        try:
            structure = dump(state, is_leaf=_is_sharded)
        except ConfigError:
            if host.writers and host.index == 0:
                raise
            # The file gets its objects from the first rank of a host, so objects that only this rank cannot store are
            # no error.
            structure = dump(without_refused(state, is_leaf=_is_sharded), is_leaf=_is_sharded)
        if structure.leaves:
            # Every tensor is a leaf, because plain ones are stored as boxes, too.
            return self._plan_sharded(state, dump(state, is_leaf=_is_leaf), own, files, lazy)
        if beside:
            raise ConfigError("beside= is for states with sharded tensors: another one is a file, not a folder")
        return self._plan_replicated(state, structure, own, lazy, replicated, host)

    def leave_out(self, reason: str, agree: Agree) -> None:
        """Tells the other ranks that this one leaves out the save of a write plan, so that they do not wait for it.

        Collective: yes, with the :meth:`plan` of the others. Blocks: up to ``agree.timeout``.
        """
        with contextlib.suppress(LeftOut, ConfigError):
            self._agree((), (), agree, problem=reason, skips=True)

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
        self, state: Any, structure: Structure, own: OwnState, beside: Mapping[str, OwnState | bytes], lazy: Wanted
    ) -> ShardPlan:
        found = keyed_leaves(state)
        leaves = list(found.values())
        signature = [(key, kind_of(leaf).structure(leaf)) for key, leaf in found.items()]
        identities = [id(leaf) for leaf in leaves]
        # A leaf in several places is stored once. Which places these are is part of the structure.
        places = dict(zip(reversed(identities), range(len(leaves) - 1, -1, -1), strict=True))
        order = [places.get(id(leaf), -1) for leaf in structure.leaves]
        uses = [structure.leaf_uses[id(leaf)] for leaf in structure.leaves]
        cached = self._cached_sharded
        if cached is None or cached.signature != (signature, order, uses):
            self._cached_sharded = None
            cached = self._lay_out_sharded(state, structure, found, order, (signature, order, uses))
            self._cached_sharded = cached
        structure.reuse(cached.structure)
        sources = [_source(signature[number][0], leaves[number], box, dtype) for number, box, dtype in cached.mine]

        def entries() -> list[tuple[str, bytes]]:
            return [(STRUCTURE, cached.table + b"\n" + structure.data_pickle())] if self._rank == 0 else []

        # Torch counts changes of a DTensor in the DTensor itself, not in the local tensor that is copied.
        counted = [
            leaves[number] if isinstance(leaves[number], Tensor) else source
            for (number, _, _), source in zip(cached.mine, sources, strict=True)
        ]
        return self._sharded(
            cached.file, sources, entries, own, lazy, view=view_of_tree, beside=beside, counted=counted
        )

    def _lay_out_sharded(
        self, state: Any, structure: Structure, found: Mapping[str, Any], order: Sequence[int], signature: object
    ) -> _CachedSharded:
        """Checks a sharded state of a new structure, and works out what this rank writes.

        Raises:
            ConfigError: the state cannot be stored.
        """
        if structure.extents:
            raise ConfigError("a state with sharded tensors holds a bare torch storage; store it as a tensor")
        keys = list(found)
        for leaf, number in zip(structure.leaves, order, strict=True):
            if number < 0:
                raise ConfigError(
                    f"a {type(leaf).__qualname__} is inside an object that is no dict, list or tuple; a state with"
                    " sharded tensors may hold tensors in those only"
                )
        _refuse_hidden(
            state, structure, {id(leaf): keys[number] for leaf, number in zip(structure.leaves, order, strict=True)}
        )
        planned: list[PlannedLeaf] = []
        for number in order:
            key, leaf = keys[number], found[keys[number]]
            kind_of(leaf).detach(leaf, key)  # refuses what cannot be stored
            planned.append(_planned(key, leaf, self._rank))
        plan = ShardedPlan.of(planned)
        chunks = plan.boxes_of_rank(self._rank)
        numbers = {key: number for number, key in enumerate(keys)}
        return _CachedSharded(
            signature=signature,
            mine=tuple(
                (numbers[chunk.key], Box(chunk.offsets, chunk.sizes), dtype_from_name(chunk.dtype)) for chunk in chunks
            ),
            table=json.dumps([keys[number] for number in order]).encode(),
            file=self._lay_out_file(chunks, plan.digest, lambda: map(plan.boxes_of_rank, range(self._world_size))),
            # without parts that would keep the tensors of this save in memory
            structure=dataclasses.replace(structure, extents=[], leaves=[], _template=b""),
        )

    def _plan_given(
        self,
        given: WritePlan,
        per_rank: Any,
        beside: Mapping[str, Any],
        lazy: Wanted,
        replicated: Callable[[Tensor], bool] | None,
        agree: Agree,
    ) -> ShardPlan:
        boxes = tuple(
            Chunk(
                key=chunk.key,
                offsets=chunk.offsets,
                sizes=chunk.box.sizes,
                dtype=dtype_name(chunk.tensor.dtype),
                itemsize=chunk.tensor.dtype.itemsize,
                shape=chunk.shape or (),
            )
            for chunk in given.chunks
        )
        # What only this rank cannot store is refused by all, and none waits for it.
        own, files, problem = None, {}, ""
        try:
            if given.problem:
                raise ConfigError(given.problem)
            if replicated is not None:
                raise ConfigError("replicated= is for state trees; a WritePlan says what each rank holds")
            own = OwnState.of(_dump_own(per_rank))
            files = self._files_beside(beside)
            for chunk in given.chunks:
                if not has_memory(chunk.tensor):  # it may have been freed since the write plan was made
                    raise refusal(chunk.tensor, chunk.key)
            _check_objects(given.objects)
        except ConfigError as error:
            problem = str(error)
        agreed = self._agree(boxes, tuple(given.objects), agree, problem=problem)
        assert own is not None  # else the ranks would have agreed on the problem
        given = given.complete(functools.partial(_collect, agree))
        written = [given.chunks[number] for number in agreed.mine]
        sources = [chunk.tensor.detach() for chunk in written]
        chunks = tuple(boxes[number] for number in agreed.mine)
        cached = self._cached_given
        if cached is None or (cached.of_all, cached.chunks) != (agreed.digest, chunks):
            cached = self._cached_given = self._lay_out_file(chunks, agreed.digest, lambda: agreed.of_ranks)
        objects = [(STRUCTURE, _flat_structure(agreed.keys, given.objects))] if self._rank == 0 else []
        return self._sharded(cached, sources, lambda: list(objects), own, lazy, view=given.stock_view, beside=files)

    def _files_beside(self, beside: Mapping[str, Any]) -> dict[str, OwnState | bytes]:
        if any(not is_stock_file(file) or file == STOCK_METADATA for file in beside):
            raise ConfigError(f"beside= takes names of files that are not the step's own, and not {list(beside)}")
        if self._rank:
            return {}
        return {file: one if isinstance(one, bytes) else OwnState.of(_dump_own(one)) for file, one in beside.items()}

    def _agree(
        self,
        boxes: tuple[Chunk, ...],
        objects: Collection[str],
        agree: Agree,
        *,
        problem: str,
        skips: bool = False,
    ) -> Agreed:
        return self._agreement.agree(
            boxes,
            objects=objects,
            coordinator=agree.coordinator,
            topic=agree.topic,
            timeout=agree.timeout,
            problem=problem,
            skips=skips,
        )

    def _lay_out_file(
        self, chunks: tuple[Chunk, ...], of_all: str, of_ranks: Callable[[], Iterable[Sequence[Chunk]]]
    ) -> _CachedFile:
        box_file = BoxFile.of(chunks)
        return _CachedFile(
            of_all=of_all,
            chunks=chunks,
            box_file=box_file,
            folder=StockFolder(of_ranks),
            file=FilePlan.of(box_file.layout, shared_end=IDENTITY_BYTES, block_bytes=BLOCK_BYTES, writers=1, index=0),
            nbytes=tuple(chunk.nbytes for chunk in chunks),
            large=tuple(chunk.nbytes >= self._small_nbytes for chunk in chunks),
        )

    def _sharded(
        self,
        cached: _CachedFile,
        sources: Sequence[Tensor],
        entries: Callable[[], list[tuple[str, bytes]]],
        own: OwnState,
        lazy: Wanted,
        *,
        view: Callable[[bytes], StockView],
        beside: Mapping[str, OwnState | bytes],
        counted: Sequence[Tensor] = (),
    ) -> ShardPlan:
        late: Sequence[bool] | None = None if lazy is False else cached.large
        if late is not None and not isinstance(lazy, bool):
            late = [large and bool(lazy(source)) for large, source in zip(late, sources, strict=True)]

        def tail() -> list[tuple[str, bytes]]:
            known = entries()
            ours = [(DATA_PICKLE, cached.box_file.pickle), *known, (CHUNKS, cached.table)]
            if self._rank:
                return ours
            files = {file: one if isinstance(one, bytes) else one.to_bytes() for file, one in beside.items()}
            ours += [(IN_FOLDER + file, data) for file, data in files.items()]
            return [*self._stock_entries(cached, view, dict(known)[STRUCTURE]), *ours]

        return ShardPlan(
            replicated=False,
            plan=cached.of_all,
            own=own,
            file=StateFile(
                plan=cached.file,
                extents=[
                    (source, _address(source), nbytes) for source, nbytes in zip(sources, cached.nbytes, strict=True)
                ],
                storages=range(len(cached.chunks)),
                lazy=late,
                counted=counted,
                on_cuda=any([source.is_cuda for source in sources]),
                tail=tail,
                key_of=lambda index: cached.chunks[index].key,
            ),
        )

    def _stock_entries(
        self, cached: _CachedFile, view: Callable[[bytes], StockView], structure: bytes
    ) -> list[tuple[str, bytes]]:
        """What makes the step's folder a stock distributed checkpoint; nothing, with one warning, when the state has no
        such form. Thread: copy."""
        try:
            return cached.folder.entries(view(structure), cached.box_file.layout)
        except ConfigError as error:
            logger.log(
                logging.INFO if self._warned_of_form else logging.WARNING,
                "torch.distributed.checkpoint cannot load these checkpoints, because of the state: %s;"
                " Checkpointer.load does",
                error,
            )
        except Exception:  # Boundary: an object of the user's that cannot be read back; the save itself is good.
            logger.log(
                logging.INFO if self._warned_of_form else logging.WARNING,
                "torch.distributed.checkpoint cannot load these checkpoints; Checkpointer.load may",
                exc_info=True,
            )
        self._warned_of_form = True
        return []


def _address(source: Tensor) -> int:
    """Where the elements lie in C order; 0: they do not."""
    return source.data_ptr() if source.is_contiguous() and not source.is_conj() else 0


def _planned(key: str, leaf: Any, rank: int) -> PlannedLeaf:
    """What the plan needs of a leaf.

    Raises:
        ConfigError: its kind contradicts itself.
    """
    kind = kind_of(leaf)
    try:
        known = kind.describe(leaf)
    except ConfigError as error:
        raise ConfigError(f"tensor {key!r}: {error}") from error
    if known.layout is None and not kind.replicated:
        raise ConfigError(f"tensor {key!r}: leaf kind {kind.name!r} is not replicated, so it must describe a layout")
    if known.layout is not None and set(known.layout.boxes(known.shape, rank)) != set(known.boxes):
        raise ConfigError(
            f"tensor {key!r}: this process holds boxes {list(known.boxes)}, but by its layout rank {rank} holds"
            f" {list(known.layout.boxes(known.shape, rank))}; the ranks of its mesh must be those of the checkpointer"
        )
    return PlannedLeaf(key, known.shape, dtype_name(known.dtype), known.dtype.itemsize, known.layout)


def _collect(agree: Agree, data: bytes) -> list[bytes]:
    """On rank 0 the bytes that all ranks pass; elsewhere none. Collective."""
    found: list[bytes] = []

    def keep(messages: list[bytes]) -> list[bytes]:
        found.extend(messages)
        return [b""] * len(messages)

    agree.coordinator.ask_first(f"{agree.topic}/objects", data, keep, timeout=agree.timeout)
    return found


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


def _check_objects(objects: Mapping[str, Any]) -> None:
    """Refuses objects that a write plan cannot hold.

    Raises:
        ConfigError: an object cannot be stored, or holds a tensor.
    """
    for key, value in objects.items():
        flat = dump(value, is_leaf=_is_leaf)
        if flat.leaves or flat.extents:
            raise ConfigError(f"the object {key!r} holds a tensor, which belongs into a chunk")


def _flat_structure(keys: Sequence[str], objects: Mapping[str, Any]) -> bytes:
    """The structure of a flat dict with a tensor under each of ``keys``, and with ``objects``."""
    stand_ins = {key: torch.empty(0, device="cpu") for key in keys}
    structure = dump({**stand_ins, **objects}, is_leaf=_is_leaf)
    return json.dumps(list(keys)).encode() + b"\n" + structure.data_pickle()


def _source(key: str, leaf: Any, box: Box, dtype: torch.dtype) -> Tensor:
    """The tensor whose memory a box is copied from.

    Raises:
        ConfigError: the leaf kind returned a tensor that does not fit the box.
    """
    kind = kind_of(leaf)
    try:
        local = kind.local(leaf, box)
    except ConfigError as error:
        raise ConfigError(f"tensor {key!r}: {error}") from error
    # Checked, because the copy reads this many bytes from the tensor's address, and would read other memory.
    if local.shape != box.sizes or local.dtype != dtype or not has_memory(local):
        if kind.replicated:
            raise refusal(local, key)
        raise ConfigError(
            f"tensor {key!r}: leaf kind {kind.name!r} gave {local.dtype} {tuple(local.shape)} for a box of"
            f" {dtype} {tuple(box.sizes)}, or a tensor without memory"
        )
    return local
