"""The blocks of a shard file: their number, their byte ranges and their digests. Pure; no torch.

A record has one digest per block, so that damage can be located, a part of a file can be checked, and several ranks
and threads can share the work. A file may have sections, which different ranks write at different times: no block
crosses the end of a section.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

__all__ = ["BLOCK_BYTES", "Blocks", "block_digest", "new_digest"]

#: Bytes covered by one digest in shards written now (the last block of a section may be shorter). Readers use the value
#: in the record.
BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Blocks:
    """A file of ``nbytes`` bytes, divided into blocks of ``block_bytes``.

    Attributes:
        sections: offsets in the file, ascending, at which a new section and so a new block begins.

    Raises:
        ValueError: a negative size, ``block_bytes`` below 1, or sections that are not ascending offsets of the file.
    """

    nbytes: int
    block_bytes: int
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.block_bytes < 1:
            raise ValueError(f"{self.nbytes} bytes cannot be cut into blocks of {self.block_bytes}")
        edges = (0, *self.sections, self.nbytes)
        if self.sections and any(before >= after for before, after in zip(edges, edges[1:], strict=False)):
            raise ValueError(f"sections at {self.sections} do not divide a file of {self.nbytes} bytes")

    @functools.cached_property
    def _starts(self) -> Sequence[int]:
        """Offset of the first byte of each block."""
        edges = (0, *self.sections, self.nbytes)
        return [
            start
            for first, last in zip(edges, edges[1:], strict=False)
            for start in range(first, last, self.block_bytes)
        ]

    @property
    def count(self) -> int:
        """Number of blocks; 0 for an empty file."""
        if self.sections:
            return len(self._starts)
        return -(-self.nbytes // self.block_bytes)

    def bounds(self, index: int) -> tuple[int, int]:
        """Byte range ``[start, end)`` of a block."""
        if not self.sections:
            return index * self.block_bytes, min((index + 1) * self.block_bytes, self.nbytes)
        starts = self._starts
        return starts[index], starts[index + 1] if index + 1 < len(starts) else self.nbytes

    def index_at(self, offset: int) -> int:
        """Number of the block that contains the byte at ``offset``."""
        return bisect.bisect_right(self._starts, offset) - 1 if self.sections else offset // self.block_bytes

    def within(self, start: int, end: int) -> range:
        """Numbers of the blocks that overlap bytes ``[start, end)``; none for an empty range."""
        return range(self.index_at(start), self.index_at(end - 1) + 1) if end > start else range(0)


def block_digest(data: bytes | memoryview) -> str:
    """Digest of one block: xxh3_64, 16 hex digits. Not cryptographic: it detects damage, not tampering."""
    return xxhash.xxh3_64_hexdigest(data)


def new_digest() -> xxhash.xxh3_64:
    """The same digest, computed in pieces: call ``update`` for each, then ``hexdigest``."""
    return xxhash.xxh3_64()
