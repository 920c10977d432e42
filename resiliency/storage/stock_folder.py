"""The files that make the folder of a sharded step a stock distributed checkpoint of torch (DCP). No torch.

``.metadata`` says which box of which tensor is where in the shards, which are themselves stock ``.distcp`` files. Shard
0 holds it, and what else belongs into the folder, as entries. Whoever commits the step takes them out and puts them
beside the shards, after the manifest and ``.metadata`` last: so stock readers find no step that is not committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from resiliency.errors import CorruptShard
from resiliency.storage.archive import read_directory
from resiliency.storage.catalog import step_prefix
from resiliency.storage.format_version import has_stock_folders
from resiliency.storage.manifest import COMMIT_MARK, MANIFEST, Manifest, StepRecords, rank_of_shard
from resiliency.storage.shard_file import IN_FOLDER, STOCK_METADATA
from resiliency.storage.tiers.base import Tier

__all__ = ["files_in_shard", "has_stock_metadata", "is_stock_file", "put_stock_files", "stock_files"]

logger = logging.getLogger(__name__)


def put_stock_files(tier: Tier, step: StepRecords, *, before: Callable[[], None]) -> None:
    """Puts the stock files of a committed step into its folder. Safe to repeat. Does nothing for a replicated step, for
    one host's part of a step, and for a step of an earlier format.

    Blocks: two small reads, and a read and a write for each file.

    Args:
        before: called before anything is written; when it raises, nothing is.

    Raises:
        TierError: the tier failed.
    """
    if not _may_be_stock(step) or has_stock_metadata(tier, step):
        return
    before()
    prefix = step_prefix(step.run, step.id)
    key = prefix + step.shards[0].file
    try:
        found = files_in_shard(partial(tier.read_range, key), step.shards[0].nbytes, where=tier.location(key))
    except (CorruptShard, FileNotFoundError) as error:
        logger.warning("torch.distributed.checkpoint will not read %s: %s", tier.location(prefix.rstrip("/")), error)
        return
    for file, data in found.items():
        tier.put_bytes(prefix + file, data)


def files_in_shard(read: Callable[[int, int], bytes], nbytes: int, *, where: str) -> dict[str, bytes]:
    """The stock files that shard 0 of a sharded step holds, ``.metadata`` last: name -> bytes.

    Args:
        read: returns bytes ``[start, end)`` of the shard.
        nbytes: its size.
        where: its path, for messages.

    Raises:
        CorruptShard: the shard is damaged.
    """
    entries = read_directory(read, nbytes, where=where)
    found = {name.removeprefix(IN_FOLDER): entry for name, entry in entries.items() if name.startswith(IN_FOLDER)}
    return {file: read(found[file].start, found[file].end) for file in _metadata_last(filter(is_stock_file, found))}


def has_stock_metadata(tier: Tier, step: StepRecords) -> bool:
    """True when stock readers can load the step from its folder. Blocks: one small read.

    Raises:
        TierError: the tier failed.
    """
    if not _may_be_stock(step):
        return False
    try:
        tier.read_range(step_prefix(step.run, step.id) + STOCK_METADATA, 0, 1)
    except FileNotFoundError:
        return False
    return True


def stock_files(tier: Tier, step: StepRecords) -> list[str]:
    """Names of the stock files that are in the folder of a step, ``.metadata`` last.

    Raises:
        TierError: the tier failed.
    """
    if not _may_be_stock(step):
        return []
    prefix = step_prefix(step.run, step.id)
    return _metadata_last(filter(is_stock_file, (info.key.removeprefix(prefix) for info in tier.list(prefix))))


def is_stock_file(file: str) -> bool:
    """True for what may be a stock file in the folder of a sharded step, besides its shards."""
    ours = file in (MANIFEST, COMMIT_MARK) or file.startswith("shard-") or rank_of_shard(file) is not None
    return not ours and "/" not in file


def _may_be_stock(step: StepRecords) -> bool:
    return isinstance(step, Manifest) and not step.replicated and has_stock_folders(step.version)


def _metadata_last(files: Iterable[str]) -> list[str]:
    return sorted(files, key=lambda file: (file == STOCK_METADATA, file))
