"""From what the tiers hold to tensors in place: inventory, one step for all, fetch, verify, read.

Pure parts (:func:`choose`) decide; the rest reads files. All ranks see the same inventory, so all choose the same step;
a bad copy that any rank finds is struck out for everyone and the choice is made again.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.catalog import block_digest, scan, step_prefix
from resiliency.checkpoint.layout import Chunk, Placed, ShardHeader, header_length, parse_header
from resiliency.checkpoint.manifest import MANIFEST, ShardRecord, StepId
from resiliency.checkpoint.plan import Read, plan_reads
from resiliency.checkpoint.state import dtype_from_name, unflatten
from resiliency.checkpoint.tiers.base import Tier
from resiliency.errors import ConfigError, CorruptShard

__all__ = ["Choice", "Holding", "ShardReader", "Strike", "assemble", "choose", "holdings", "shard_reader"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holding:
    """What one place holds of one step.

    Attributes:
        tier: name of the tier ("local" tiers differ by node, remote ones do not).
        node: the host whose local tier it is; "" for a remote tier, which every host reaches.
        step: dirname of the step.
        world_size: shards the step has.
        ranks: writers whose shard and record lie there in full length.
        names: names of the step.
        lost: in words, what of a committed step is missing, cut or unreadable, with paths.
        exact: False when the writer said (``info["exact"]``) that resuming from it is not exact.
    """

    tier: str
    node: str
    step: str
    world_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    exact: bool = True
    lost: tuple[str, ...] = ()

    def to_list(self) -> list[Any]:
        return [self.tier, self.node, self.step, self.world_size, list(self.ranks), list(self.names), self.exact, list(self.lost)]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> Holding:
        return cls(data[0], data[1], data[2], data[3], tuple(data[4]), tuple(data[5]), bool(data[6]), tuple(data[7]))


#: A copy known to be bad: (tier, node, step dirname, rank).
Strike = tuple[str, str, str, int]


def holdings(tier: Tier, run: str, *, node: str) -> list[Holding]:
    """Lists what a tier holds of a run. Remote tiers count a step only with its manifest.

    Raises:
        TierError: the tier cannot be listed.
    """
    found = []
    for listing in scan(tier, run):
        if MANIFEST in listing.sizes and not listing.committed and (not listing.records or not node):
            # It was whole once and cannot be read now: nothing to restore from, but no reason to start from scratch either.
            found.append(Holding(tier.name, node, listing.id.dirname, 0, (), lost=tuple(listing.problems)))
            continue
        if listing.problems and not listing.committed:
            # Records are written whole or not at all, so one that cannot be read is damage, not a save cut short.
            found.append(Holding(tier.name, node, listing.id.dirname, 0, (), lost=tuple(listing.problems)))
        if not listing.records or (not node and not listing.committed):
            continue
        missing = set(listing.missing_files())
        first = next(iter(listing.records.values()))
        ranks = tuple(sorted(rank for rank, record in listing.records.items() if record.file not in missing))
        names = tuple(dict.fromkeys(name for record in listing.records.values() for name in record.names))
        exact = all(record.info.get("exact", True) for record in listing.records.values())
        prefix = f"{tier.root}/{step_prefix(run, listing.id)}"
        lost = tuple(f"{prefix}{name} is missing or cut" for name in sorted(missing)) if listing.committed else ()
        found.append(Holding(tier.name, node, listing.id.dirname, first.world_size, ranks, names, exact, lost))
    return found


@dataclass(frozen=True)
class Choice:
    """The step to restore and where each host gets each shard.

    Attributes:
        step: identity.
        world_size: number of shards.
        sources: ``sources[node][rank]`` -> names of tiers to try, the local one first.
    """

    step: StepId
    world_size: int
    sources: Mapping[str, Mapping[int, tuple[str, ...]]]


def _sources(
    places: Sequence[Holding], node: str, world_size: int, strikes: Collection[Strike]
) -> dict[int, tuple[str, ...]]:  # fmt: skip
    """Tiers from which a host can get each shard, its own first."""
    reachable = sorted((h for h in places if h.node in ("", node)), key=lambda h: h.node == "")
    return {
        rank: tuple(h.tier for h in reachable if rank in h.ranks and (h.tier, h.node, h.step, rank) not in strikes)
        for rank in range(world_size)
    }


def choose(
    inventory: Sequence[Holding], nodes: Collection[str], strikes: Collection[Strike] = (), *, only: StepId | None = None
) -> Choice | None:
    """The newest step every host can get whole. Pure: same inventory and strikes, same choice on every rank.

    Args:
        inventory: of all places.
        nodes: hosts of the job.
        strikes: copies known to be bad.
        only: consider this step alone.
    """
    by_step: dict[StepId, list[Holding]] = {}
    for holding in inventory:
        step = StepId.parse(holding.step)
        if step is not None and holding.world_size > 0 and (only is None or step == only):
            by_step.setdefault(step, []).append(holding)
    # Among saves of the same step an exact one is better than a later one (in the middle of gradient accumulation, say).
    order = sorted(by_step, key=lambda s: (s.attempt, s.step, all(h.exact for h in by_step[s]), s.token), reverse=True)
    for step in order:
        # Places can only disagree about the world size when one of them is damaged; one that is whole decides.
        for world_size in sorted({place.world_size for place in by_step[step]}, reverse=True):
            places = [place for place in by_step[step] if place.world_size == world_size]
            if len({rank for place in places for rank in place.ranks}) < world_size:
                continue
            sources = {node: _sources(places, node, world_size, strikes) for node in nodes}
            if all(tiers for shards in sources.values() for tiers in shards.values()):
                return Choice(step, world_size, sources)
    return None


class ShardReader:
    """One local shard file mapped for reading. Close after use; tensors from it must be copied before."""

    def __init__(self, path: str, record: ShardRecord) -> None:
        self.path = path
        self.record = record
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptShard(f"{path}: {error.strerror}", path=path) from error
        try:
            if os.fstat(fd).st_size != record.nbytes:
                raise CorruptShard(f"{path}: {os.fstat(fd).st_size} bytes instead of {record.nbytes}", path=path)
            # Private and writable only so that torch accepts it without a warning; nothing is written.
            self._map = mmap.mmap(fd, record.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        self.header: ShardHeader = parse_header(self._map[: header_length(self._map[:8], where=path)], where=path)
        if (self.header.step, self.header.attempt, self.header.token) != (record.id.step, record.id.attempt, record.id.token):
            raise CorruptShard(f"{path}: holds step {self.header.step} of attempt {self.header.attempt}, not {record.id}", path=path)
        self.placed: dict[tuple[str, tuple[int, ...], bool], Placed] = {
            (p.chunk.key, p.chunk.offsets, p.chunk.per_rank): p for p in self.header.placed
        }

    def check(self, first_block: int, last_block: int, *, threads: int = 1) -> list[tuple[int, int]]:
        """Byte ranges among blocks ``[first_block, last_block)`` that differ from the record. Blocks: reading them all."""
        record = self.record

        def differs(index: int) -> tuple[int, int] | None:
            start, end = index * record.block_bytes, min((index + 1) * record.block_bytes, record.nbytes)
            with view[start:end] as block:
                return None if block_digest(block) == record.digests[index] else (start, end)

        with memoryview(self._map) as view, ThreadPoolExecutor(threads, "resiliency-check") as pool:
            return [found for found in pool.map(differs, range(first_block, last_block)) if found is not None]

    def tensor(self, chunk: Chunk, placed: Placed) -> Tensor:
        """The stored chunk as a CPU tensor that aliases the mapping."""
        dtype = dtype_from_name(chunk.dtype)
        if placed.end == placed.start:
            return torch.empty(chunk.sizes, dtype=dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=placed.end - placed.start, offset=placed.start)
        return raw.view(dtype).view(chunk.sizes)

    def objects(self) -> Any:
        """The JSON of everything that is not a tensor."""
        start, end = self.header.objects
        return json.loads(self._map[start:end])

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:
            # A view is still referenced (an exception's frame, say); the mapping goes with it.
            return


def shard_reader(root: str, run: str, record: ShardRecord) -> ShardReader:
    """Opens a shard of the local tier.

    Raises:
        CorruptShard: not there, of another size, or not the shard the record speaks of.
    """
    return ShardReader(os.path.join(root, step_prefix(run, record.id), record.file), record)


def copy_reads(readers: Sequence[ShardReader], reads: Sequence[Read]) -> int:
    """Carries out reads; returns bytes copied. Blocks: the copy."""
    where = {(key, offsets): (reader, placed) for reader in readers for (key, offsets, own), placed in reader.placed.items() if not own}
    total = 0
    for read in reads:
        reader, placed = where[(read.key, read.chunk_offsets)]
        source = reader.tensor(placed.chunk, placed)
        for dim, (offset, length) in enumerate(zip(read.box_offsets, read.lengths, strict=True)):
            if offset != 0 or length != source.shape[dim]:
                source = source.narrow(dim, offset, length)
        with torch.no_grad():
            read.destination.detach().copy_(source)
        total += source.numel() * source.element_size()
    return total


def _warn_of_conversions(wanted: Mapping[str, Tensor], stored: Sequence[Chunk]) -> None:
    """A restore into another dtype is allowed, as everywhere in torch, but it is not exact, which must be said."""
    odd = sorted({(c.key, c.dtype) for c in stored if not c.per_rank and c.key in wanted and wanted[c.key].dtype != dtype_from_name(c.dtype)})
    if odd:
        (key, dtype), more = odd[0], len({name for name, _ in odd}) - 1
        logger.warning(
            "tensor %r is stored as %s and restored into %s (%d more are converted): what follows is not bit-equal to the run that saved it",
            key, dtype, wanted[key].dtype, more,
        )  # fmt: skip


def assemble(
    readers: Sequence[ShardReader], *, rank: int, into: Mapping[str, Tensor] | None = None, allow_pickle: bool = False,
    keys: Callable[[str], bool] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Puts a state together from all its shards, ``readers[i]`` being rank i's.

    Args:
        rank: whose per-rank part to return.
        into: key -> tensor to fill; None makes new CPU tensors.
        keys: with ``into=None``: load only tensors whose key passes; the others become empty tensors.

    Returns:
        The state tree and the per-rank tree (None when the step has no such rank).
    """
    stored = [p.chunk for reader in readers for p in reader.header.placed]
    wanted = into
    if wanted is not None:
        absent_keys = sorted({c.key for c in stored if not c.per_rank} - set(wanted))
        if absent_keys:
            raise ConfigError(f"the checkpoint holds tensor {absent_keys[0]!r} (and {len(absent_keys) - 1} more), which the state passed lacks")
        _warn_of_conversions(wanted, stored)
    if wanted is None:
        wanted = {
            c.key: torch.empty(c.shape, dtype=dtype_from_name(c.dtype))
            for c in stored
            if not c.per_rank and (keys is None or keys(c.key))
        }
    copy_reads(readers, plan_reads(wanted, stored))
    absent = torch.empty(0)
    lookup: Any = (lambda key: wanted.get(key, absent)) if keys is not None else wanted
    state = unflatten(readers[0].objects()["state"], lookup, allow_pickle=allow_pickle)
    if rank >= len(readers):
        return state, None
    mine = readers[rank]
    own = {p.chunk.key: mine.tensor(p.chunk, p).clone() for p in mine.header.placed if p.chunk.per_rank}
    return state, unflatten(mine.objects()["per_rank"], own, allow_pickle=allow_pickle)
