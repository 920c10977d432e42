"""The structure of a stored state, read from the shards of a step: its tree, and where the bytes of its tensors are."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.checkpoint.state import dtype_name, keyed_leaves, replace_leaves
from resiliency.checkpoint.structure import LEAF_PREFIX, harmless_classes, load
from resiliency.errors import CorruptShard
from resiliency.storage.shard_file import (
    CHUNKS,
    DATA_PICKLE,
    RANK_STATE,
    STRUCTURE,
    Chunk,
    Placed,
    chunks_from_json,
    storage_name,
)

__all__ = ["ReplicatedState", "ShardedState", "load_rank_state", "sharded_chunks"]


def load_rank_state(reader: ShardReader, *, allow_pickle: bool) -> Any:
    """What a rank had for itself.

    Raises:
        pickle.UnpicklingError: it holds objects of classes that may not be loaded.
        CorruptShard: it is missing.
    """
    with harmless_classes():
        return torch.load(io.BytesIO(reader.entry(RANK_STATE)), weights_only=not allow_pickle, map_location="cpu")


class ReplicatedState:
    """A state that is whole in one file.

    Attributes:
        tree: the state. Its tensors are on the CPU, in storages without values.
        storages: the storages of the tree by their keys; to be filled from the file's entries.
    """

    def __init__(self, reader: ShardReader, *, allow_pickle: bool) -> None:
        self.storages: dict[str, UntypedStorage] = {}
        self._entries = reader.entries
        self._path = reader.path
        self.tree = load(reader.entry(DATA_PICKLE), self._storage, allow_pickle=allow_pickle)

    def _storage(self, key: str, nbytes: int) -> UntypedStorage:
        entry = self._entries.get(storage_name(key))
        if entry is None or entry.nbytes < nbytes:
            raise CorruptShard(f"{self._path}: storage {key} of {nbytes} bytes is missing", path=self._path)
        if key not in self.storages:
            self.storages[key] = UntypedStorage(entry.nbytes)
        return self.storages[key]

    def place(self) -> dict[str, Placed]:
        """Where each tensor is stored, by its key in the tree. Without tensors of special layouts."""
        keys = {storage._cdata: key for key, storage in self.storages.items()}
        placed = {}
        for key, leaf in keyed_leaves(self.tree).items():
            if not _is_plain(leaf):
                continue
            entry = self._entries[storage_name(keys[leaf.untyped_storage()._cdata])]
            shape, itemsize = tuple(leaf.shape), leaf.element_size()
            chunk = Chunk(key, (0,) * len(shape), shape, dtype_name(leaf.dtype), itemsize, shape)
            start = entry.start + leaf.storage_offset() * itemsize
            if leaf.is_contiguous():
                placed[key] = Placed(chunk, start, start + chunk.nbytes)
            else:
                extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, leaf.stride(), strict=True))
                placed[key] = Placed(chunk, start, start + extent * itemsize, tuple(leaf.stride()))
        return placed

    def with_leaves(self, leaves: Mapping[str, Any], *, partial: bool) -> Any:
        """The tree with these leaves under their keys. ``partial``: others become empty tensors."""
        chosen: dict[int, Any] = {}
        absent = torch.empty(0)
        for key, leaf in keyed_leaves(self.tree).items():
            if key in leaves:
                chosen.setdefault(id(leaf), leaves[key])
        return replace_leaves(self.tree, lambda leaf: chosen.get(id(leaf), absent if partial else leaf))


def _is_plain(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_meta
        and not leaf.is_conj()
        and not leaf.is_neg()
    )


class ShardedState:
    """A state of which each file has a part."""

    def __init__(self, reader: ShardReader, *, allow_pickle: bool) -> None:
        self._path = reader.path
        table, _, data = reader.entry(STRUCTURE).partition(b"\n")
        try:
            self._keys = [str(key) for key in json.loads(table)]
        except (ValueError, TypeError) as error:
            raise CorruptShard(f"{self._path}: its table of leaves is damaged ({error})", path=self._path) from error
        self._leaves: dict[int, str] = {}
        self._storages: list[UntypedStorage] = []  # kept, so that no two have the same address
        self._tree = load(data, self._storage, allow_pickle=allow_pickle)

    def _storage(self, key: str, nbytes: int) -> UntypedStorage:
        number = key.removeprefix(LEAF_PREFIX)
        if number == key or not number.isdecimal() or int(number) >= len(self._keys):
            raise CorruptShard(f"{self._path}: leaf {key!r} is not in its table", path=self._path)
        storage = UntypedStorage(nbytes)
        self._storages.append(storage)
        self._leaves[storage._cdata] = self._keys[int(number)]
        return storage

    def with_leaves(self, leaf: Callable[[str], Any]) -> Any:
        """The tree with ``leaf(key)`` in the place of each leaf."""

        def replacement(stand_in: Any) -> Any:
            key = self._leaves.get(stand_in.untyped_storage()._cdata)
            return stand_in if key is None else leaf(key)

        return replace_leaves(self._tree, replacement)


def sharded_chunks(reader: ShardReader) -> list[Placed]:
    """The chunks of one file of a sharded step."""
    return chunks_from_json(reader.entry(CHUNKS), reader.entries, where=reader.path)
