"""The layout of a shard file: a valid safetensors file of fixed size that can be rewritten in place.

Pure and free of torch, so that the agent and the command line can read shards too. A shard holds the chunks one rank
wrote, the rank's own tensors, and one U8 tensor ``!objects`` with the JSON of everything that is not a tensor, padded
with spaces so that the file keeps its size from step to step.

Header fields that change with each step (step, attempt) have fixed width and known offsets: a recycled file is
restamped by writing 48 bytes instead of a new header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resiliency.errors import CorruptShard
from resiliency.storage.step_id import StepId

__all__ = ["OBJECTS", "Chunk", "Placed", "ShardHeader", "ShardLayout", "make_layout", "objects_reserve", "parse_header"]

OBJECTS = "!objects"
_PAGE = 4096
_MAX_HEADER = 100 * 1024 * 1024  # what safetensors itself accepts

#: torch dtype name -> safetensors dtype and bytes per element. Others are stored as U8 with the real dtype in the
#: metadata.
SAFETENSORS_DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor.

    Attributes:
        key: the tensor's key in the state.
        offsets: first index of the box in each dimension of the whole tensor.
        sizes: shape of the box.
        dtype: torch dtype name ("float32").
        itemsize: bytes per element.
        shape: shape of the whole tensor.
        per_rank: True for a tensor of the writing rank only (RNG state); its key is unique within the shard only.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    per_rank: bool = False

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
    def name(self) -> str:
        """Name in the safetensors file, unique among the chunks of a shard; the key where possible."""
        if self.per_rank:
            return f"!rank/{self.key}"
        if not self.whole:
            return f"!box/{','.join(map(str, self.offsets))}/{self.key}"
        return f"!key/{self.key}" if self.key.startswith("!") or self.key == "__metadata__" else self.key


@dataclass(frozen=True)
class Placed:
    """A chunk and the byte range ``[start, end)`` of the file it fills."""

    chunk: Chunk
    start: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a shard file.

    Attributes:
        header: first bytes of the file, with a zero step and attempt.
        stamp_at: file offset of the stamp.
        placed: chunks in file order.
        objects: byte range of the JSON blob.
        nbytes: size of the file.
    """

    header: bytes
    stamp_at: int
    placed: tuple[Placed, ...]
    objects: tuple[int, int]
    nbytes: int


def stamp(step: StepId) -> bytes:
    """The bytes to write at ``stamp_at`` for this step; always the same length."""
    return f"{step.step:020d}.{step.attempt:010d}.{step.token:>6}.{step.serial:010d}".encode()


_EMPTY_STAMP = stamp(StepId(0, 0, "000000"))


def objects_reserve(nbytes: int) -> int:
    """Bytes to reserve for a JSON text of ``nbytes`` bytes: a quarter more, rounded up to whole pages."""
    return -(-(nbytes + nbytes // 4 + 1024) // _PAGE) * _PAGE


def make_layout(chunks: Sequence[Chunk], *, objects_nbytes: int, meta: Mapping[str, Any]) -> ShardLayout:
    """Lays out a shard.

    Args:
        chunks: the chunks; those with larger elements are placed first, so that each is aligned to its element size.
        objects_nbytes: bytes reserved for the JSON blob, see :func:`objects_reserve`.
        meta: constant fields of the header (run, rank, world_size, plan).
    """
    ordered = sorted(chunks, key=lambda c: -c.itemsize)
    entries: dict[str, Any] = {}
    details: dict[str, Any] = {}
    position = 0
    ranges: list[tuple[Chunk, int, int]] = []
    for chunk in ordered:
        end = position + chunk.nbytes
        known = SAFETENSORS_DTYPES.get(chunk.dtype)
        entries[chunk.name] = {
            "dtype": known[0] if known else "U8",
            "shape": list(chunk.sizes) if known else [chunk.nbytes],
            "data_offsets": [position, end],
        }
        if not known or chunk.name != chunk.key:
            details[chunk.name] = {
                "key": chunk.key,
                "offsets": chunk.offsets,
                "sizes": chunk.sizes,
                "shape": chunk.shape,
                "dtype": chunk.dtype,
                "itemsize": chunk.itemsize,
                "per_rank": chunk.per_rank,
            }
        ranges.append((chunk, position, end))
        position = end
    entries[OBJECTS] = {"dtype": "U8", "shape": [objects_nbytes], "data_offsets": [position, position + objects_nbytes]}
    metadata = {
        "stamp": _EMPTY_STAMP.decode(),
        "resiliency": json.dumps({**meta, "chunks": details}, separators=(",", ":")),
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    start = -(-(8 + len(text)) // _PAGE) * _PAGE
    header = struct.pack("<Q", start - 8) + text.ljust(start - 8)
    return ShardLayout(
        header=header,
        stamp_at=header.index(_EMPTY_STAMP),
        placed=tuple(Placed(chunk, start + a, start + b) for chunk, a, b in ranges),
        objects=(start + position, start + position + objects_nbytes),
        nbytes=start + position + objects_nbytes,
    )


@dataclass(frozen=True)
class ShardHeader:
    """A shard header as read from a file.

    Attributes:
        id: the step the file was stamped with.
        meta: run, rank, world_size, plan.
        placed: chunks with absolute file offsets.
        objects: byte range of the JSON blob.
    """

    id: StepId
    meta: Mapping[str, Any]
    placed: tuple[Placed, ...]
    objects: tuple[int, int]


def parse_header(head: bytes, *, where: str) -> ShardHeader:
    """Reads and checks a header.

    Args:
        head: the first bytes of the file, at least the whole header.
        where: path, for messages.

    Raises:
        CorruptShard: not a shard header.
    """
    try:
        (length,) = struct.unpack_from("<Q", head)
        if not 0 < length <= _MAX_HEADER or len(head) < 8 + length:
            raise ValueError(f"header of {length} bytes in {len(head)} bytes")
        data = json.loads(head[8 : 8 + length])
        metadata = data.pop("__metadata__")
        step, attempt, token, serial = metadata["stamp"].split(".")
        meta = json.loads(metadata["resiliency"])
        details = meta.pop("chunks")
        base = 8 + length
        begin, end = data.pop(OBJECTS)["data_offsets"]
        by_name = {st: (name, size) for name, (st, size) in SAFETENSORS_DTYPES.items()}
        placed = []
        for name, entry in data.items():
            extra = details.get(name)
            if extra is None:
                dtype, itemsize = by_name[entry["dtype"]]
                shape = tuple(entry["shape"])
                chunk = Chunk(name, (0,) * len(shape), shape, dtype, itemsize, shape)
            else:
                chunk = Chunk(
                    extra["key"],
                    tuple(extra["offsets"]),
                    tuple(extra["sizes"]),
                    extra["dtype"],
                    extra["itemsize"],
                    tuple(extra["shape"]),
                    extra["per_rank"],
                )
            a, b = entry["data_offsets"]
            if b - a != chunk.nbytes:
                raise ValueError(f"tensor {name!r} has {b - a} bytes instead of {chunk.nbytes}")
            placed.append(Placed(chunk, base + a, base + b))
        stamped = StepId(int(step), int(attempt), token.strip(), int(serial))
        return ShardHeader(stamped, meta, tuple(placed), (base + begin, base + end))
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptShard(f"{where}: not a resiliency shard ({type(error).__name__}: {error})", path=where) from error


def header_length(first8: bytes, *, where: str) -> int:
    """Length of the header in bytes, computed from the first eight bytes of a file."""
    if len(first8) < 8:
        raise CorruptShard(f"{where}: {len(first8)} bytes, too short for a shard", path=where)
    (length,) = struct.unpack("<Q", first8)
    if not 0 < length <= _MAX_HEADER:
        raise CorruptShard(f"{where}: header length {length} is not possible", path=where)
    return 8 + int(length)
