"""Sends one host's part of a committed step to a remote tier: shards, records, and after the last one the manifest.

Each block is compared with its digest while it is read, so that damage in memory or on the local disk is not
uploaded. No retries here: :mod:`resiliency.agent.uploader` decides what to send and when to try again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from resiliency.agent._fence import Fence
from resiliency.errors import CorruptShard
from resiliency.faultpoints import hit
from resiliency.storage.blocks import new_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import MANIFEST, Manifest, ShardRecord, gather_records, record_file
from resiliency.storage.names import give_names, missing_names
from resiliency.storage.step_id import StepId
from resiliency.storage.stock_folder import put_stock_files
from resiliency.storage.tiers.base import Tier

__all__ = ["finish_step", "has_part", "read_sent", "send_step"]


def send_step(
    tier: Tier,
    run: str,
    step: StepId,
    records: Sequence[ShardRecord],
    *,
    world_size: int,
    path: Callable[[str], str],
    fence: Fence,
    refused: Callable[[str, str], None],
) -> bool:
    """Sends shards and records, then, once the records of all hosts are on the tier, the manifest and the names.

    Safe to repeat. Two hosts that finish at the same moment both write the manifest, with the same bytes. Blocks: until
    all is sent.

    Args:
        records: of this host's shards; may be empty.
        world_size: number of shards of the step, used when ``records`` is empty.
        path: returns the local path of a shard file, given its file name.
        fence: of this attempt.
        refused: called with (name, reason) for each name that the step does not get.

    Returns:
        True when the step is committed on the tier, False while other hosts are still sending.

    Raises:
        TierError: the tier failed.
        OSError: a local file cannot be read.
        CorruptShard: a local file changed after it was digested, or the records do not belong together.
        AgentError: a later attempt has started.
    """
    prefix = step_prefix(run, step)
    for record in records:
        hit("agent.upload.shard", rank=record.rank)
        fence.check()
        check = _BlockChecker(record)
        tier.put_file(prefix + record.file, path(record.file), check=check)
        check.finish()
        hit("agent.upload.record", rank=record.rank)
        fence.check()
        tier.put_bytes(prefix + record_file(record.rank), json.dumps(record.to_dict()).encode())
    # The job may have had another number of ranks when this step was saved.
    gathered = _gather_records(tier, prefix, records, records[0].world_size if records else world_size)
    if gathered is None:
        return False
    manifest = gather_records(gathered)
    if not isinstance(manifest, Manifest):
        raise CorruptShard(f"the records of step {step.step} on {tier.root} do not belong together", path=prefix)
    hit("agent.upload.manifest")
    fence.check()
    tier.put_bytes(prefix + MANIFEST, manifest.to_json().encode())
    put_stock_files(tier, manifest, before=fence.check)
    _send_names(tier, manifest, manifest.names, fence, refused)
    return True


def finish_step(tier: Tier, manifest: Manifest, *, fence: Fence, refused: Callable[[str, str], None]) -> None:
    """Gives a step that is committed on the tier the names that it does not have yet: an agent may have been killed
    between the manifest and these. Blocks: a small read for each name, and for each that is missing a copy.

    Args:
        fence, refused: see :func:`send_step`.

    Raises:
        TierError: the tier failed.
        AgentError: a later attempt has started.
    """
    put_stock_files(tier, manifest, before=fence.check)
    missing = missing_names(tier, manifest)
    if missing:
        _send_names(tier, manifest, missing, fence, refused)


def _send_names(
    tier: Tier, manifest: Manifest, names: Iterable[str], fence: Fence, refused: Callable[[str, str], None]
) -> None:
    hit("agent.upload.name")
    for name, reason in give_names(tier, manifest, names, before_each=fence.check).items():
        refused(name, reason)
    hit("agent.upload.done")


def _gather_records(
    tier: Tier, prefix: str, records: Sequence[ShardRecord], world_size: int
) -> list[ShardRecord] | None:
    """The records of all ranks; None while one is not on the tier or cannot be read."""
    known = {record.rank: record for record in records}
    for rank in range(world_size):
        if rank not in known:
            where = prefix + record_file(rank)
            try:
                known[rank] = ShardRecord.from_json(tier.read(where), where=where)
            except (FileNotFoundError, CorruptShard):
                return None
    return list(known.values())


def has_part(tier: Tier, run: str, step: StepId, records: Sequence[ShardRecord]) -> bool:
    """True when this host has sent its part of a step, of which the parts of other hosts are still to come. Blocks: a
    small read for each record.

    Args:
        records: those that this host sends.

    Raises:
        TierError: the tier failed.
    """
    prefix = step_prefix(run, step)
    if not records or len(records) == records[0].world_size:
        return False
    try:
        for record in records:  # it is sent after its shard
            tier.read_range(prefix + record_file(record.rank), 0, 1)
    except FileNotFoundError:
        return False
    return True


def read_sent(tier: Tier, run: str, step: StepId) -> Manifest | None:
    """The manifest of a step that is committed on the tier, otherwise None. Blocks: one read.

    Raises:
        TierError: the tier failed.
    """
    try:
        key = step_prefix(run, step) + MANIFEST
        return Manifest.from_json(tier.read(key), where=tier.location(key))
    except (FileNotFoundError, CorruptShard):
        return None


class _BlockChecker:
    """Compares each block with its digest; called with the bytes of a shard file in order, in pieces of any size.

    Raises:
        CorruptShard: a block does not match.
    """

    def __init__(self, record: ShardRecord) -> None:
        self._record = record
        self._position = self._index = 0
        self._digest = new_digest()

    def __call__(self, piece: bytes | memoryview) -> None:
        left = memoryview(piece)
        blocks = self._record.blocks
        while left:
            if self._index >= blocks.count:
                raise _changed(self._record, self._position, self._position + len(left))
            start, end = blocks.bounds(self._index)
            taken, left = left[: end - self._position], left[end - self._position :]
            self._digest.update(taken)
            self._position += len(taken)
            if self._position == end:
                if self._digest.hexdigest() != self._record.digests[self._index]:
                    raise _changed(self._record, start, end)
                self._index, self._digest = self._index + 1, new_digest()

    def finish(self) -> None:
        """Call after the last piece, because a block that is cut off was not compared.

        Raises:
            CorruptShard: bytes are missing.
        """
        if self._position != self._record.nbytes:
            raise _changed(self._record, self._position, self._record.nbytes)


def _changed(record: ShardRecord, start: int, end: int) -> CorruptShard:
    return CorruptShard(
        f"{record.file} of step {record.id.step} changed after it was digested, bytes {start} to {end}; it is not"
        " uploaded",
        path=record.file,
        ranges=((start, end),),
    )
