"""The file operations of a commit: record, shard, manifest, names, fsync. Each can be repeated after a kill.

Order on the local tier: shard renamed into its step folder, record, manifest (last), name files. Then, on a durable
tier, fsync of all of it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence

from resiliency import faultpoints
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import Seal
from resiliency.errors import AgentError, CorruptShard, TierError
from resiliency.storage.blocks import BLOCK_BYTES, Blocks
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import MANIFEST, Manifest, NameFile, ShardRecord, UnfinishedStep, record_file
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import fsync_dir, fsync_file

__all__ = ["fsync_step", "place_shard", "read_records_of_others", "record_of", "take_back_shard", "write_commit"]


def record_of(config: AgentConfig, rank: int, seal: Seal) -> ShardRecord:
    """The record of a sealed shard.

    Raises:
        AgentError: the digests do not cover the file.
    """
    if seal.nbytes < 0 or len(seal.digests) != Blocks(seal.nbytes, BLOCK_BYTES).count:
        raise AgentError(
            f"rank {rank} sent {len(seal.digests)} digests for {seal.nbytes} bytes in blocks of {BLOCK_BYTES}"
        )
    return ShardRecord(
        id=seal.id,
        run=config.run,
        rank=rank,
        world_size=config.world_size,
        node=config.node,
        nbytes=seal.nbytes,
        block_bytes=BLOCK_BYTES,
        digests=seal.digests,
        plan=seal.plan,
        names=seal.names,
        supersedes=seal.supersedes,
        created=seal.created,
        info=seal.info,
        tiers=seal.tiers,
        exact=seal.exact,
    )


def place_shard(tier: Tier, record: ShardRecord, path: str, inode: int, target: str) -> None:
    """Moves a sealed shard file to ``target``, its place in the step, and writes its record.

    Raises:
        OSError, TierError: the move or the record failed; :func:`take_back_shard` undoes the move.
    """
    faultpoints.hit("agent.shard.rename", rank=record.rank)
    if _is_file(path, inode, record.nbytes):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(path, target)
    elif not _is_file(target, inode, record.nbytes):  # an agent that was killed may have moved it already
        raise FileNotFoundError(errno.ENOENT, "the sealed shard file is gone or was changed", path)
    faultpoints.hit("agent.record.write", rank=record.rank)
    key = step_prefix(record.run, record.id) + record_file(record.rank)
    tier.put_bytes(key, json.dumps(record.to_dict()).encode())


def take_back_shard(record: ShardRecord, path: str, inode: int, target: str) -> None:
    """Moves the shard file back after :func:`place_shard` failed.

    Raises:
        OSError: it cannot be moved.
    """
    if _is_file(target, inode, record.nbytes):
        os.rename(target, path)


def read_records_of_others(
    tier: Tier, run: str, step: StepId, records: dict[int, ShardRecord], world_size: int
) -> bool:
    """Adds the records that other agents wrote into the shared folder; False while one is missing."""
    prefix = step_prefix(run, step)
    for rank in range(world_size):
        if rank not in records:
            where = prefix + record_file(rank)
            try:
                records[rank] = ShardRecord.from_dict(json.loads(tier.read(where)), where=where)
            except (FileNotFoundError, TierError, CorruptShard, ValueError):
                return False
    return True


def write_commit(tier: Tier, step: Manifest | UnfinishedStep) -> None:
    """Writes the manifest, then the names. For one host's part of a step only the names: no folder has the whole step.

    Raises:
        TierError: the tier refused.
    """
    faultpoints.hit("agent.manifest.write")
    if isinstance(step, Manifest):
        tier.put_bytes(step_prefix(step.run, step.id) + MANIFEST, step.to_json().encode())
    faultpoints.hit("agent.name.write")
    for name in step.names:
        tier.put_bytes(name, NameFile(run=step.run, id=step.id).to_json().encode())


def fsync_step(root: str, folder: str, records: Sequence[ShardRecord]) -> None:
    """Makes a step durable: fsyncs these shards, their records, the manifest and the folders. Blocks: until done.

    Raises:
        OSError: the disk failed.
    """
    faultpoints.hit("agent.fsync")
    for record in records:
        fsync_file(os.path.join(folder, record.file))
        fsync_file(os.path.join(folder, record_file(record.rank)))
    manifest = os.path.join(folder, MANIFEST)
    if os.path.exists(manifest):
        fsync_file(manifest)
    for place in (folder, os.path.dirname(folder), root):
        fsync_dir(place)
    faultpoints.hit("agent.durable")


def _is_file(path: str, inode: int, nbytes: int) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return found.st_ino == inode and found.st_size == nbytes
