"""The file operations of a commit: record, manifest, names, fsync. Each can be repeated after a kill.

Order on the local tier: the shard, which the trainer writes into the step's folder; its record; the manifest, once all
records are there, or the mark of one host's part; names. Then, on a durable tier, fsync of all of these.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence

from resiliency.agent._fence import Fence
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import Seal, SealedFile
from resiliency.errors import AgentError, CorruptShard, TierError
from resiliency.faultpoints import hit
from resiliency.storage.blocks import Blocks
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import (
    COMMIT_MARK,
    MANIFEST,
    Manifest,
    ShardRecord,
    UnfinishedStep,
    commit_mark,
    record_file,
)
from resiliency.storage.names import give_names
from resiliency.storage.step_id import StepId
from resiliency.storage.stock_folder import is_stock_file, put_stock_files
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import fsync_dir, fsync_file

__all__ = [
    "check_in_place",
    "check_share",
    "fsync_step",
    "is_in_place",
    "read_records_of_others",
    "records_of",
    "write_commit",
    "write_mark",
    "write_names",
    "write_record",
]

logger = logging.getLogger(__name__)

_DIGEST = re.compile("[0-9a-f]{16}")


def records_of(config: AgentConfig, rank: int, seal: Seal) -> list[ShardRecord]:
    """The records of the files that a rank has sealed: its own shard, and a copy of shard 0 if it wrote one for its
    host.

    Raises:
        AgentError: a file is not this rank's, or its digests do not cover it.
    """
    shards = tuple(file.shard for file in seal.files)
    if shards != (rank,) and not (seal.replicated and shards == (0, rank)):
        raise AgentError(f"rank {rank} sealed shards {list(shards)}")
    if seal.share is not None:
        if not seal.replicated or 0 in shards or seal.share.first < 0:
            raise AgentError(f"rank {rank} sealed a share of shard 0 that cannot be its own")
        _check_digests(rank, seal.share.digests)
    records = []
    for file in seal.files:
        _check_file(rank, file, shared=seal.replicated and file.shard == 0)
        records.append(
            seal.record(file, run=config.run, node=config.node, world_size=config.world_size, own=file.shard == rank)
        )
    return records


def _check_file(rank: int, file: SealedFile, *, shared: bool) -> None:
    try:
        count = Blocks(file.nbytes, file.block_bytes, file.sections).count
    except ValueError as error:
        raise AgentError(f"rank {rank} sealed a file that cannot be: {error}") from error
    if len(file.digests) != count:
        raise AgentError(f"rank {rank} sent {len(file.digests)} digests for {file.nbytes} bytes in {count} blocks")
    # A file that ranks write together has no digest here for blocks that another rank wrote.
    _check_digests(rank, [digest for digest in file.digests if digest or not shared])


def _check_digests(rank: int, digests: Iterable[str]) -> None:
    for digest in digests:
        if not _DIGEST.fullmatch(digest):
            raise AgentError(f"rank {rank} sent {digest[:40]!r}, which is no digest of a block")


def write_record(tier: Tier, record: ShardRecord, path: str, inode: int, target: str, fence: Fence) -> None:
    """Writes the record of a sealed file; ``target`` is where in the step that file must be.

    Raises:
        OSError, TierError: the file is gone or was changed, or the record cannot be written.
        AgentError: a later attempt has started.
    """
    hit("agent.record.write", rank=record.rank)
    fence.check()
    elsewhere = path != target and os.path.realpath(path) != os.path.realpath(target)
    if elsewhere or not _is_file(target, inode):
        raise FileNotFoundError(errno.ENOENT, "the sealed shard file is gone or was changed", path)
    if not _is_file(target, inode, record.nbytes):
        # Ranks that write one file but plan differently end it at different sizes; the first to seal finds it changed.
        raise FileNotFoundError(
            errno.ENOENT,
            f"the sealed shard file is gone or was changed: it is not of {record.nbytes} bytes any more; when no other"
            " program writes here, ranks saved different sets of tensors",
            path,
        )
    key = step_prefix(record.run, record.id) + record_file(record.rank)
    tier.put_bytes(key, json.dumps(record.to_dict()).encode())


def check_share(seal: Seal, shard0: str) -> None:
    """Checks that a rank wrote its share of shard 0 into the file that is there now. Ranks open shard 0 by path; if the
    folder was exchanged meanwhile (moved, mounted over), they have written two files, neither of them whole.

    Raises:
        FileNotFoundError: the file at the path is another one.
    """
    if seal.share is not None and not _is_file(shard0, seal.share_inode):
        raise FileNotFoundError(errno.ENOENT, "the file that the ranks write together is gone or was changed", shard0)


def check_in_place(tier: Tier, step: Manifest | UnfinishedStep, ranks: Collection[int]) -> None:
    """Checks that these ranks' files of a step that is about to be committed are still there: their records may have
    been written into a folder that was exchanged since.

    Raises:
        FileNotFoundError: a file is gone, or has another size.
    """
    folder = tier.location(step_prefix(step.run, step.id).rstrip("/"))
    for record in (record for record in step.shards if record.rank in ranks):
        for file, nbytes in ((record_file(record.rank), None), (record.file, record.nbytes)):
            path = os.path.join(folder, file)
            if not os.path.isfile(path) or (nbytes is not None and os.path.getsize(path) != nbytes):
                raise FileNotFoundError(errno.ENOENT, "it was deleted or cut before the step was complete", path)


def is_in_place(tier: Tier, step: Manifest | UnfinishedStep, ranks: Collection[int]) -> bool:
    """False when the folder of a committed step no longer has its files. Blocks: for one file check, at most one per
    rank."""
    folder = tier.location(step_prefix(step.run, step.id).rstrip("/"))
    own = [record_file(record.rank) for record in step.shards if record.rank in ranks]
    return any(os.path.exists(os.path.join(folder, file)) for file in (MANIFEST, COMMIT_MARK, *own))


def read_records_of_others(
    tier: Tier, run: str, step: StepId, records: dict[int, ShardRecord], world_size: int
) -> bool:
    """Adds to ``records`` those that other agents wrote into the shared folder; False when one is missing or
    unreadable."""
    prefix = step_prefix(run, step)
    for rank in range(world_size):
        if rank not in records:
            where = prefix + record_file(rank)
            try:
                records[rank] = ShardRecord.from_json(tier.read(where), where=where)
            except (FileNotFoundError, TierError, CorruptShard):
                return False
    return True


def write_commit(
    tier: Tier, step: Manifest | UnfinishedStep, names: Iterable[str], fence: Fence, ranks: Collection[int]
) -> dict[str, str]:
    """Writes the manifest, the stock files of a sharded step, then the names; for one host's part of a step its mark
    instead of the manifest.

    Args:
        names: those to give the step.
        ranks: ranks whose part of the step is checked once more. A later attempt that ended in order has removed the
            run's folder, with its attempt number, and a manifest alone would hide the steps that it has left as single
            files.

    Returns:
        Name -> reason, for each name that the step does not get.

    Raises:
        TierError: the tier refused.
        FileNotFoundError: the step's files are gone.
        AgentError: a later attempt has started.
    """
    hit("agent.manifest.write")
    fence.check()
    check_in_place(tier, step, ranks)
    if isinstance(step, Manifest):
        tier.put_bytes(step_prefix(step.run, step.id) + MANIFEST, step.to_json().encode())
        put_stock_files(tier, step, before=fence.check)
    else:
        write_mark(tier, step)
    return write_names(tier, step, names, fence)


def write_mark(tier: Tier, step: UnfinishedStep) -> None:
    """Marks one host's part of a committed step, so that the next agent knows it for one.

    Raises:
        TierError: the tier refused.
    """
    tier.put_bytes(step_prefix(step.run, step.id) + COMMIT_MARK, commit_mark(step).encode())


def write_names(tier: Tier, step: Manifest | UnfinishedStep, names: Iterable[str], fence: Fence) -> dict[str, str]:
    """Gives a committed step names. Safe to repeat.

    Returns:
        Name -> reason, for each name that the step does not get.

    Raises:
        TierError: the tier refused.
        AgentError: a later attempt has started.
    """
    hit("agent.name.write")
    refused = give_names(tier, step, names, before_each=fence.check)
    if refused:
        fence.check()  # raises when a later attempt is the reason
    return refused


def fsync_step(root: str, folder: str, records: Sequence[ShardRecord]) -> None:
    """Makes a step durable: fsyncs these shards, their records, the manifest or mark, and the folders. Blocks: until
    done.

    Raises:
        OSError: the disk failed.
    """
    hit("agent.fsync")
    for record in records:
        fsync_file(os.path.join(folder, record.file))
        fsync_file(os.path.join(folder, record_file(record.rank)))
    for file in os.listdir(folder):
        if file in (MANIFEST, COMMIT_MARK) or is_stock_file(file):
            fsync_file(os.path.join(folder, file))
    for place in (folder, os.path.dirname(folder), root):
        fsync_dir(place)
    hit("agent.durable")


def _is_file(path: str, inode: int, nbytes: int | None = None) -> bool:
    try:
        found = os.lstat(path)  # not followed: a link is not the file that was sealed
    except FileNotFoundError:
        return False
    return found.st_ino == inode and nbytes in (None, found.st_size)
