"""The files of a step on disk, and when a step is committed. Pure: no torch, no I/O.

Layout below a tier's root, the same on every tier::

    <root>/
      <name>.ckpt                                   a step's state under the user's name: a link to its shard 0
      .resiliency/<run>/
        steps/0000000100-a0003-7f3c9b-00/           one folder for each save: never overwritten in place
          shard-00000.shard                         a stock torch archive, see resiliency.storage.shard_file; of a
                                                    sharded step __0_0.distcp, see resiliency.storage.stock_folder
          shard-00000.json                          its record: size and digests; written after the shard
          manifest.json                             written last; commits the step
          committed.json                            instead, on a tier that each host has for itself
        files/                                      local tier only: empty shard files prepared for the next steps
        events/                                     event logs

A step is *committed* when its manifest exists; in a folder that ranks save into, also when the records of all ranks
are there, from which the manifest follows. A tier that each host has for itself holds only that host's part of a step,
and a mark that the ranks of all hosts have recorded theirs. Without the mark the step can still be restored when
records of all its shards are found. A committed step is *damaged* when one of its files is missing, too short or
unreadable; a step that is not committed is *unfinished*. Names and modification times are not used.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from resiliency.errors import CorruptShard
from resiliency.storage.blocks import Blocks
from resiliency.storage.format_version import (
    FORMAT_VERSION,
    READ_VERSIONS,
    has_stock_folders,
    is_read,
    refuse_format,
    shard_ending,
)
from resiliency.storage.json_object import json_object, reason
from resiliency.storage.step_id import StepId

__all__ = [
    "BlockShare",
    "Manifest",
    "ShardRecord",
    "StepRecords",
    "UnfinishedStep",
    "gather_records",
]

META_DIR = ".resiliency"
STEPS_DIR = "steps"
FILES_DIR = "files"
EVENTS_DIR = "events"
MANIFEST = "manifest.json"
COMMIT_MARK = "committed.json"
_SHARD_FILE = re.compile(r"shard-(\d{5,})(\.[a-z]+)")
_STOCK_SHARD_FILE = re.compile(r"__(\d+)_0\.distcp")


def shard_file(rank: int, version: int = FORMAT_VERSION, *, replicated: bool = True) -> str:
    """File name of the shard that ``rank`` wrote in a replicated or sharded step of this version of the format."""
    if not replicated and has_stock_folders(version):
        return f"__{rank}_0.distcp"
    return f"shard-{rank:05d}{shard_ending(version)}"


def rank_of_shard(file: str, versions: Iterable[int] = READ_VERSIONS) -> int | None:
    """The inverse of :func:`shard_file` for steps of these versions; None for all other files. A stock distributed
    checkpoint has files of the same names."""
    if (match := _STOCK_SHARD_FILE.fullmatch(file)) is not None:
        return int(match[1]) if any(map(has_stock_folders, versions)) else None
    match = _SHARD_FILE.fullmatch(file)
    return int(match[1]) if match is not None and match[2] in map(shard_ending, versions) else None


def record_file(rank: int) -> str:
    """File name of the record of the shard that ``rank`` wrote."""
    return f"shard-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class BlockShare:
    """Blocks of shard 0 that another rank of its host wrote.

    Attributes:
        first: number of the first block.
        digests: one per block, as in :class:`ShardRecord`.
    """

    first: int
    digests: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, "digests": list(self.digests)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BlockShare:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or has an impossible value.
        """
        first = int(data["first"])
        if first < 0:
            raise ValueError(f"block {first} cannot be")
        return cls(first=first, digests=tuple(str(digest) for digest in data["digests"]))


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The record of one shard. It is written after all bytes of the shard that its rank writes.

    In a *replicated* step shard 0 holds the whole state; the ranks of its host write it together, and each of their
    records has the digests of the blocks that its rank wrote. :func:`gather_records` combines them. The other shards
    hold only what belongs to their rank alone.

    Attributes:
        id: the step.
        run: name of the run.
        rank: writer's global rank.
        world_size: number of shards the step has.
        node: host that wrote it.
        nbytes: size of the shard file.
        block_bytes: bytes per digest.
        sections: offsets at which a new block begins, see :class:`~resiliency.storage.blocks.Blocks`.
        digests: xxh3_64 of each block, 16 hex digits each, in file order; "" for a block that another rank wrote.
        share: the blocks of shard 0 that this rank wrote; None: none.
        replicated: the whole state is in shard 0.
        plan: digest of the global plan; unless it is equal in all records of a step, the step is not committed.
        names: names by which users load the step, relative to the tier's root ("step=100.ckpt").
        supersedes: names that may be deleted once this step is committed.
        created: UTC seconds since the epoch when the save began.
        info: facts of the user for listings (epoch, monitored score); the engine does not use them.
        job: the launchers' names for the job that wrote the step, see :class:`resiliency.settings.Launch`; it tells a
            restart of that job from another one. Empty: no launcher.
        tiers: names of the remote tiers to which this save is uploaded.
        exact: False when resuming from it is not exact (for example in the middle of gradient accumulation).
        version: of the format in which the step was written, and stays.
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
    sections: tuple[int, ...] = ()
    share: BlockShare | None = None
    replicated: bool = False
    names: tuple[str, ...] = ()
    supersedes: tuple[str, ...] = ()
    created: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    exact: bool = True
    version: int = FORMAT_VERSION

    @property
    def file(self) -> str:
        return shard_file(self.rank, self.version, replicated=self.replicated)

    @property
    def blocks(self) -> Blocks:
        """The blocks of the file, each with a digest."""
        return Blocks(self.nbytes, self.block_bytes, self.sections)

    @property
    def complete(self) -> bool:
        """True when it has the digest of every block."""
        return "" not in self.digests

    def with_shares(self, others: Iterable[ShardRecord]) -> ShardRecord:
        """This record with the digests of the blocks that other ranks of the same host wrote."""
        if self.complete:
            return self
        digests = list(self.digests)
        for share in (other.share for other in others if other.node == self.node):
            if share is not None:
                for index, digest in enumerate(share.digests, share.first):
                    if index < len(digests) and not digests[index]:
                        digests[index] = digest
        return dataclasses.replace(self, digests=tuple(digests))

    def to_dict(self) -> dict[str, Any]:
        data = self._fields()
        return {**data, "check": _check(data)}

    def _fields(self) -> dict[str, Any]:
        return {
            "version": self.version,
            **self.id.to_dict(),
            "run": self.run,
            "rank": self.rank,
            "world_size": self.world_size,
            "node": self.node,
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "sections": list(self.sections),
            "digests": list(self.digests),
            "share": self.share.to_dict() if self.share is not None else None,
            "replicated": self.replicated,
            "plan": self.plan,
            "names": list(self.names),
            "supersedes": list(self.supersedes),
            "created": self.created,
            "info": dict(self.info),
            "job": dict(self.job),
            "tiers": list(self.tiers),
            "exact": self.exact,
        }

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> ShardRecord:
        """Reads the file of a record.

        Args:
            where: path for the error message.

        Raises:
            CorruptShard: not JSON, or not a record; see :meth:`from_dict`.
        """
        return cls.from_dict(json_object(text, what="a shard record", where=where), where=where)

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
                id=StepId.from_jsonable(data),
                run=str(data["run"]),
                rank=int(data["rank"]),
                world_size=int(data["world_size"]),
                node=str(data["node"]),
                nbytes=int(data["nbytes"]),
                block_bytes=int(data["block_bytes"]),
                sections=tuple(int(offset) for offset in data["sections"]),
                digests=tuple(str(d) for d in data["digests"]),
                share=None if data["share"] is None else BlockShare.from_dict(data["share"]),
                replicated=bool(data["replicated"]),
                plan=str(data["plan"]),
                names=tuple(str(n) for n in data["names"]),
                supersedes=tuple(str(n) for n in data["supersedes"]),
                created=float(data["created"]),
                info=dict(data["info"]),
                job={str(launcher): str(name) for launcher, name in data.get("job", {}).items()},
                tiers=tuple(str(n) for n in data["tiers"]),
                exact=bool(data["exact"]),
                version=int(data["version"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptShard(f"{where}: not a shard record ({reason(error)})", path=where) from error
        try:
            fits = record.blocks.count == len(record.digests)
        except ValueError:
            fits = False
        if not fits or not 0 <= record.rank < record.world_size:
            raise CorruptShard(
                f"{where}: record does not add up (rank {record.rank} of {record.world_size}, {record.nbytes} bytes,"
                f" {len(record.digests)} digests of {record.block_bytes} bytes)",
                path=where,
            )
        return record


def _check_version(version: Any, where: str) -> None:
    if not is_read(version):
        raise refuse_format(version, where)


def _check(fields: Mapping[str, Any]) -> str:
    """Check sum of a record, which protects its fields while there is no manifest."""
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True, kw_only=True)
class StepRecords:
    """Records of shards of one step, by rank. See :class:`Manifest` and :class:`UnfinishedStep`."""

    id: StepId
    run: str
    world_size: int
    shards: tuple[ShardRecord, ...]

    @property
    def version(self) -> int:
        """Version of the format in which the step was written."""
        return self.shards[0].version if self.shards else FORMAT_VERSION

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.names))

    @property
    def supersedes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.supersedes))

    @property
    def tiers(self) -> tuple[str, ...]:
        """Remote tiers the step goes to: the union over its ranks, which may differ after a failure."""
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.tiers))

    @property
    def replicated(self) -> bool:
        """True when the whole state is in shard 0."""
        return any(shard.replicated for shard in self.shards)

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
    """Some of the shards of a step: one host's part, or an unfinished save. It cannot be restored by itself."""


def part_of(step: StepRecords) -> UnfinishedStep:
    """The same records as one host's part of a step; of the hosts that it does not show, each may have its own shard
    0."""
    return UnfinishedStep(id=step.id, run=step.run, world_size=step.world_size, shards=step.shards)


def commit_mark(step: StepRecords) -> str:
    """JSON text of the mark that a step is committed, of which the folder has one host's part. What it says is for
    people: the step is committed because the mark is there."""
    return json.dumps(
        {"version": step.version, **step.id.to_dict(), "run": step.run, "world_size": step.world_size}, indent=1
    )


@dataclass(frozen=True, kw_only=True)
class Manifest(StepRecords):
    """The records of all shards of a step, by rank."""

    def __post_init__(self) -> None:
        if tuple(shard.rank for shard in self.shards) != tuple(range(self.world_size)):
            ranks = [shard.rank for shard in self.shards]
            raise ValueError(f"{self.id}: shards of ranks {ranks} do not make a step of {self.world_size}")

    def to_json(self) -> str:
        """JSON text; the same bytes for the same step, whichever agent writes it."""
        return json.dumps(
            {
                "version": self.version,
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
            CorruptShard: not JSON, not a manifest, or without some shard.
        """
        try:
            data = json_object(text, what="a manifest", where=where)
            _check_version(data["version"], where)
            shards = [ShardRecord.from_dict(item, where=where) for item in data["shards"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptShard(f"{where}: not a manifest ({reason(error)})", path=where) from error
        found = gather_records(shards)
        if not isinstance(found, Manifest) or found.version != data["version"]:
            raise CorruptShard(
                f"{where}: manifest lists {len(shards)} shards that are not all shards of one step", path=where
            )
        return found


def gather_records(records: Iterable[ShardRecord]) -> Manifest | UnfinishedStep | None:
    """Returns a :class:`Manifest` when the records of all shards are there, an :class:`UnfinishedStep` for some of
    them, and None for no records or records that do not match.

    Records match when version, run, step identity (:class:`StepId`), world size, plan digest and ``replicated`` are
    equal. A shard without the digest of some block counts as missing, because the rank that writes that block has not
    finished.
    """
    by_rank: dict[int, ShardRecord] = {}
    for record in records:
        by_rank.setdefault(record.rank, record)
    if not by_rank:
        return None
    first = next(iter(by_rank.values()))
    if len({(r.version, r.id, r.run, r.world_size, r.plan, r.replicated) for r in by_rank.values()}) != 1:
        return None
    merged = (by_rank[rank].with_shares(by_rank.values()) for rank in sorted(by_rank))
    shards = tuple(record for record in merged if record.complete)
    kind = Manifest if len(shards) == first.world_size else UnfinishedStep
    return kind(id=first.id, run=first.run, world_size=first.world_size, shards=shards)
