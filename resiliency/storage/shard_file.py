"""The shard file: a stock torch checkpoint with a few entries of our own. Pure; no torch.

A file is one zip archive (:mod:`resiliency.storage.archive`) in this order::

    resiliency/shard.json      identity of the file, JSON padded with spaces; always at the same place, IDENTITY_BYTES
                               long
    data/<key>                 the bytes of each storage; first those that the ranks of the host share
    data.pkl                   the pickled structure that torch.load reads, and what else torch wants
    resiliency/rank.pt         what only this rank has, a stock torch checkpoint too
    resiliency/structure.pkl   of a sharded step, in shard 0: the structure of the whole state
    resiliency/chunks.json     of a sharded step: which box of which tensor each storage is
    resiliency/folder/<file>   of a sharded step, in shard 0: a file that is put beside the shards when the step is
                               committed, see resiliency.storage.stock_folder

``torch.load`` ignores the entries of our own. Offsets of the storages follow from their sizes alone, so that all ranks
of a host know them without talking; what follows the storages is written by one rank.

In a sharded step each box is also a torch archive of its own, with one tensor, so that torch's distributed checkpoint
can read the file, too: the box's header and bytes are in both archives, and the rest of the small one (``data.pkl``,
its directory) lies behind them, where the large archive has a gap (:func:`lay_out_boxes`)::

    | header of data/17 | bytes | data.pkl, byteorder, version | directory of the small archive | next box ...
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from resiliency.errors import CorruptShard
from resiliency.storage.archive import (
    ALIGNMENT,
    ArchiveEntry,
    data_start,
    directory,
    directory_part,
    entry_at,
    local_header,
)
from resiliency.storage.format_version import FORMAT_VERSION, is_read, refuse_format
from resiliency.storage.step_id import StepId

__all__ = [
    "CHUNKS",
    "DATA_PICKLE",
    "IDENTITY",
    "IDENTITY_BYTES",
    "IN_FOLDER",
    "LEAF_PREFIX",
    "RANK_STATE",
    "STOCK_METADATA",
    "STRUCTURE",
    "BoxArchive",
    "Chunk",
    "Identity",
    "Placed",
    "StorageLayout",
    "archive_tail",
    "box_archive",
    "box_starts",
    "chunks_from_json",
    "chunks_to_json",
    "lay_out_boxes",
    "lay_out_storages",
    "read_identity",
    "storage_name",
]

IDENTITY = "resiliency/shard.json"
DATA_PICKLE = "data.pkl"
RANK_STATE = "resiliency/rank.pt"
STRUCTURE = "resiliency/structure.pkl"
CHUNKS = "resiliency/chunks.json"
#: Names of entries that are files beside the shards begin with this.
IN_FOLDER = "resiliency/folder/"
#: The file that torch's distributed checkpoint reads first.
STOCK_METADATA = ".metadata"
#: Keys of storages in STRUCTURE that stand for leaves begin with this.
LEAF_PREFIX = "leaf-"
#: Bytes of the first entry and its header. The storages begin after them.
IDENTITY_BYTES = 1024

_IDENTITY_START = data_start(IDENTITY, 0, 0)
_IDENTITY_ENTRY = entry_at(IDENTITY, 0, IDENTITY_BYTES - _IDENTITY_START)
#: Entries that torch.load requires beside the structure.
_STOCK_ENTRIES = (("byteorder", b"little"), ("version", b"3\n"), (".data/serialization_id", b"0" * 40))


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity that a shard file states.

    Attributes:
        id: the step.
        run: name of the run.
        rank, world_size: the number of this shard, and how many shards the step has.
        replicated: the whole state of the step is in shard 0.
        version: of the format in which the file was written.
    """

    id: StepId
    run: str
    rank: int
    world_size: int
    replicated: bool
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The first :data:`IDENTITY_BYTES` bytes of the file.

        Raises:
            ValueError: the name of the run is too long.
        """
        fields = {
            "format": "resiliency-checkpoint",
            "version": self.version,
            **self.id.to_dict(),
            "run": self.run,
            "rank": self.rank,
            "world_size": self.world_size,
            "replicated": self.replicated,
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        if len(text) > _IDENTITY_ENTRY.nbytes:
            raise ValueError(f"the name of run {self.run[:40]!r}... is too long: leave out {len(text)} bytes")
        return local_header(_IDENTITY_ENTRY) + text.ljust(_IDENTITY_ENTRY.nbytes)


def read_identity(head: bytes, *, where: str) -> Identity | None:
    """The identity in the first bytes of a file; None when the file is not one of this library's.

    Args:
        head: at least :data:`IDENTITY_BYTES` bytes of the file's beginning, unless the file is shorter.

    Raises:
        UnsupportedFormat: the file is this library's, in another version of the format.
    """
    if not head.startswith(local_header(_IDENTITY_ENTRY)):
        version = _version_of_name_file(head)
        if version is not None:
            raise refuse_format(version, where)
        return None
    try:
        data = json.loads(head[_IDENTITY_START:IDENTITY_BYTES])
        if data["format"] != "resiliency-checkpoint":
            return None
        if is_read(data["version"]):
            return Identity(
                id=StepId.from_jsonable(data),
                run=str(data["run"]),
                rank=int(data["rank"]),
                world_size=int(data["world_size"]),
                replicated=bool(data["replicated"]),
                version=data["version"],
            )
        version = data["version"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    raise refuse_format(version, where)


def _version_of_name_file(data: bytes) -> object:
    """The version in a small JSON file, which formats 1 and 2 had in place of a name; None for anything else."""
    if not data.startswith(b"{") or len(data) > IDENTITY_BYTES:
        return None
    try:
        fields = json.loads(data)
        return fields["version"] if fields["format"] == "resiliency-checkpoint" else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def storage_name(key: str) -> str:
    """Name of the entry with the bytes of storage ``key``."""
    return f"data/{key}"


@dataclass(frozen=True)
class StorageLayout:
    """Where the storages of a file are.

    Attributes:
        entries: all entries so far, in file order.
        storages: the entries of the storages.
        headers: for each storage, the bytes before its data that are not data of the storage before: its header.
        end: offset behind the last storage; what follows has no fixed place.
        closing: the bytes that follow there at once.
        slices: of a file of boxes: (offset, bytes) of each box's own archive, in file order.
    """

    entries: tuple[ArchiveEntry, ...]
    storages: tuple[ArchiveEntry, ...]
    headers: tuple[bytes, ...]
    end: int
    closing: bytes = b""
    slices: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def listed(self) -> bytes:
        """The lines of the directory for the entries so far."""
        return directory_part(self.entries)


def lay_out_storages(storages: Sequence[tuple[str, int]], *, identity: bool = True) -> StorageLayout:
    """Places storages, given as (key, bytes), in their order. The result is the same on every rank with the same input.

    Args:
        identity: leave room for :class:`Identity` before them.
    """
    at = IDENTITY_BYTES if identity else 0
    entries = []
    for key, nbytes in storages:
        entry = entry_at(storage_name(key), at, nbytes)
        entries.append(entry)
        at = entry.end
    first = (_IDENTITY_ENTRY,) if identity else ()
    return StorageLayout((*first, *entries), tuple(entries), tuple(map(local_header, entries)), at)


class BoxArchive(NamedTuple):
    """The torch archive of one box, but for the bytes of the box.

    Attributes:
        before, behind: what precedes and follows those bytes.
        nbytes: size of the archive, with them.
    """

    before: bytes
    behind: bytes
    nbytes: int


def box_archive(key: str, nbytes: int, pickled: bytes) -> BoxArchive:
    """The archive of a box of so many bytes, stored under a key; ``pickled`` describes the tensor."""
    alone = lay_out_storages([(key, nbytes)], identity=False)
    behind = archive_tail(alone, [(DATA_PICKLE, pickled)])
    return BoxArchive(alone.headers[0], behind, alone.end + len(behind))


def box_starts(archives: Iterable[BoxArchive]) -> list[int]:
    """The offset of each box's archive in a file of boxes, and behind them the offset where the next one would be."""
    starts = [IDENTITY_BYTES]
    for archive in archives:
        starts.append((starts[-1] + archive.nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
    return starts


def lay_out_boxes(boxes: Sequence[tuple[str, int]], archives: Sequence[BoxArchive]) -> StorageLayout:
    """Places the storages of boxes, given as (key, bytes), each within its own archive, in their order."""
    starts = box_starts(archives)
    entries, headers, behind = [], [], b""
    for (key, nbytes), archive, at, following in zip(boxes, archives, starts, starts[1:], strict=False):
        entries.append(entry_at(storage_name(key), at, nbytes))
        headers.append(behind + archive.before)
        behind = archive.behind + bytes(following - at - archive.nbytes)
    return StorageLayout(
        (_IDENTITY_ENTRY, *entries),
        tuple(entries),
        tuple(headers),
        entries[-1].end if entries else IDENTITY_BYTES,
        closing=behind,
        slices=tuple((at, archive.nbytes) for at, archive in zip(starts, archives, strict=False)),
    )


def archive_tail(layout: StorageLayout, entries: Sequence[tuple[str, bytes]]) -> bytes:
    """Everything that follows the storages: these entries, the other entries that torch requires, and the directory."""
    at = layout.end + len(layout.closing)
    pieces: list[bytes] = [layout.closing]
    placed = []
    for name, data in (*entries, *_STOCK_ENTRIES):
        entry = entry_at(name, at, len(data))
        pieces += [local_header(entry), data]
        placed.append(entry)
        at = entry.end
    return b"".join((*pieces, directory(placed, at, listed=layout.listed, count=len(layout.entries))))


class Chunk(NamedTuple):
    """A box of one tensor, stored in one piece in C order.

    Attributes:
        key: the tensor's key in the state.
        offsets: first index of the box in each dimension of the whole tensor.
        sizes: shape of the box.
        dtype: torch dtype name ("float32").
        itemsize: bytes per element.
        shape: shape of the whole tensor.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        total = self.itemsize
        for size in self.sizes:
            total *= size
        return total

    @property
    def whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def fits(self) -> bool:
        """True when the box is in the tensor."""
        return len(self.offsets) == len(self.sizes) == len(self.shape) and all(
            0 <= first <= first + size <= whole
            for first, size, whole in zip(self.offsets, self.sizes, self.shape, strict=True)
        )


class Placed(NamedTuple):
    """A chunk and the byte range ``[start, end)`` of the file it fills.

    Attributes:
        strides: elements between neighbours in each dimension, when the tensor is not in C order; None: C order.
        conjugated, negated: the file's elements must be conjugated, or negated, to get the tensor's, as torch stores
            lazy views.
    """

    chunk: Chunk
    start: int
    end: int
    strides: tuple[int, ...] | None = None
    conjugated: bool = False
    negated: bool = False


def chunks_to_json(chunks: Mapping[str, Chunk]) -> bytes:
    """The entry :data:`CHUNKS`, for chunks by the keys of their storages."""
    fields = ("key", "offsets", "sizes", "dtype", "itemsize", "shape")
    table = [{"storage": key, **{name: getattr(chunk, name) for name in fields}} for key, chunk in chunks.items()]
    return json.dumps(table).encode()


def chunks_from_json(data: bytes, entries: Mapping[str, ArchiveEntry], *, where: str) -> list[Placed]:
    """The chunks of a file, with their places.

    Raises:
        CorruptShard: the table is damaged.
    """
    try:
        placed = []
        for item in json.loads(data):
            chunk = Chunk(
                str(item["key"]),
                _numbers(item["offsets"]),
                _numbers(item["sizes"]),
                str(item["dtype"]),
                int(item["itemsize"]),
                _numbers(item["shape"]),
            )
            entry = entries[storage_name(str(item["storage"]))]
            if entry.nbytes != chunk.nbytes:
                raise ValueError(f"tensor {chunk.key!r} has {entry.nbytes} bytes instead of {chunk.nbytes}")
            if not chunk.fits:
                raise ValueError(
                    f"a box of {chunk.sizes} at {chunk.offsets} is not in tensor {chunk.key!r} of {chunk.shape}"
                )
            placed.append(Placed(chunk, entry.start, entry.end))
        return placed
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptShard(
            f"{where}: its table of chunks is damaged ({type(error).__name__}: {error})", path=where
        ) from error


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
