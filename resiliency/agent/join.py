"""Makes shard 0 of a step hold the whole step: the shards of the host's other ranks, and the records of all.

So a checkpoint of several ranks is one file too, which can be copied elsewhere and resumed from exactly, and the run's
folder can go when the job has ended (:mod:`resiliency.storage.single_files`). It is done before the step is committed:
nobody has the file under a name yet, and it never changes again. Bytes are only added behind its end; what was there
stays, so that a file that was being added to can be cut back (:func:`cut_back`).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os

from resiliency import faultpoints
from resiliency.agent._fence import Fence
from resiliency.errors import CorruptShard
from resiliency.regular_file import open_regular, opened
from resiliency.storage.catalog import StepListing, step_prefix
from resiliency.storage.manifest import MANIFEST, Manifest, ShardRecord, record_file
from resiliency.storage.own_record import joined_tail, tail_digests
from resiliency.storage.tiers.local import LocalTier

__all__ = ["cut_back", "join_shards"]

logger = logging.getLogger(__name__)

#: Steps whose ranks have more than this for themselves, in bytes, stay in several files: they would be written twice.
_MOST_BYTES = 64 << 20


def join_shards(tier: LocalTier, step: Manifest, fence: Fence) -> Manifest:
    """Adds the other shards and the records of a step to shard 0, whose record is written anew.

    Call it when all shards are recorded, and before the step is committed. Safe to repeat. Blocks: for reading what
    the ranks have for themselves, and for writing it once more.

    Returns:
        The step with the new record; as it was when it cannot be one file: it is sharded, or its ranks have too much
        for themselves, or something is damaged, or the disk is full.

    Raises:
        OSError, TierError: shard 0 cannot be opened or is not as it was any more, or its record cannot be written; then
            the step must not be committed.
        AgentError: a later attempt has started.
    """
    first, *others = step.shards
    if not step.replicated or not others or not first.sections:
        return step
    if first.nbytes - first.sections[-1] + sum(other.nbytes for other in others) > _MOST_BYTES:
        return step
    folder = os.path.join(tier.root, step_prefix(step.run, step.id))
    path = os.path.join(folder, first.file)
    fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        begin = first.sections[-1]
        tail = os.pread(fd, first.nbytes - begin, begin)
        try:
            joined = joined_tail(tail, step, [_read(folder, other) for other in others], where=path)
            if joined is None:
                return step
            fence.check()
            if os.path.lexists(os.path.join(folder, MANIFEST)):
                return step  # another agent has committed it meanwhile: the file is what it is
            _append(fd, joined[len(tail) :], first.nbytes)
        except (CorruptShard, OSError) as error:
            logger.info("%s stays a step of several files: %s", folder, error)
            _cut(fd, path, first.nbytes)
            return step
        known = first.digests[: first.blocks.index_at(begin)]
        record = dataclasses.replace(first, nbytes=begin + len(joined), digests=(*known, *tail_digests(joined, first)))
        try:
            faultpoints.hit("agent.join.record")
            fence.check()
            key = step_prefix(step.run, step.id) + record_file(0)
            tier.put_bytes(key, json.dumps(record.to_dict()).encode())
        except BaseException:
            _cut(fd, path, first.nbytes)
            raise
    finally:
        os.close(fd)
    return dataclasses.replace(step, shards=(record, *others))


def _read(folder: str, record: ShardRecord) -> bytes:
    with opened(os.path.join(folder, record.file)) as file:
        return file.read()


def _append(fd: int, data: bytes, at: int) -> None:
    faultpoints.hit("agent.join.write")
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], at + done)


def _cut(fd: int, path: str, nbytes: int) -> None:
    """Cuts a file that nobody reads yet. Nobody has mapped what is cut: the ranks map the storages.

    Raises:
        OSError: it is as long as it was, and is not what its record says.
    """
    size = os.fstat(fd).st_size
    if size > nbytes:
        os.ftruncate(fd, nbytes)
    elif size < nbytes:
        raise OSError(errno.EIO, "the shard file was cut by somebody", path)


def cut_back(tier: LocalTier, listing: StepListing) -> None:
    """Undoes what a killed agent had begun to add to shard 0 of a step that it has not committed."""
    record = listing.records.get(0)
    if listing.committed or record is None or not record.replicated or not record.sections:
        return
    if listing.sizes.get(record.file, 0) <= record.nbytes:
        return
    path = os.path.join(tier.root, step_prefix(record.run, listing.id), record.file)
    try:
        fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _cut(fd, path, record.nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        logger.info("%s: what a killed agent had begun to add cannot be cut off: %s", path, error)
        return  # the step counts as damaged, older ones are whole
    logger.info("%s: what a killed agent had begun to add is cut off", path)
