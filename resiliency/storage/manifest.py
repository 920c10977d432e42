"""What is on disk and what complete means. Pure: no torch, no I/O.

Layout below a tier's root, the same on every tier::

    <root>/
      <name>.ckpt                                   name file: small JSON that points to a step (written after commit)
      .resiliency/<run>/
        steps/0000000100-a0003-7f3c9b-00/           one folder for each save: never overwritten in place
          shard-00000.safetensors                   one file per rank; a valid safetensors file
          shard-00000.json                          its record: size and digests; written after the shard
          manifest.json                             written last; the step exists when this does
        arena/                                      local tier only: recycled shard files waiting for their next step
        events/                                     event logs

A step is *complete* when its manifest exists, or when records of all its shards are known (the manifest of a tier
that is split over hosts is the union of what the hosts hold). Names and modification times prove nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from resiliency.errors import CorruptShard
from resiliency.storage.blocks import Blocks
from resiliency.storage.format_version import FORMAT_VERSION, refuse_format
from resiliency.storage.step_id import StepId

__all__ = [
    "Manifest",
    "NameFile",
    "ShardRecord",
    "StepRecords",
    "UnfinishedStep",
    "gather_records",
]

META_DIR = ".resiliency"
STEPS_DIR = "steps"
ARENA_DIR = "arena"
EVENTS_DIR = "events"
MANIFEST = "manifest.json"


def shard_file(rank: int) -> str:
    """File name of the shard that ``rank`` wrote."""
    return f"shard-{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    """File name of that shard's record."""
    return f"shard-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What one rank wrote of one step. Written after its bytes are final.

    Attributes:
        id: the step.
        run: name of the run.
        rank: writer's global rank.
        world_size: number of shards the step has.
        node: failure domain that wrote it.
        nbytes: size of the shard file.
        block_bytes: bytes per digest.
        digests: xxh3_64 of each block, 16 hex digits each, in file order.
        plan: digest of the global plan; equal in all records of a step, or the step is refused.
        names: names users know the step by, relative to the tier's root ("step=100.ckpt").
        supersedes: names that may be deleted once this step is committed.
        created: UTC seconds since the epoch when the save began.
        info: whatever the user wants a listing to show (epoch, monitored score); nothing in it steers anything.
        tiers: names of the slower tiers this save is to be sent to.
        exact: False when resuming from it is not exact (in the middle of gradient accumulation, say).
    """

    id: StepId
    run: str
    rank: int
    world_size: int
    node: str
    nbytes: int
    block_bytes: int
    digests: tuple[str, ...]
    plan: str
    names: tuple[str, ...] = ()
    supersedes: tuple[str, ...] = ()
    created: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    exact: bool = True

    @property
    def file(self) -> str:
        return shard_file(self.rank)

    @property
    def blocks(self) -> Blocks:
        """The parts of the file that carry a digest each."""
        return Blocks(self.nbytes, self.block_bytes)

    def to_dict(self) -> dict[str, Any]:
        data = self._fields()
        return {**data, "check": _check(data)}

    def _fields(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            **self.id.to_dict(),
            "run": self.run,
            "rank": self.rank,
            "world_size": self.world_size,
            "node": self.node,
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "digests": list(self.digests),
            "plan": self.plan,
            "names": list(self.names),
            "supersedes": list(self.supersedes),
            "created": self.created,
            "info": dict(self.info),
            "tiers": list(self.tiers),
            "exact": self.exact,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str) -> ShardRecord:
        """Reads a record; every field is checked, because the file may be anything.

        Args:
            data: parsed JSON.
            where: path for the error message.

        Raises:
            CorruptShard: a field is missing, of the wrong type, or the digests do not cover ``nbytes``.
        """
        try:
            fields = {key: value for key, value in data.items() if key != "check"}
            if data["check"] != _check(fields):
                raise CorruptShard(f"{where}: the record does not match its own check sum", path=where)
            _check_version(data["version"], where)
            record = cls(
                id=StepId.from_dict(data),
                run=str(data["run"]),
                rank=int(data["rank"]),
                world_size=int(data["world_size"]),
                node=str(data["node"]),
                nbytes=int(data["nbytes"]),
                block_bytes=int(data["block_bytes"]),
                digests=tuple(str(d) for d in data["digests"]),
                plan=str(data["plan"]),
                names=tuple(str(n) for n in data["names"]),
                supersedes=tuple(str(n) for n in data["supersedes"]),
                created=float(data["created"]),
                info=dict(data["info"]),
                tiers=tuple(str(n) for n in data["tiers"]),
                exact=bool(data["exact"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptShard(f"{where}: not a shard record ({type(error).__name__}: {error})", path=where) from error
        sized = record.nbytes >= 0 and record.block_bytes > 0
        if not sized or record.blocks.count != len(record.digests) or not 0 <= record.rank < record.world_size:
            raise CorruptShard(
                f"{where}: record does not add up (rank {record.rank} of {record.world_size}, {record.nbytes} bytes,"
                f" {len(record.digests)} digests of {record.block_bytes} bytes)",
                path=where,
            )
        return record


def _check_version(version: Any, where: str) -> None:
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise refuse_format(version, where)


def _check(fields: Mapping[str, Any]) -> str:
    """Check sum of a record: nothing else vouches for what it says about the shard."""
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True, kw_only=True)
class StepRecords:
    """Records of shards of one step, by rank. See :class:`Manifest` and :class:`UnfinishedStep`."""

    id: StepId
    run: str
    world_size: int
    shards: tuple[ShardRecord, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.names))

    @property
    def supersedes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.supersedes))

    @property
    def tiers(self) -> tuple[str, ...]:
        """Slower tiers the step goes to: every one that any rank found due, as ranks may differ after a failure."""
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.tiers))

    @property
    def exact(self) -> bool:
        return all(shard.exact for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of these shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def created(self) -> float:
        return min((shard.created for shard in self.shards), default=0.0)

    @property
    def info(self) -> Mapping[str, Any]:
        return self.shards[0].info if self.shards else {}


@dataclass(frozen=True, kw_only=True)
class UnfinishedStep(StepRecords):
    """Some shards of a step, not all: one host's part of it, or a save that was cut short. Nothing is restored from it
    alone."""


@dataclass(frozen=True, kw_only=True)
class Manifest(StepRecords):
    """A complete step: the records of all its shards, by rank."""

    def __post_init__(self) -> None:
        if tuple(shard.rank for shard in self.shards) != tuple(range(self.world_size)):
            ranks = [shard.rank for shard in self.shards]
            raise ValueError(f"{self.id}: shards of ranks {ranks} do not make a step of {self.world_size}")

    def to_json(self) -> str:
        """Deterministic: every writer of the same step writes the same bytes."""
        return json.dumps(
            {
                "version": FORMAT_VERSION,
                **self.id.to_dict(),
                "run": self.run,
                "world_size": self.world_size,
                "shards": [shard.to_dict() for shard in self.shards],
            },
            indent=1,
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Manifest:
        """Reads a manifest.

        Raises:
            CorruptShard: not JSON, not a manifest, or not complete.
        """
        try:
            data = json.loads(text)
            _check_version(data["version"], where)
            shards = [ShardRecord.from_dict(item, where=where) for item in data["shards"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptShard(f"{where}: not a manifest ({type(error).__name__}: {error})", path=where) from error
        found = gather_records(shards)
        if not isinstance(found, Manifest):
            raise CorruptShard(
                f"{where}: manifest lists {len(shards)} shards that do not make one complete step", path=where
            )
        return found


def gather_records(records: Iterable[ShardRecord]) -> Manifest | UnfinishedStep | None:
    """The step these records make: complete, or still without some shards; None when they do not belong together.

    They belong together when run, step, attempt, token, serial, world size and plan digest are equal.
    """
    by_rank: dict[int, ShardRecord] = {}
    for record in records:
        by_rank.setdefault(record.rank, record)
    if not by_rank:
        return None
    first = next(iter(by_rank.values()))
    if len({(r.id, r.run, r.world_size, r.plan) for r in by_rank.values()}) != 1:
        return None
    kind = Manifest if len(by_rank) == first.world_size else UnfinishedStep
    shards = tuple(by_rank[rank] for rank in sorted(by_rank))
    return kind(id=first.id, run=first.run, world_size=first.world_size, shards=shards)


@dataclass(frozen=True, kw_only=True)
class NameFile:
    """Content of ``<root>/<name>.ckpt``: a small JSON that tells people and us which step the name means."""

    run: str
    id: StepId

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": "resiliency-checkpoint",
                "version": FORMAT_VERSION,
                "run": self.run,
                **self.id.to_dict(),
                "at": f"{META_DIR}/{self.run}/{STEPS_DIR}/{self.id.dirname}",
                "export": "resiliency ckpt export THIS_FILE OUT.ckpt writes a stock torch/Lightning checkpoint",
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "the name file") -> NameFile | None:
        """The pointer, or None when ``text`` is something else (a stock checkpoint, say).

        Raises:
            UnsupportedFormat: a pointer that another version of the format wrote.
        """
        try:
            data = json.loads(text)
            if data["format"] != "resiliency-checkpoint":
                return None
            if data["version"] == FORMAT_VERSION:
                return cls(run=str(data["run"]), id=StepId.from_dict(data))
            version = data["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        raise refuse_format(version, where)
