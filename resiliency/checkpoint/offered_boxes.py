"""Decides, on rank 0, which rank writes which of the boxes that all ranks offer with their write plans. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from resiliency.checkpoint.rank_messages import OfferedBox
from resiliency.errors import ConfigError
from resiliency.state.tree import dtype_from_name

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


def share_out(offers: Sequence[Sequence[OfferedBox]]) -> SharedOut:
    """Assigns every box to one of the ranks that offer it, large boxes first, to the rank with the fewest bytes.

    Args:
        offers: the boxes of each rank, indexed by rank, ``[world_size]``.

    Raises:
        ConfigError: ranks disagree about a tensor's shape or dtype, or a tensor has holes or overlaps.
    """
    facts: dict[str, OfferedBox] = {}
    holders: dict[OfferedBox, list[tuple[int, int]]] = {}
    for rank, offered in enumerate(offers):
        for number, box in enumerate(offered):
            known = facts.setdefault(box.key, box)
            if (known.shape, known.dtype) != (box.shape, box.dtype):
                raise ConfigError(
                    f"rank {rank} has tensor {box.key!r} as {box.dtype} {box.shape}, another rank as {known.dtype}"
                    f" {known.shape}; tensors that differ from rank to rank belong into per_rank"
                )
            if all(box.sizes) or not all(box.shape):
                holders.setdefault(box, []).append((rank, number))
    by_key: dict[str, list[OfferedBox]] = {key: [] for key in facts}
    for box in holders:
        by_key[box.key].append(box)
    for key, boxes in by_key.items():
        _check_whole(key, facts[key].shape, boxes)
    loads = [0] * len(offers)
    shares: list[list[int]] = [[] for _ in offers]
    digest = hashlib.blake2b(digest_size=8)
    for box in sorted(holders, key=_nbytes, reverse=True):
        rank, number = min(holders[box], key=lambda holder: loads[holder[0]])
        loads[rank] += _nbytes(box)
        shares[rank].append(number)
        digest.update(repr((rank, box)).encode())
    return SharedOut(tuple(map(tuple, shares)), tuple(facts), digest.hexdigest())


def _nbytes(box: OfferedBox) -> int:
    return math.prod(box.sizes) * dtype_from_name(box.dtype).itemsize


def _check_whole(key: str, shape: tuple[int, ...], boxes: Sequence[OfferedBox]) -> None:
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


def _overlap(boxes: Sequence[OfferedBox]) -> bool:
    """True when two boxes have an element in common. Sweeps along the dimension in which most boxes begin apart."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    dim = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    open_boxes: list[OfferedBox] = []
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
