"""Makes shard 0 of a step hold the whole step: it adds the shards of the host's other ranks, and all records.

So a checkpoint of several ranks is one file, which can be copied elsewhere and resumed from exactly, and the run's
folder can be removed when the job has ended (:mod:`resiliency.storage.single_files`). This is done before the step is
committed, while the file has no name yet; it never changes again. Bytes are only appended and existing ones stay, so
that an unfinished addition can be cut off (:func:`cut_back`).
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from resiliency.agent._fence import Fence
from resiliency.errors import AgentError, CorruptShard
from resiliency.faultpoints import hit
from resiliency.regular_file import open_regular, opened
from resiliency.storage.catalog import StepListing, step_prefix
from resiliency.storage.file_end import NO_LOCKS
from resiliency.storage.manifest import MANIFEST, Manifest, ShardRecord, record_file
from resiliency.storage.own_record import joined_tail, tail_digests
from resiliency.storage.tiers.local import LocalTier

__all__ = ["cut_back", "join_shards"]

logger = logging.getLogger(__name__)

#: Seconds to wait for another agent that changes the same file; it takes milliseconds, unless it was stopped.
_LOCK_S = 1.0
#: Errors of file systems without locks.
#: Most bytes of per-rank data; a step with more stays in several files, because joining writes that data twice.
_MOST_BYTES = 64 << 20


def join_shards(tier: LocalTier, step: Manifest, fence: Fence) -> Manifest:
    """Appends the other shards and all records of a step to shard 0, and rewrites shard 0's record.

    Call it when all shards are recorded, and before the step is committed. Safe to repeat. Blocks: while it reads the
    ranks' own data and writes it once more.

    Returns:
        The step with the new record. The step unchanged when it cannot be one file: it is sharded, the ranks' own data
        is too large, something is damaged, or the disk is full.

    Raises:
        OSError, TierError: shard 0 cannot be opened or restored to its old size, or its record cannot be written; then
            the step must not be committed.
        AgentError: a later attempt has started.
    """
    first, *others = step.shards
    if not step.replicated or not others or not first.sections:
        return step
    if first.nbytes - first.sections[-1] + sum(other.nbytes for other in others) > _MOST_BYTES:
        return step
    with _uncommitted(tier, first, fence) as opened_file:
        return step if opened_file is None else _join(*opened_file, step, tier, fence)


@contextmanager
def _uncommitted(tier: LocalTier, record: ShardRecord, fence: Fence) -> Iterator[tuple[int, str] | None]:
    """Opens shard 0 of a step to change it: (descriptor, path), or None when another agent has committed the step, so
    that it must not change any more.

    Meanwhile no other agent changes it: one of an earlier attempt that was stopped on the way would go on after a later
    one has finished the step, and take back what that one has committed. The kernel takes the lock from a process that
    dies. No lock where the file system has none.

    Raises:
        OSError: it cannot be opened; another agent is changing it, or was stopped while it did.
        AgentError: a later attempt has started.
    """
    folder = tier.location(step_prefix(record.run, record.id).rstrip("/"))
    path = os.path.join(folder, record.file)
    fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        locks = _lock(fd, path)
        try:
            fence.check()
            yield None if os.path.lexists(os.path.join(folder, MANIFEST)) else (fd, path)
        finally:
            if locks:  # closing is not enough: a child that this process has forked meanwhile has the file open too
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _lock(fd: int, path: str) -> bool:
    """Locks a file; False where the file system has no locks. Raises OSError when another process keeps it locked."""
    deadline, pause = time.monotonic() + _LOCK_S, threading.Event()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            if error.errno != errno.EWOULDBLOCK:
                raise
            if time.monotonic() > deadline:
                why = "another agent is changing the file, or was stopped on the way"
                raise OSError(errno.EBUSY, why, path) from None
        else:
            return True
        pause.wait(0.01)  # flock cannot wait with a deadline


def _join(fd: int, path: str, step: Manifest, tier: LocalTier, fence: Fence) -> Manifest:
    first, *others = step.shards
    folder = os.path.dirname(path)
    begin = first.sections[-1]
    tail = os.pread(fd, first.nbytes - begin, begin)
    try:
        joined = joined_tail(tail, step, [_read(folder, other) for other in others], where=path)
        if joined is None:
            return step
        _append(fd, joined[len(tail) :], first.nbytes)
    except (CorruptShard, OSError) as error:
        logger.info("%s stays a step of several files: %s", folder, error)
        _cut(fd, path, first.nbytes)
        return step
    known = first.digests[: first.blocks.index_at(begin)]
    record = dataclasses.replace(first, nbytes=begin + len(joined), digests=(*known, *tail_digests(joined, first)))
    try:
        hit("agent.join.record")
        fence.check()
        key = step_prefix(step.run, step.id) + record_file(0)
        tier.put_bytes(key, json.dumps(record.to_dict()).encode())
    except BaseException:
        _cut(fd, path, first.nbytes)
        raise
    return dataclasses.replace(step, shards=(record, *others))


def _read(folder: str, record: ShardRecord) -> bytes:
    with opened(os.path.join(folder, record.file)) as file:
        return file.read()


def _append(fd: int, data: bytes, at: int) -> None:
    hit("agent.join.write")
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], at + done)


def _cut(fd: int, path: str, nbytes: int) -> None:
    """Cuts a file that nobody reads yet back to its recorded size. No process has the cut part mapped: ranks map only
    the storages.

    Raises:
        OSError: the file is shorter than recorded, or cannot be cut.
    """
    size = os.fstat(fd).st_size
    if size > nbytes:
        os.ftruncate(fd, nbytes)
    elif size < nbytes:
        raise OSError(errno.EIO, "the shard file was cut by somebody", path)


def cut_back(tier: LocalTier, listing: StepListing, fence: Fence) -> None:
    """Cuts off what a killed agent had begun to append to shard 0 of a step that it has not committed."""
    record = listing.records.get(0)
    if listing.committed or record is None or not record.replicated or not record.sections:
        return
    if listing.sizes.get(record.file, 0) <= record.nbytes:
        return
    where = tier.location(listing.key(record))
    try:
        with _uncommitted(tier, record, fence) as opened_file:
            if opened_file is None:
                return
            _cut(*opened_file, record.nbytes)
    except (OSError, AgentError) as error:
        logger.info("%s: what a killed agent had begun to add cannot be cut off: %s", where, error)
        return  # the step counts as damaged; older steps are whole
    logger.info("%s: what a killed agent had begun to add is cut off", where)
