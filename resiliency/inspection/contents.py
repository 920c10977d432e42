"""What is inside the shards of a step: tensors from the headers, Python objects from their JSON. No torch, no
unpickling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.errors import CorruptShard
from resiliency.storage.catalog import step_prefix
from resiliency.storage.layout import ShardHeader, header_length, parse_header
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.tensor_table import TENSOR, TENSOR_TABLE, TensorTable
from resiliency.storage.tiers.base import Tier

__all__ = [
    "Entry",
    "TensorRow",
    "branches",
    "entries",
    "pickled",
    "read_header",
    "read_objects",
    "tensor_keys",
    "tensor_rows",
]

_FIRST_READ = 64 * 1024
#: Tagged objects whose value is a list but which are listed as one value.
_LEAVES = ("complex", "range", "size", "slice", "timedelta")


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a step.

    Attributes:
        key: in the state tree, parts joined by "/".
        dtype, shape, nbytes: of the whole tensor.
        shards: ranks whose shards hold it.
        boxes: in how many pieces it is stored.
        per_rank: True for a tensor that only its rank has.
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
    """One branch of the state tree: where, what kind of object, and what it holds below itself."""

    path: str
    kind: str
    tensors: int
    values: int
    text: str


def read_header(tier: Tier, run: str, record: ShardRecord) -> ShardHeader:
    """A shard's header. Blocks: one or two reads of the tier.

    Raises:
        CorruptShard: missing, not a shard, or the shard of another step.
        TierError: the tier cannot be read.
    """
    key = step_prefix(run, record.id) + record.file
    where = f"{tier.root}/{key}"
    try:
        head = tier.read_range(key, 0, _FIRST_READ)
        length = header_length(head[:8], where=where)
        if length > len(head):
            head += tier.read_range(key, len(head), length)
    except FileNotFoundError:
        raise CorruptShard(f"{where} is missing", path=where) from None
    header = parse_header(head, where=where)
    if header.id != record.id:
        raise CorruptShard(f"{where}: holds {header.id}, not {record.id}", path=where)
    return header


def read_objects(tier: Tier, run: str, record: ShardRecord, header: ShardHeader) -> dict[str, Any]:
    """The JSON of everything in a shard that is not a tensor: ``state`` (rank 0 only), ``per_rank``.

    Raises:
        CorruptShard: not there or not JSON.
        TierError: the tier cannot be read.
    """
    key = step_prefix(run, record.id) + record.file
    try:
        data = json.loads(tier.read_range(key, *header.objects))
        return {name: data.get(name) for name in ("state", "per_rank")}
    except (FileNotFoundError, ValueError, AttributeError, KeyError, TypeError) as error:
        where = f"{tier.root}/{key}"
        raise CorruptShard(
            f"{where}: its objects cannot be read ({error})", path=where, ranges=(header.objects,)
        ) from error


def tensor_rows(headers: Mapping[int, ShardHeader]) -> list[TensorRow]:
    """All tensors of a step, largest first.

    Args:
        headers: rank -> header of its shard.
    """
    found: dict[tuple[str, int], list[tuple[int, Any]]] = {}
    for rank, header in sorted(headers.items()):
        for placed in header.placed:
            chunk = placed.chunk
            found.setdefault((chunk.key, rank if chunk.per_rank else -1), []).append((rank, chunk))
    rows = []
    for (key, owner), pieces in found.items():
        chunk = pieces[0][1]
        rows.append(
            TensorRow(
                key,
                chunk.dtype,
                chunk.shape,
                sum(piece.nbytes for _, piece in pieces),
                tuple(sorted({rank for rank, _ in pieces})),
                len(pieces),
                owner >= 0,
            )
        )
    return sorted(rows, key=lambda row: (-row.nbytes, row.per_rank, row.key, row.shards))


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    """Parts of an encoded container by the names people know them by; nothing for anything else."""
    if isinstance(item, list):
        yield from ((str(at), part) for at, part in enumerate(item))
    elif isinstance(item, dict) and "!" not in item:
        yield from item.items()
    elif isinstance(item, dict) and item["!"] == TENSOR_TABLE:
        yield from ((name, {"!": TENSOR, "key": key}) for name, key in TensorTable.from_json(item).items())
    elif isinstance(item, dict) and isinstance(item.get("value"), dict | list) and item["!"] not in _LEAVES:
        inner = item["value"]
        if isinstance(inner, list) and item["!"] == "dict":
            yield from ((_text(pair[0]), pair[1]) for pair in inner)
        else:
            yield from _children(inner)
    elif isinstance(item, dict) and item.get("!") == "pickle" and isinstance(item.get("plain"), dict | list):
        yield from _children(item["plain"])


def _text(item: Any, width: int = 60) -> str:
    """What is not a container, in words."""
    if isinstance(item, dict) and "!" in item:
        tag, value = item["!"], item.get("value")
        if tag == TENSOR:
            return f"tensor {item.get('key')}"
        if tag == "pickle":
            return f"{item.get('class')} (pickled)"
        if tag in ("ndarray", "npscalar"):
            return f"numpy {item.get('dtype')} {item.get('shape')}"
        if tag in ("bytes", "bytearray"):
            return f"{len(value or '') * 3 // 4} bytes"
        if isinstance(value, str | int | float):
            return str(value)[:width]
        return str(value)[:width] if isinstance(value, list) and len(value) < 6 else tag
    text = repr(item)
    return text if len(text) <= width else text[: width - 3] + "..."


def _kind(item: Any) -> str:
    if isinstance(item, dict):
        tag = item.get("!", "dict")
        if tag == TENSOR_TABLE:
            return "dict"
        return str(item.get("class", "object")).rpartition(".")[2] if tag == "pickle" else str(tag)
    return "none" if item is None else type(item).__name__


def _count(item: Any) -> tuple[int, int]:
    """(tensors, other values) in a subtree."""
    if isinstance(item, dict) and item.get("!") == TENSOR:
        return 1, 0
    parts = [_count(part) for _, part in _children(item)]
    if not parts:
        return 0, 0 if isinstance(item, dict | list) and "!" not in (item if isinstance(item, dict) else {}) else 1
    return sum(tensors for tensors, _ in parts), sum(values for _, values in parts)


def branches(skeleton: Any) -> dict[str, Any]:
    """The entries of a state that is a dict with names for keys; nothing for any other."""
    named = isinstance(skeleton, dict) and skeleton.get("!", TENSOR_TABLE) == TENSOR_TABLE
    return dict(_children(skeleton)) if named else {}


def entries(skeleton: Any) -> list[Entry]:
    """The top of a state tree: one entry for each of its branches."""
    found = []
    for name, item in _children(skeleton):
        tensors, values = _count(item)
        parts = list(_children(item))
        container = isinstance(item, list) or (isinstance(item, dict) and "!" not in item)
        text = _listing([part for part, _ in parts], _kind(item)) if parts else "empty" if container else _text(item)
        found.append(Entry(name, _kind(item), tensors, values, text))
    return found


def _listing(names: list[str], kind: str, width: int = 60) -> str:
    """As many names as fit; for what has numbers instead of names, how many there are."""
    if all(name.isdecimal() for name in names) and "dict" not in kind.lower():
        return "1 item" if len(names) == 1 else f"{len(names)} items"
    shown = next((n for n in range(len(names), 1, -1) if len(", ".join(names[:n])) <= width), 1)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if shown < len(names) else "")


def tensor_keys(skeleton: Any) -> set[str]:
    """Keys of all tensors a subtree refers to; tied ones may have been stored under another branch's key."""
    if isinstance(skeleton, dict) and skeleton.get("!") == TENSOR:
        return {str(skeleton["key"])}
    return set().union(*(tensor_keys(part) for _, part in _children(skeleton)))


def pickled(skeleton: Any, path: str = "") -> list[tuple[str, str, bool]]:
    """(where, class, whether a plain builtin can stand for it) of every object that was stored as a pickle."""
    found = []
    if isinstance(skeleton, dict) and skeleton.get("!") == "pickle":
        found.append((path or "the root", str(skeleton.get("class")), "plain" in skeleton))
    for name, part in _children(skeleton):
        found += pickled(part, f"{path}/{name}" if path else name)
    return found
