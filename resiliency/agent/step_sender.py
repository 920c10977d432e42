"""Sends one host's part of a committed step to a remote tier: shards, records, and after the last one the manifest.

Each block is checked against its digest while it is read, so that damage in memory or on the local disk is not
uploaded. No retries here: :mod:`resiliency.agent.uploader` decides what to send and when to try again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from resiliency import faultpoints
from resiliency.errors import CorruptShard
from resiliency.storage.blocks import new_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import MANIFEST, Manifest, ShardRecord, gather_records, record_file
from resiliency.storage.names import give_name
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["has_step", "send_step"]


def send_step(
    tier: Tier, run: str, step: StepId, records: Sequence[ShardRecord], *, world_size: int, path: Callable[[str], str]
) -> bool:
    """Sends shards and records, then the manifest and the names if no other host's record is missing.

    Safe to repeat. Two hosts that finish at the same moment both write the manifest, with the same bytes.

    Args:
        records: of this host's shards; may be empty.
        world_size: shards of the step, used when ``records`` is empty.
        path: local path of a shard file, by file name.

    Returns:
        True when the step is committed on the tier, False while other hosts are still sending.

    Raises:
        TierError: the tier failed.
        OSError: a local file cannot be read.
        CorruptShard: a local file changed after it was digested, or the records do not belong together.
    """
    prefix = step_prefix(run, step)
    for record in records:
        faultpoints.hit("agent.upload.shard", rank=record.rank)
        tier.put_file(prefix + record.file, path(record.file), check=_block_checker(record))
        faultpoints.hit("agent.upload.record", rank=record.rank)
        tier.put_bytes(prefix + record_file(record.rank), json.dumps(record.to_dict()).encode())
    # The job may have another number of ranks now than when this step was saved.
    gathered = _gather_records(tier, prefix, records, records[0].world_size if records else world_size)
    if gathered is None:
        return False
    manifest = gather_records(gathered)
    if not isinstance(manifest, Manifest):
        raise CorruptShard(f"the records of step {step.step} on {tier.root} do not belong together", path=prefix)
    faultpoints.hit("agent.upload.manifest")
    tier.put_bytes(prefix + MANIFEST, manifest.to_json().encode())
    for name in manifest.names:
        give_name(tier, manifest, name)
    faultpoints.hit("agent.upload.done")
    return True


def _gather_records(
    tier: Tier, prefix: str, records: Sequence[ShardRecord], world_size: int
) -> list[ShardRecord] | None:
    """The records of all ranks, or None while one is not on the tier yet or cannot be read."""
    known = {record.rank: record for record in records}
    for rank in range(world_size):
        if rank not in known:
            where = prefix + record_file(rank)
            try:
                known[rank] = ShardRecord.from_dict(json.loads(tier.read(where)), where=where)
            except (FileNotFoundError, CorruptShard, ValueError):
                return None
    return list(known.values())


def has_step(tier: Tier, run: str, step: StepId) -> bool:
    """True when the step is committed on the tier. Blocks: one read.

    Raises:
        TierError: the tier failed.
    """
    try:
        Manifest.from_json(tier.read(step_prefix(run, step) + MANIFEST), where=tier.root)
    except (FileNotFoundError, CorruptShard):
        return False
    return True


def _block_checker(record: ShardRecord) -> Callable[[bytes], None]:
    """A function to call with the bytes of a shard file, in order and in pieces of any size; raises when a block does
    not match its digest."""
    position = index = 0
    digest = new_digest()

    def check(piece: bytes) -> None:
        nonlocal position, index, digest
        left = memoryview(piece)
        while left:
            if index >= record.blocks.count:
                raise _changed(record, position, position + len(left))
            start, end = record.blocks.bounds(index)
            taken, left = left[: end - position], left[end - position :]
            digest.update(taken)
            position += len(taken)
            if position == end:
                if digest.hexdigest() != record.digests[index]:
                    raise _changed(record, start, end)
                index, digest = index + 1, new_digest()

    return check


def _changed(record: ShardRecord, start: int, end: int) -> CorruptShard:
    return CorruptShard(
        f"{record.file} of step {record.id.step} changed after it was digested, bytes {start} to {end}; it is not"
        " uploaded",
        path=record.file,
        ranges=((start, end),),
    )
