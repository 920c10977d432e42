"""What the tiers hold, which step all ranks take, and reading one shard of it.

Pure parts (:func:`choose`) decide; the rest reads files. All ranks see the same inventory, so all choose the same step;
a bad copy that any rank finds is struck out for everyone and the choice is made again.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.catalog import block_digest, scan, step_prefix
from resiliency.checkpoint.layout import Chunk, Placed, ShardHeader, header_length, parse_header
from resiliency.checkpoint.manifest import MANIFEST, ShardRecord, StepId
from resiliency.checkpoint.state import dtype_from_name
from resiliency.checkpoint.tiers.base import Tier
from resiliency.errors import CorruptShard

__all__ = ["Choice", "Holding", "ShardReader", "Strike", "choose", "holdings", "shard_reader"]


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
        self._map: mmap.mmap | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptShard(f"{path}: {error.strerror}", path=path) from error
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path, record = self.path, self.record
        if os.fstat(self._fd).st_size != record.nbytes:
            raise CorruptShard(f"{path}: {os.fstat(self._fd).st_size} bytes instead of {record.nbytes}", path=path)
        # Private and writable only so that torch accepts it without a warning; nothing is written.
        self._map = mmap.mmap(self._fd, record.nbytes, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.header: ShardHeader = parse_header(self._checked_header(), where=path)
        if (self.header.step, self.header.attempt, self.header.token) != (record.id.step, record.id.attempt, record.id.token):
            raise CorruptShard(f"{path}: holds step {self.header.step} of attempt {self.header.attempt}, not {record.id}", path=path)
        self.placed: dict[tuple[str, tuple[int, ...], bool], Placed] = {
            (p.chunk.key, p.chunk.offsets, p.chunk.per_rank): p for p in self.header.placed
        }

    def _checked_header(self) -> bytes:
        """The header, after its blocks were found good: what it says decides what else is read."""
        assert self._map is not None
        length, index = 0, 0
        while index == 0 or self.block(index)[0] < min(length, self.record.nbytes):
            start, end = self.block(index)
            if block_digest(self.view(start, end)) != self.record.digests[index]:
                raise CorruptShard(f"{self.path}: bytes {[(start, end)]} do not match their digests", path=self.path, ranges=[(start, end)])
            length = length or header_length(self._map[:8], where=self.path)
            index += 1
        return self._map[:length]

    def block(self, index: int) -> tuple[int, int]:
        """Byte range of a block."""
        return index * self.record.block_bytes, min((index + 1) * self.record.block_bytes, self.record.nbytes)

    def view(self, start: int, end: int) -> memoryview:
        """Bytes of the file, unchecked."""
        return view(self._address + start, end - start)

    def take(self, start: int, address: int, nbytes: int, digest: Any) -> None:
        """Copies bytes of the file to memory and adds them to a digest. Thread: any; without the GIL.

        By reading, not through the mapping: that costs a fault per page (on a ramdisk twice the time in all), and a disk that
        fails would end the process.

        Raises:
            OSError: the disk failed.
        """
        target = view(address, nbytes)
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [target[done:]], start + done)
            if count == 0:
                break  # it became shorter: no digest matches that
            done += count
        digest.update(target)

    def copy(self, start: int, address: int, nbytes: int) -> None:
        """Copies bytes of the file to memory."""
        ctypes.memmove(address, self._address + start, nbytes)

    def tensor(self, chunk: Chunk, placed: Placed) -> Tensor:
        """The stored chunk as a CPU tensor that aliases the mapping."""
        dtype = dtype_from_name(chunk.dtype)
        if placed.end == placed.start:
            return torch.empty(chunk.sizes, dtype=dtype)
        assert self._map is not None
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=placed.end - placed.start, offset=placed.start)
        return raw.view(dtype).view(chunk.sizes)

    def objects(self) -> Any:
        """The JSON of everything that is not a tensor."""
        start, end = self.header.objects
        return json.loads(bytes(self.view(start, end)))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # A view is still referenced (an exception's frame, say); the mapping goes with it.
            return


def shard_reader(root: str, run: str, record: ShardRecord) -> ShardReader:
    """Opens a shard of the local tier.

    Raises:
        CorruptShard: not there, of another size, or not the shard the record speaks of.
    """
    return ShardReader(os.path.join(root, step_prefix(run, record.id), record.file), record)
