"""Reads what the shards of a step hold: tensors and objects. No torch, no unpickling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.errors import CorruptShard
from resiliency.inspection.pickle_view import Made, TensorView, as_tensor, children, read_pickle
from resiliency.storage.archive import ArchiveEntry, read_directory
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.shard_file import (
    CHUNKS,
    DATA_PICKLE,
    LEAF_PREFIX,
    RANK_STATE,
    STRUCTURE,
    Placed,
    chunks_from_json,
    storage_name,
)
from resiliency.storage.single_files import read_shard_inside
from resiliency.storage.tiers.base import Tier

__all__ = [
    "Entry",
    "ShardContents",
    "TensorRow",
    "entries",
    "read_contents",
    "stored_once",
    "tensor_rows",
    "tensors_of",
]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a step.

    Attributes:
        key: path in the state tree, parts joined by "/".
        dtype, shape, nbytes: of the whole tensor.
        shards: ranks whose shards hold it.
        boxes: number of pieces it is stored in.
        per_rank: True for a tensor of a rank's own state.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shards: tuple[int, ...]
    boxes: int
    per_rank: bool


@dataclass(frozen=True)
class Entry:
    """One branch of the state tree: its path, kind of object, the numbers of tensors and values in it, and a
    summary."""

    path: str
    kind: str
    tensors: int
    values: int
    text: str


@dataclass(frozen=True, kw_only=True)
class ShardContents:
    """What one shard holds.

    Attributes:
        rank: number of the shard.
        tree: the state, in shard 0, as :func:`~resiliency.inspection.pickle_view.read_pickle` returns it; None in other
            shards.
        leaves: in shard 0 of a sharded step: element ``i`` is the key of the tensor that ``tree`` has as storage
            ``leaf-<i>``.
        chunks: for a sharded step: the stored chunks, with the tensors they belong to.
        own: the rank's own state; None: there is none.
        entries, own_entries: entries of the archive, and of the archive inside it that holds the rank's own state.
    """

    rank: int
    tree: Any
    leaves: tuple[str, ...]
    chunks: tuple[Placed, ...]
    own: Any
    entries: Mapping[str, ArchiveEntry]
    own_entries: Mapping[str, ArchiveEntry]

    @property
    def stored_tensors(self) -> int:
        """Number of tensors stored here, whole or in part."""
        tree = () if self.chunks or self.leaves else stored_once(self.tree)
        return len(self.chunks) + sum(1 for _ in tree) + sum(1 for _ in stored_once(self.own))


def read_contents(
    tier: Tier, run: str, record: ShardRecord, *, key: str | None = None, single: bool = False
) -> ShardContents:
    """Reads the end of a shard, which describes its contents; the bytes of tensors are not read.

    Blocks: for one read of the tier.

    Args:
        key: the file to read; None: the shard in the step's folder.
        single: the file is the whole step, with the shards of ranks other than 0 as entries.

    Raises:
        CorruptShard: the shard is missing, or its end does not match the record.
        TierError: the tier cannot be read.
    """
    key = key or step_prefix(run, record.id) + record.file
    where = tier.location(key)
    start = record.sections[-1] if record.sections else 0
    try:
        if single and record.rank:
            tail = read_shard_inside(tier, key, record)[start : record.nbytes]
        else:
            tail = tier.read_range(key, start, record.nbytes)
    except FileNotFoundError:
        raise CorruptShard(f"{where} is missing", path=where) from None
    _check(tail, start, record, where)

    def read(first: int, last: int) -> bytes:
        return tail[max(0, first - start) : last - start]

    found = read_directory(read, record.nbytes, where=where)

    def entry(name: str) -> bytes | None:
        one = found.get(name)
        return None if one is None or one.at < start else read(one.start, one.end)

    try:
        return _contents(record.rank, found, entry, where)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptShard(f"{where}: its structure cannot be read ({error})", path=where) from error


def _check(tail: bytes, start: int, record: ShardRecord, where: str) -> None:
    if len(tail) != record.nbytes - start:
        raise CorruptShard(f"{where}: {start + len(tail)} bytes instead of {record.nbytes}", path=where)
    for index in record.blocks.within(start, record.nbytes):
        first, last = record.blocks.bounds(index)
        if record.digests[index] and block_digest(tail[first - start : last - start]) != record.digests[index]:
            ranges = ((first, last),)
            raise CorruptShard(f"{where}: bytes {list(ranges)} do not match their digests", path=where, ranges=ranges)


def _contents(
    rank: int, found: Mapping[str, ArchiveEntry], entry: Callable[[str], bytes | None], where: str
) -> ShardContents:
    structure, chunks, own_data = entry(STRUCTURE), entry(CHUNKS), entry(RANK_STATE)
    tree: Any = None
    own: Any = None
    leaves: tuple[str, ...] = ()
    own_entries: Mapping[str, ArchiveEntry] = {}
    if structure is not None:
        table, _, pickled = structure.partition(b"\n")
        leaves, tree = tuple(map(str, json.loads(table))), read_pickle(pickled)
    elif rank == 0:
        tree = read_pickle(entry(DATA_PICKLE) or b"")
    if own_data is not None:
        data = own_data
        own_entries = read_directory(lambda first, last: data[first:last], len(data), where=f"{where}:{RANK_STATE}")
        described = own_entries.get(DATA_PICKLE)
        own = read_pickle(data[described.start : described.end] if described is not None else b"")
    return ShardContents(
        rank=rank,
        tree=tree,
        leaves=leaves,
        chunks=tuple(chunks_from_json(chunks, found, where=where)) if chunks is not None else (),
        own=own,
        entries=found,
        own_entries=own_entries,
    )


# -- tensors --------------------------------------------------------------------------------------------------------


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, TensorView]]:
    """Yields (key, tensor) for every tensor of a tree; a tensor that occurs several times has several keys."""
    for key, item in _walk(tree, path, ()):
        tensor = as_tensor(item)
        if tensor is not None:
            yield key or "value", tensor


def _walk(item: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields (key, object) for everything in a tree, itself first; ``above``: ids of the containers it is in."""
    yield path, item
    if id(item) in above:
        return  # a container that contains itself
    for name, part in children(item):
        quoted = name.replace("%", "%25").replace("/", "%2F")
        yield from _walk(part, f"{path}/{quoted}" if path else quoted, (*above, id(item)))


def stored_once(tree: Any) -> Iterator[tuple[str, TensorView]]:
    """Yields (key, tensor) for the tensors of a tree, each tied one under its first key only."""
    seen = set()
    for key, tensor in tensors_of(tree):
        same = (tensor.storage, tensor.offset, tensor.shape, tensor.strides)
        if tensor.storage is None or same not in seen:
            seen.add(same)
            yield key, tensor


def tensor_rows(shards: Mapping[int, ShardContents]) -> list[TensorRow]:
    """All tensors of a step, largest first.

    Args:
        shards: rank -> contents of its shard.
    """
    rows = []
    pieces: dict[str, list[tuple[int, Placed]]] = {}
    for rank, shard in sorted(shards.items()):
        for placed in shard.chunks:
            pieces.setdefault(placed.chunk.key, []).append((rank, placed))
        if not shard.chunks and not shard.leaves:
            rows += [_row(key, tensor, rank, shard.entries, False) for key, tensor in stored_once(shard.tree)]
        rows += [_row(key, tensor, rank, shard.own_entries, True) for key, tensor in stored_once(shard.own)]
    for key, found in pieces.items():
        chunk = found[0][1].chunk
        nbytes = sum(placed.chunk.nbytes for _, placed in found)
        ranks = tuple(sorted({rank for rank, _ in found}))
        rows.append(TensorRow(key, chunk.dtype, chunk.shape, nbytes, ranks, len(found), False))
    return sorted(rows, key=lambda row: (-row.nbytes, row.per_rank, row.key, row.shards))


def _row(key: str, tensor: TensorView, rank: int, entries: Mapping[str, ArchiveEntry], own: bool) -> TensorRow:
    stored = entries.get(storage_name(tensor.storage)) if tensor.storage is not None else None
    nbytes = stored.nbytes if stored is not None else 0
    dtype = tensor.dtype or tensor.kind
    return TensorRow(key, dtype, tensor.shape, nbytes, (rank,), 1, own)


# -- the tree -------------------------------------------------------------------------------------------------------


def entries(tree: Any) -> list[Entry]:
    """One entry for each top-level branch of a state tree."""
    found = []
    for name, item in children(tree):
        tensors, values = _count(item)
        parts = [part for part, _ in children(item)]
        if parts:
            text = _listing(parts, _kind(item))
        else:
            text = "empty" if isinstance(item, dict | list | tuple) or _is_empty(item) else _text(item)
        found.append(Entry(name, _kind(item), tensors, values, text))
    return found


def _is_empty(item: Any) -> bool:
    return isinstance(item, Made) and item.name in ("collections.OrderedDict", "collections.defaultdict")


def _kind(item: Any) -> str:
    if isinstance(item, Made):
        tensor = as_tensor(item)
        return type(item).__name__ if tensor is None else "tensor"
    if isinstance(item, type):
        return "class"
    return "none" if item is None else type(item).__name__


def _count(tree: Any) -> tuple[int, int]:
    """(tensors, other values) in a subtree."""
    tensors = values = 0
    for _, item in _walk(tree, "", ()):
        if as_tensor(item) is not None:
            tensors += 1
        elif (
            not isinstance(item, dict | list | tuple) and not _is_empty(item) and not any(True for _ in children(item))
        ):
            values += 1
    return tensors, values


def _text(item: Any, width: int = 60) -> str:
    """A short text for something that is not a container."""
    tensor = as_tensor(item)
    if tensor is not None and (tensor.storage or "").startswith(LEAF_PREFIX):
        return "tensor"  # in a sharded step, the table of chunks describes it
    if tensor is not None:
        return f"{tensor.dtype or tensor.kind} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
    if isinstance(item, bytes | bytearray):
        return f"{len(item)} bytes"
    if isinstance(item, Made):
        given = [repr(value) for value in item.args if isinstance(value, str | int | float | bool)]
        shown = f"{item.name}({', '.join(given)})" if given and len(given) == len(item.args) else item.name
        return shown if len(shown) <= width else item.name
    text = item.name if isinstance(item, type) and issubclass(item, Made) else repr(item)
    return text if len(text) <= width else text[: width - 3] + "..."


def _listing(names: list[str], kind: str, width: int = 60) -> str:
    """As many names as fit into ``width``; for numbered items only their count."""
    if all(name.isdecimal() for name in names) and "dict" not in kind.lower():
        return "1 item" if len(names) == 1 else f"{len(names)} items"
    shown = next((n for n in range(len(names), 1, -1) if len(", ".join(names[:n])) <= width), 1)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if shown < len(names) else "")
