"""Loading a checkpoint by its path, in one process, without an agent or other ranks.

For everything except resuming a fit: ``validate``, ``test``, fine-tuning from another run's files,
exporting. A path is a name file (``/ckpts/step=100.ckpt``), a step folder, or a directory with runs in it (newest
step).
"""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resiliency.checkpoint.read_plan import plan_new
from resiliency.checkpoint.shard_assembler import ShardAssembler, threads_for
from resiliency.checkpoint.shard_reader import ShardReader, shard_reader
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound
from resiliency.inspection import survey
from resiliency.storage.catalog import StepListing, find_runs, read_name, scan
from resiliency.storage.fetch import fetch_shard
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier

__all__ = ["Located", "load_path", "locate"]


@dataclass(frozen=True)
class Located:
    """A step found by its path."""

    tier: Tier
    run: str
    listing: StepListing


def locate(path: str, *, run: str | None = None) -> Located | None:
    """The committed step a path points to; None when nothing of ours is there (a stock checkpoint, or no file).

    Raises:
        NoCheckpointFound: it is ours, but the step is gone or not committed.
        ConfigError: it holds several runs; pass ``run``.
        TierError: the tier cannot be read.
    """
    try:
        target = survey.find(str(path))
    except (ConfigError, NoCheckpointFound):
        if _is_name_file(str(path)):
            raise
        return None  # a stock checkpoint, or no file: the caller decides what to do
    if target.run is None and not find_runs(target.tier):
        return None
    name, step = survey.one_step(target, run=run)
    for listing in scan(target.tier, name):
        if listing.id == step and listing.manifest is not None:
            return Located(target.tier, name, listing)
    raise NoCheckpointFound(
        f"{path}: {step} of run {name!r} is not committed; `resiliency ckpt ls {target.tier.root}` shows what is there"
    )


def _is_name_file(path: str) -> bool:
    folder, name = posixpath.split(path.rstrip("/"))
    return bool(name) and read_name(open_tier(folder or "."), name) is not None


def load_path(
    located: Located, *, rank: int = 0, allow_pickle: bool = False, keys: Callable[[str], bool] | None = None
) -> tuple[Any, Any]:
    """Reads and checks every shard of a located step. One process; remote shards go through a temporary folder.

    Args:
        rank: whose per-rank part to return.
        keys: load only tensors whose key passes; the others become empty tensors.

    Returns:
        The state tree and the per-rank tree (None when the step has no such rank).

    Raises:
        CorruptShard: names the file and the byte ranges that are bad.
        TierError: the tier cannot be read.
    """
    manifest = located.listing.manifest
    assert manifest is not None
    with tempfile.TemporaryDirectory(prefix="resiliency-") as scratch:
        root = located.tier.root
        if not located.tier.is_local:
            root = scratch
            for writer in range(manifest.world_size):
                fetch_shard(located.tier, located.run, manifest.id, writer, scratch, node="reader")
        readers: list[ShardReader] = []
        try:
            for record in manifest.shards:
                reader = shard_reader(root, located.run, record)
                readers.append(reader)
            assembly = ShardAssembler(readers, rank=rank, planner=plan_new(keys))
            for writer, bad in assembly.read(threads=threads_for(1)).items():
                path = readers[writer].path
                raise CorruptShard(f"{path}: bytes {bad} do not match their digests", path=path, ranges=bad)
            return assembly.result(allow_pickle=allow_pickle)
        finally:
            for reader in readers:
                reader.close()
