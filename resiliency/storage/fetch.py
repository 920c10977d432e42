"""Copies a shard from another tier into the local one, checking it block by block.

A shard is written to a folder named after this process, and moved once all of it is written. So the next start can
tell the files of a killed restore (as large as shards) from those that a live process is still fetching.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import shutil
import uuid
from pathlib import Path

from resiliency.errors import CorruptShard, TierError
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import read_record, step_prefix
from resiliency.storage.manifest import META_DIR, ShardRecord, record_file
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["copy_checked", "fetch_shard", "remove_dead_fetches"]

logger = logging.getLogger(__name__)

FETCH_DIR = "fetch"


def fetch_shard(source: Tier, run: str, step: StepId, rank: int, target: Tier, *, node: str) -> ShardRecord:
    """Copies a shard and its record from a tier into the local tier, checking every block.

    Blocks: as long as the source takes; one block of the shard is in memory at a time.

    Args:
        source: the tier to read from.
        target: the local tier.
        node: host of this process.

    Returns:
        The record of the shard.

    Raises:
        CorruptShard: bytes differ from the record; nothing is left behind.
        TierError: one of the tiers failed.
    """
    record = read_record(source, run, step, rank)
    folder = Path(target.location(step_prefix(run, step)))
    scratch = Path(target.location(f"{META_DIR}/{run}/{FETCH_DIR}"), f"{node}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        scratch.mkdir(parents=True)
        folder.mkdir(parents=True, exist_ok=True)
        copy_checked(source, step_prefix(run, step) + record.file, record, scratch / record.file)
        (scratch / record_file(rank)).write_text(json.dumps(record.to_dict()))
        for name in (record.file, record_file(rank)):
            os.replace(scratch / name, folder / name)
    except OSError as error:
        raise TierError(f"shard {rank} of {step} cannot be written to {folder}: {error}", retryable=False) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return record


def copy_checked(source: Tier, key: str, record: ShardRecord, target: Path) -> None:
    """Copies a shard from a tier to a file, checking every block. Blocks: as long as the tier takes; one block is in
    memory at a time.

    Raises:
        CorruptShard: bytes differ from the record; the part that was written stays.
        TierError: the tier cannot be read.
        OSError: the file cannot be written.
    """
    with open(target, "wb") as out:
        for index, digest in enumerate(record.digests):
            start, end = record.blocks.bounds(index)
            try:
                data = source.read_range(key, start, end)
            except FileNotFoundError:
                data = b""
            if len(data) != end - start or block_digest(data) != digest:
                where = source.location(key)
                raise CorruptShard(
                    f"{where}: bytes {start} to {end} do not match their digest", path=where, ranges=((start, end),)
                )
            out.write(data)


def remove_dead_fetches(folder: str, node: str) -> int:
    """Deletes from a run's folder the fetch folders of processes of this host that have ended; returns their number."""
    removed = 0
    for fetch in Path(folder, FETCH_DIR).glob(f"{glob.escape(node)}-*"):
        pid = fetch.name.removeprefix(f"{node}-").split("-")[0]
        if not pid.isdigit() or _alive(int(pid)):
            continue
        shutil.rmtree(fetch, ignore_errors=True)
        removed += 1
        logger.info("deleted %s, left behind by a killed restore", fetch)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
