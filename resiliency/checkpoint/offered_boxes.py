"""Decides, on rank 0, which rank writes which of the boxes that all ranks offer with their write plans. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from resiliency.errors import ConfigError
from resiliency.storage.shard_file import Chunk

__all__ = ["SharedOut", "share_out"]


@dataclass(frozen=True)
class SharedOut:
    """Who writes what.

    Attributes:
        shares: for each rank, the numbers of the boxes it writes among those it offered.
        keys: of all tensors.
        digest: hex digest of all that.
    """

    shares: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]
    digest: str


def share_out(offers: Sequence[Sequence[Chunk]]) -> SharedOut:
    """Assigns every box to one of the ranks that offer it, large boxes first, to the rank with the fewest bytes.

    Args:
        offers: the boxes of each rank, indexed by rank, ``[world_size]``.

    Raises:
        ConfigError: ranks disagree about a tensor's shape or dtype, or a tensor has holes or overlaps.
    """
    facts: dict[str, Chunk] = {}
    # A number or a list for each box, and not a list for each: garbage collection would take most of the time.
    writers: dict[Chunk, int] = {}
    others: dict[Chunk, list[int]] = {}
    for rank, offered in enumerate(offers):
        for box in offered:
            known = facts.setdefault(box.key, box)
            if known.shape != box.shape or known.dtype != box.dtype:
                raise ConfigError(
                    f"rank {rank} has tensor {box.key!r} as {box.dtype} {box.shape}, another rank as {known.dtype}"
                    f" {known.shape}; tensors that differ from rank to rank belong into per_rank"
                )
            if (all(box.sizes) or not all(box.shape)) and writers.setdefault(box, rank) != rank:
                others.setdefault(box, []).append(rank)
    _check_all_whole(facts, writers)
    loads = [0] * len(offers)
    for box in sorted(writers, key=lambda box: box.nbytes, reverse=True):
        if box in others:
            writers[box] = min(writers[box], *others[box], key=loads.__getitem__)
        loads[writers[box]] += box.nbytes
    decision = json.dumps((tuple(writers), tuple(writers.values())))
    digest = hashlib.blake2b(decision.encode(), digest_size=8).hexdigest()
    shares = tuple(tuple(_written_by(rank, offered, writers)) for rank, offered in enumerate(offers))
    return SharedOut(shares, tuple(facts), digest)


def _written_by(rank: int, offered: Sequence[Chunk], writers: dict[Chunk, int]) -> Iterator[int]:
    """The numbers of the boxes that a rank writes; takes them out of ``writers``, so that one offered twice is once."""
    for number, box in enumerate(offered):
        if writers.get(box) == rank:
            del writers[box]
            yield number


def _check_all_whole(facts: Mapping[str, Chunk], boxes: Iterable[Chunk]) -> None:
    """Checks that the boxes cover each tensor exactly. Tensors that are divided in the same way are checked once.

    Raises:
        ConfigError: there are holes or overlaps.
    """
    by_key: dict[str, list[Chunk]] = {key: [] for key in facts}
    for box in boxes:
        by_key[box.key].append(box)
    whole: set[Hashable] = set()
    for key, of_tensor in by_key.items():
        shape = facts[key].shape
        division = shape, tuple(box.offsets for box in of_tensor), tuple(box.sizes for box in of_tensor)
        if division not in whole:
            _check_whole(key, shape, of_tensor)
            whole.add(division)


def _check_whole(key: str, shape: tuple[int, ...], boxes: Sequence[Chunk]) -> None:
    """Checks that boxes cover a tensor exactly.

    Raises:
        ConfigError: there are holes or overlaps.
    """
    missing = math.prod(shape) - sum(math.prod(box.sizes) for box in boxes)
    if missing or _overlap(boxes):
        raise ConfigError(
            f"the ranks' boxes of tensor {key!r} do not make a whole tensor; they have holes or overlap:"
            f" {abs(missing)} elements too {'few' if missing >= 0 else 'many'}; each element must be in one box"
        )


def _overlap(boxes: Sequence[Chunk]) -> bool:
    """True when two boxes have an element in common. Sweeps along the dimension in which most boxes begin apart."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    dim = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    open_boxes: list[Chunk] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        open_boxes = [other for other in open_boxes if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in open_boxes:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
        open_boxes.append(box)
    return False
