"""Makes of a sharded step what torch's distributed checkpoint (DCP) reads: names, objects, and ``.metadata``.

The boxes themselves are stock already (:func:`resiliency.storage.shard_file.lay_out_boxes`). Where they are in the
files follows from names, shapes and dtypes alone, so one rank can describe all files without hearing from the others.
The description is large (128 ranks with 300 tensors: 5 MiB, over a second): it is made once per structure, off the
training thread, with room for what changes from save to save, the places of the Python objects.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.storage import UntypedStorage

from resiliency.errors import ConfigError
from resiliency.state.describe import tensor_pickle, tensors_pickle
from resiliency.state.structure import dump
from resiliency.state.tree import dtype_from_name
from resiliency.state.unpickle import unpickle
from resiliency.storage.archive import entry_at
from resiliency.storage.manifest import shard_file
from resiliency.storage.shard_file import (
    DATA_PICKLE,
    IN_FOLDER,
    LEAF_PREFIX,
    STOCK_METADATA,
    BoxArchive,
    Chunk,
    StorageLayout,
    archive_tail,
    box_archive,
    box_starts,
    lay_out_boxes,
    lay_out_storages,
)

__all__ = ["BoxFile", "StockFolder", "StockView", "view_of_flat", "view_of_tree"]

logger = logging.getLogger(__name__)

#: Entry with the Python objects of a step, each as a torch archive.
_OBJECTS = "resiliency/objects"
_new_storage: Any = UntypedStorage  # torch does not annotate it

#: A file's boxes, in its order; the storage of box ``i`` has the key ``str(i)``.
Boxes = Sequence[Chunk]


@dataclass(frozen=True)
class BoxFile:
    """The file of one rank's boxes, as far as it follows from names, shapes and dtypes.

    Attributes:
        layout: of the file.
        pickle: the file's ``data.pkl``: a dict of the boxes.
    """

    layout: StorageLayout
    pickle: bytes

    @classmethod
    def of(cls, boxes: Boxes) -> BoxFile:
        archives = [_archive(number, box) for number, box in enumerate(boxes)]
        layout = lay_out_boxes([(str(number), box.nbytes) for number, box in enumerate(boxes)], archives)
        named = [
            (
                box.key if box.whole else f"{box.key}@{','.join(map(str, box.offsets))}",
                dtype_from_name(box.dtype),
                box.sizes,
                str(number),
            )
            for number, box in enumerate(boxes)
        ]
        return cls(layout, tensors_pickle(named))


def _archive(number: int, box: Chunk) -> BoxArchive:
    key = str(number)
    return box_archive(key, box.nbytes, tensor_pickle(dtype_from_name(box.dtype), box.sizes, key))


@dataclass(frozen=True)
class StockView:
    """A step as DCP sees it.

    Attributes:
        names: key of each stored tensor -> the fully qualified names (FQNs) under which DCP finds it.
        objects: FQN of each Python object -> its bytes, as ``torch.save`` writes it.
        paths: FQN -> path in the state, which DCP's tools need to make nested dicts again; or what else a planner of
            DCP's wants to find there.
    """

    names: Mapping[str, Sequence[str]]
    objects: Mapping[str, bytes]
    paths: Any


def view_of_tree(structure: bytes) -> StockView:
    """How DCP would flatten a state, given the entry that describes it
    (:data:`resiliency.storage.shard_file.STRUCTURE`) when nothing else can change it any more.

    Raises:
        ConfigError: DCP cannot flatten it.
    """
    table, _, data = structure.partition(b"\n")
    keys = json.loads(table)
    stored: dict[int, str] = {}
    kept: list[UntypedStorage] = []  # so that no two have the same address

    def storage(key: str, nbytes: int) -> UntypedStorage:
        kept.append(_new_storage(nbytes))
        stored[kept[-1]._cdata] = keys[int(key.removeprefix(LEAF_PREFIX))]
        return kept[-1]

    tree, _ = unpickle(data, storage, allow_pickle=True)  # bytes that this process has just made
    if not isinstance(tree, dict):
        raise ConfigError(f"it is a {type(tree).__qualname__}, not a dict")
    try:
        flat, paths = flatten_state_dict(tree)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    names: dict[str, list[str]] = {}
    objects: dict[str, bytes] = {}
    for fqn, value in flat.items():
        if isinstance(value, Tensor):
            names.setdefault(stored[value.untyped_storage()._cdata], []).append(fqn)
        else:
            objects[fqn] = _saved(fqn, value)
    return StockView(names, objects, paths)


def view_of_flat(structure: bytes, path_of: Callable[[str], tuple[str, ...]]) -> StockView:
    """The same for a flat dict of tensors, which DCP knows by the paths that their keys stand for, and objects.

    Raises:
        ConfigError: two tensors would have one name.
    """
    flat = view_of_tree(structure)
    paths = {key: path_of(key) for key in flat.names}
    names = {key: [".".join(path)] for key, path in paths.items()}
    renamed = {name: paths[key] for key, (name,) in names.items()}
    taken = flat.objects.keys() & renamed
    if len(renamed) != len(names) or taken:
        raise ConfigError(f"several of its parts are named {next(iter(taken), 'alike')!r}")
    return StockView(names, flat.objects, {**{fqn: flat.paths[fqn] for fqn in flat.objects}, **renamed})


def _saved(fqn: str, value: Any) -> bytes:
    structure = dump(value)
    if structure.extents:
        raise ConfigError(f"{fqn!r} is a {type(value).__qualname__} with tensors in it, which DCP stores as one object")
    return archive_tail(lay_out_storages([], identity=False), [(DATA_PICKLE, structure.data_pickle())])


@dataclass
class _Template:
    """A pickled ``.metadata`` in which the places of the objects are open.

    Attributes:
        made_of: what it follows from.
        places: where the offset and the length of each object are, 8 bytes each, in the order of the objects.
    """

    made_of: object
    data: bytes
    places: Sequence[int]

    def filled(self, where: Sequence[tuple[int, int]]) -> bytes:
        """With the (offset, length) of each object."""
        data = bytearray(self.data)
        numbers = [number for place in where for number in place]
        for at, number in zip(self.places, numbers, strict=True):
            data[at : at + 8] = number.to_bytes(8, "little", signed=True)
        return bytes(data)


@dataclass
class StockFolder:
    """Makes the entries of shard 0 from which the folder becomes a stock one; keeps what follows from the structure.

    Thread: copy, but for :meth:`__init__`.

    Attributes:
        files: makes the boxes in the file of each rank, by rank.
    """

    files: Callable[[], Iterable[Boxes]]
    _template: _Template | None = field(default=None, repr=False)

    def entries(self, view: StockView, layout: StorageLayout) -> list[tuple[str, bytes]]:
        """The entries, which must be the first that follow the boxes in the file of this layout."""
        where: dict[bytes, tuple[int, int]] = {}
        at = entry_at(_OBJECTS, layout.end + len(layout.closing), 0).start
        for data in view.objects.values():
            if data not in where:  # many objects are equal: the same learning rate for each parameter
                where[data] = (at, len(data))
                at += len(data)
        made_of = (view.names, tuple(view.objects), view.paths)
        if self._template is None or self._template.made_of != made_of:
            self._template = _template(self.files(), view, made_of)
        described = self._template.filled([where[data] for data in view.objects.values()])
        return [(_OBJECTS, b"".join(where)), (IN_FOLDER + STOCK_METADATA, described)]


def _template(files: Iterable[Boxes], view: StockView, made_of: object) -> _Template:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    known: dict[tuple[int, ...], torch.Size] = {}
    lengths: dict[tuple[int, str, tuple[int, ...]], BoxArchive] = {}
    for rank, boxes in enumerate(files):
        file = shard_file(rank, replicated=False)
        archives = []
        for number, box in enumerate(boxes):
            alike = (number, box.dtype, box.sizes)
            if alike not in lengths:
                lengths[alike] = _archive(number, box)
            archives.append(lengths[alike])
        for box, archive, at in zip(boxes, archives, box_starts(archives), strict=False):
            # Equal ones are one object, which pickle writes once.
            offsets, size = (known.setdefault(numbers, torch.Size(numbers)) for numbers in (box.offsets, box.sizes))
            stored = ChunkStorageMetadata(offsets, size)
            info = _StorageInfo(file, at, archive.nbytes)
            for fqn in view.names.get(box.key, ()):
                if fqn not in tensors:
                    properties = TensorProperties(dtype=dtype_from_name(box.dtype))
                    tensors[fqn] = TensorStorageMetadata(properties, torch.Size(box.shape), [])
                chunks = tensors[fqn].chunks
                places[MetadataIndex(fqn, stored.offsets, len(chunks))] = info
                chunks.append(stored)
    # Stand-ins for offsets and lengths: numbers that take 8 bytes, as any offset may, and occur nowhere else.
    nonce = os.urandom(3) + b"\x5a"
    marks = [int.from_bytes(nonce, "little") << 32 | number for number in range(2 * len(view.objects))]
    first = shard_file(0, replicated=False)
    for number, fqn in enumerate(view.objects):
        tensors[fqn] = BytesStorageMetadata()
        places[MetadataIndex(fqn)] = _StorageInfo(first, marks[2 * number], marks[2 * number + 1])
    data = pickle.dumps(Metadata(state_dict_metadata=tensors, planner_data=view.paths, storage_data=places))
    marked = re.finditer(rb"\x8a\x08(....)" + re.escape(nonce), data, re.DOTALL)
    found = {int.from_bytes(match[1], "little"): match.start(1) for match in marked}
    return _Template(made_of, data, [found[number] for number in range(len(marks))])
