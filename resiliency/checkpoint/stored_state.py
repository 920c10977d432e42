"""The structure of a stored state, read from the shards of a step: its tree, and where its tensors' bytes are."""

from __future__ import annotations

import enum
import functools
import io
import json
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.storage import UntypedStorage

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.errors import CorruptShard
from resiliency.state.harmless import harmless_classes
from resiliency.state.plain_pickle import (
    NotPlainPickle,
    StoredTensor,
    describe_plain,
    describe_tensor,
    is_described,
    load_plain,
)
from resiliency.state.tree import dtype_name, is_leaf, keyed_leaves, replace_leaves
from resiliency.state.unpickle import unpickle
from resiliency.storage.archive import read_directory
from resiliency.storage.shard_file import (
    CHUNKS,
    DATA_PICKLE,
    LEAF_PREFIX,
    RANK_STATE,
    STRUCTURE,
    Chunk,
    Placed,
    chunks_from_json,
    storage_name,
)

__all__ = ["ReplicatedState", "ShardedState", "load_rank_state", "rank_state", "sharded_chunks"]

# Torch declares no types for these.
_sparse_checks: Any = torch.sparse.check_sparse_tensor_invariants
_new_storage: Any = UntypedStorage
_can_be_data: Any = torch._has_compatible_shallow_copy_type


def load_rank_state(reader: ShardReader, *, allow_pickle: bool) -> Any:
    """A rank's own state.

    Raises:
        pickle.UnpicklingError: it holds objects of classes that may not be loaded.
        CorruptShard: it is missing.
    """
    return rank_state(reader.entry(RANK_STATE), where=f"{reader.path}:{RANK_STATE}", allow_pickle=allow_pickle)


def rank_state(data: bytes, *, where: str, allow_pickle: bool) -> Any:
    """A rank's own state from the bytes of its entry; ``where``: their place, for messages.

    Raises:
        pickle.UnpicklingError: it holds objects of classes that may not be loaded.
        CorruptShard: it is no archive.
    """
    # Torch reads it after the handler, so that nothing of the first attempt is in memory any more.
    with suppress(NotPlainPickle):
        return _plain_rank_state(data, where)
    with harmless_classes():
        return torch.load(io.BytesIO(data), weights_only=not allow_pickle, map_location="cpu")


def _plain_rank_state(data: bytes, where: str) -> Any:
    """What ``torch.load`` makes of a plain state, in a quarter of the time (of a few values: 50 and 190 microseconds).

    Raises:
        NotPlainPickle: torch must read it, or refuse it.
    """
    entries = read_directory(lambda start, end: data[start:end], len(data), where=where)

    def storage(key: str, nbytes: int) -> UntypedStorage:
        entry = entries.get(storage_name(key))
        if entry is None or entry.nbytes < nbytes:
            raise CorruptShard(f"{where}: storage {key} of {nbytes} bytes is missing", path=where)
        if key not in made:
            made[key] = _new_storage(entry.nbytes)
            if entry.nbytes:
                view(made[key].data_ptr(), entry.nbytes)[:] = memoryview(data)[entry.start : entry.end]
        return made[key]

    made: dict[str, UntypedStorage] = {}
    pickled = entries.get(DATA_PICKLE)
    if pickled is None:
        raise NotPlainPickle("no pickle")
    return load_plain(data[pickled.start : pickled.end], storage)[0]


class ReplicatedState:
    """A state that one file holds whole.

    Attributes:
        storages: key -> storage on the CPU; undefined values until they are filled from the file's entries.
    """

    def __init__(self, reader: ShardReader, *, allow_pickle: bool) -> None:
        prefix = storage_name("")
        self._entries = {
            name.removeprefix(prefix): entry for name, entry in reader.entries.items() if name.startswith(prefix)
        }
        self._reader, self._path = reader, reader.path
        self._data, self._allow_pickle = reader.entry(DATA_PICKLE), allow_pickle
        self._uses: Counter[str] = Counter()
        # The tree of place() and its leaves, kept for with_leaves(); None when the tree must be built anew from tensors
        # with values.
        self._plain: tuple[Any, dict[str, Any]] | None = None
        self._is_leaf: Callable[[Any], bool] = is_leaf

    @functools.cached_property
    def storages(self) -> dict[str, UntypedStorage]:
        return {key: _new_storage(entry.nbytes) for key, entry in self._entries.items()}

    def tree(self, *, filled: bool = True) -> Any:
        """The state, whose tensors use :attr:`storages`. Fill these first: an object may read its tensors while it is
        built.

        Raises:
            pickle.UnpicklingError: it holds objects of classes that may not be loaded.
            CorruptShard: it needs a storage that the file does not have.
        """
        tree, self._uses = unpickle(self._data, self._storage, allow_pickle=self._allow_pickle, filled=filled)
        return tree

    def _storage(self, key: str, nbytes: int) -> UntypedStorage:
        storage = self.storages.get(key)
        if storage is None or storage.nbytes() < nbytes:
            raise self._missing(key, nbytes)
        return storage

    def _missing(self, key: str, nbytes: int) -> CorruptShard:
        return CorruptShard(f"{self._path}: storage {key} of {nbytes} bytes is missing", path=self._path)

    def place(self) -> tuple[dict[str, Placed], list[str]]:
        """Tensor key -> where its bytes are; and the keys of storages that something else uses, or may use, too:
        tensors of special layouts, and objects, which may hold any tensor."""
        try:
            tree, leaves = describe_plain(self._data)
        except NotPlainPickle:
            return self._place_any()
        self._plain, self._is_leaf = (tree, leaves), is_described
        return {key: self._placed(key, leaf) for key, leaf in leaves.items()}, []

    def _placed(self, key: str, leaf: StoredTensor) -> Placed:
        """Where one tensor's bytes are.

        Raises:
            CorruptShard: the file does not have its storage.
        """
        storage, dtype, offset, shape, strides, extent, contiguous, _, _ = leaf
        itemsize, entry = dtype.itemsize, self._entries.get(storage)
        if not extent:
            offset = 0  # a tensor without elements may begin anywhere
        begin, end = offset * itemsize, (offset + extent) * itemsize
        if entry is None or end > entry.nbytes:
            raise self._missing(storage, end)
        chunk = Chunk(key, (0,) * len(shape), shape, dtype_name(dtype), itemsize, shape)
        return Placed(chunk, entry.start + begin, entry.start + end, None if contiguous else strides)

    def _place_any(self) -> tuple[dict[str, Placed], list[str]]:
        """:meth:`place` for a state with arbitrary objects: builds the tree and looks at its tensors."""
        with _sparse_checks(enable=False):  # no tensor has values yet
            try:
                tree = self.tree(filled=False)
            except (pickle.UnpicklingError, CorruptShard):
                raise
            except Exception:  # Boundary: any object may read its tensors while it is built (a nested tensor does).
                self._take_values()
                tree = self.tree()
        keys = {storage._cdata: key for key, storage in self.storages.items()}
        placed = {}
        seen: dict[int, Any] = {}
        leaves = keyed_leaves(tree)
        for key, leaf in leaves.items():
            storage_key = keys.get(leaf.untyped_storage()._cdata) if _is_plain(leaf) else None
            if storage_key is None:
                continue
            if id(leaf) not in seen:
                seen[id(leaf)] = leaf
                self._uses[storage_key] -= 1
            where = self._placed(key, describe_tensor(leaf, storage_key))
            placed[key] = where._replace(conjugated=leaf.is_conj(), negated=leaf.is_neg())
        if _has_objects(tree):
            return placed, list(self.storages)
        hidden = [key for key, uses in self._uses.items() if uses > 0]
        if not hidden:
            self._plain = tree, leaves
        return placed, hidden

    def _take_values(self) -> None:
        """Fills the storages from the file.

        Raises:
            CorruptShard: the file is damaged.
        """
        self._reader.check()
        for key, entry in self._entries.items():
            if entry.nbytes:
                self._reader.copy(entry.start, self.storages[key].data_ptr(), entry.nbytes)

    def with_leaves(self, leaves: Mapping[str, Any], *, partial: bool) -> Any:
        """The tree with these leaves in place of its own, by key. ``partial``: leaves without a replacement become
        empty tensors."""
        if self._plain is None:
            tree = self.tree()
            self._plain = tree, keyed_leaves(tree, self._is_leaf)
        tree, found = self._plain
        # Of a leaf's several keys the first counts.
        chosen = {id(leaf): leaves[key] for key, leaf in reversed(found.items()) if key in leaves}
        absent = torch.empty(0, device="cpu")
        return replace_leaves(tree, lambda leaf: chosen.get(id(leaf), absent if partial else leaf), self._is_leaf)


#: Classes whose objects cannot hold a tensor.
_VALUES: tuple[type, ...] = (str, bytes, bytearray, int, float, complex, type(None), type, range, enum.Enum)
_VALUES += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_NO_OBJECTS = (Tensor, *_VALUES)


def _has_objects(value: Any) -> bool:
    """True when a tree contains something that may hold tensors and that :func:`keyed_leaves` does not look into: an
    object, a dict key, or an attribute of a container."""
    if isinstance(value, _NO_OBJECTS):
        return False
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
        if any(map(_may_hold_tensors, value)):
            return True
    elif isinstance(value, list | tuple | deque):
        parts = value
    else:
        return True
    return any(map(_has_objects, parts)) or any(map(_may_hold_tensors, getattr(value, "__dict__", {}).values()))


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, _VALUES):
        return False
    if isinstance(value, dict):
        return any(map(_may_hold_tensors, value)) or any(map(_may_hold_tensors, value.values()))
    return not isinstance(value, list | tuple | deque) or any(map(_may_hold_tensors, value))


def _is_plain(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and not is_lazy(leaf)
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and not leaf.is_quantized
        and not leaf.is_meta
    )


class ShardedState:
    """A state of which each file holds a part."""

    def __init__(self, reader: ShardReader, *, allow_pickle: bool) -> None:
        self._path = reader.path
        table, _, data = reader.entry(STRUCTURE).partition(b"\n")
        try:
            self._keys = [str(key) for key in json.loads(table)]
        except (ValueError, TypeError) as error:
            raise CorruptShard(f"{self._path}: its table of leaves is damaged ({error})", path=self._path) from error
        self._leaves: dict[int, str] = {}
        self._storages: list[UntypedStorage] = []  # kept alive, so that no two have the same address
        self._tree, _ = unpickle(data, self._storage, allow_pickle=allow_pickle)

    def _storage(self, key: str, nbytes: int) -> UntypedStorage:
        number = key.removeprefix(LEAF_PREFIX)
        if number == key or not number.isdecimal() or int(number) >= len(self._keys):
            raise CorruptShard(f"{self._path}: leaf {key!r} is not in its table", path=self._path)
        storage: UntypedStorage = _new_storage(nbytes)
        self._storages.append(storage)
        self._leaves[storage._cdata] = self._keys[int(number)]
        return storage

    @functools.cached_property
    def further_keys(self) -> dict[str, str]:
        """For each further key of a leaf that is in the tree several times (tied weights): key -> key it is stored
        under."""
        places: dict[str, list[str]] = {}
        for key, stand_in in keyed_leaves(self._tree).items():
            places.setdefault(self._leaves.get(stand_in.untyped_storage()._cdata, key), []).append(key)
        # The caller of a write plan may store a leaf under any name; then the leaf's first place in the tree is its
        # key.
        return {
            key: stored
            for stored, keys in places.items()
            for key in keys
            if key != (stored if stored in keys else keys[0])
        }

    def with_leaves(self, leaves: Mapping[str, Any], *, partial: bool) -> Any:
        """The tree with these leaves, by key. ``partial``: leaves without a replacement become empty tensors. Call it
        once.

        Raises:
            KeyError: a leaf is missing, and not ``partial``.
        """
        first_keys = {stored: key for key, stored in reversed(self.further_keys.items()) if key in leaves}
        first_keys.update({key: key for key in leaves})
        absent = torch.empty(0, device="cpu")
        filled: set[int] = set()

        def replacement(stand_in: Any) -> Any:
            key = self._leaves.get(stand_in.untyped_storage()._cdata)
            if key is None or id(stand_in) in filled:
                return stand_in
            leaf = leaves[first_keys.get(key, key)] if not partial or key in first_keys else absent
            # Assigned to the tensor in the tree, if possible, because that one may also be a dict key or inside an
            # object.
            if type(leaf) is Tensor and not leaf.is_conj() and not leaf.is_neg() and _can_be_data(stand_in, leaf):
                filled.add(id(stand_in))
                stand_in.data = leaf
                return stand_in
            return leaf

        return replace_leaves(self._tree, replacement)


def sharded_chunks(reader: ShardReader) -> list[Placed]:
    """The chunks that one file of a sharded step stores."""
    return chunks_from_json(reader.entry(CHUNKS), reader.entries, where=reader.path)
