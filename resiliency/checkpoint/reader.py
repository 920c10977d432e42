"""Loading a checkpoint by its path, in one process, without an agent or other ranks.

For tools and for everything outside a resumed fit: ``validate``, ``test``, fine-tuning from another run's files,
exporting. A path is a name file (``/ckpts/step=100.ckpt``), a step folder, or a directory with runs in it (newest step).
"""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resiliency.checkpoint import restore
from resiliency.checkpoint.catalog import StepListing, find_runs, read_name, scan
from resiliency.checkpoint.manifest import META_DIR, STEPS_DIR, StepId
from resiliency.checkpoint.retention import live_names
from resiliency.checkpoint.tiers import open_tier
from resiliency.checkpoint.tiers.base import Tier
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError

__all__ = ["Located", "load_path", "locate"]


@dataclass(frozen=True)
class Located:
    """A step found by its path."""

    tier: Tier
    run: str
    listing: StepListing


def _split(path: str) -> tuple[str, str]:
    """("root of the tier", "rest") of a path or URL."""
    text = str(path).rstrip("/")
    marker = f"/{META_DIR}/"
    if marker in text + "/":
        root, _, rest = (text + "/").partition(marker)
        return root, META_DIR + "/" + rest.rstrip("/")
    return posixpath.dirname(text), posixpath.basename(text)


def locate(path: str, *, run: str | None = None) -> Located | None:
    """The complete step a path means, or None when the path is not one of ours (a stock checkpoint, or nothing).

    Raises:
        NoCheckpointFound: it is ours, but the step is gone or not complete.
        TierError: the place cannot be read.
    """
    root, rest = _split(path)
    if rest.startswith(META_DIR):
        parts = rest.split("/")
        tier = open_tier(root)
        run = parts[1] if len(parts) > 1 and parts[1] else run
        step = StepId.parse(parts[3]) if len(parts) > 3 and parts[2] == STEPS_DIR else None
        return _newest(tier, run, step, path)
    tier = open_tier(root or ".")
    pointer = read_name(tier, rest) if rest else None
    if pointer is not None:
        return _newest(tier, pointer.run, pointer.id, path)
    for candidate in [run] if run else find_runs(tier):
        # The name file is a convenience written after the commit; the manifests are what counts.
        listings = scan(tier, candidate)
        names = live_names([listing.manifest for listing in listings if listing.manifest is not None])
        if rest in names and not _exists(tier, rest):
            return _newest(tier, candidate, names[rest], path)
    directory = open_tier(str(path))
    if find_runs(directory):
        return _newest(directory, run, None, path)
    return None


def _exists(tier: Tier, key: str) -> bool:
    try:
        tier.read_range(key, 0, 1)
    except (FileNotFoundError, TierError):
        return False
    return True


def _newest(tier: Tier, run: str | None, step: StepId | None, path: str) -> Located:
    runs = [run] if run else find_runs(tier)
    found: list[tuple[StepId, Located]] = []
    for candidate in runs:
        for listing in scan(tier, candidate):
            if listing.manifest is not None and step in (None, listing.id):
                found.append((listing.id, Located(tier, candidate, listing)))
    if not found:
        wanted = f"{step} of run {run!r}" if step else f"a complete step of run(s) {runs}"
        raise NoCheckpointFound(f"{path}: {wanted} is not on {tier.root}; `resiliency ckpt ls {tier.root}` shows what is")
    if step is None and len({located.run for _, located in found}) > 1:
        raise ConfigError(f"{path} holds several runs ({', '.join(runs)}); name one: {path}/{META_DIR}/RUN")
    return max(found, key=lambda item: item[0])[1]


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
        TierError: the place cannot be read.
    """
    manifest = located.listing.manifest
    assert manifest is not None
    with tempfile.TemporaryDirectory(prefix="resiliency-") as scratch:
        root = located.tier.root
        if not located.tier.is_local:
            root = scratch
            for writer in range(manifest.world_size):
                restore.fetch_shard(located.tier, located.run, manifest.id, writer, scratch)
        readers: list[restore.ShardReader] = []
        try:
            for record in manifest.shards:
                reader = restore.shard_reader(root, located.run, record)
                readers.append(reader)
                bad = reader.check(0, len(record.digests))
                if bad:
                    raise CorruptShard(f"{reader.path}: bytes {bad} do not match their digests", path=reader.path, ranges=bad)
            return restore.assemble(readers, rank=rank, allow_pickle=allow_pickle, keys=keys)
        finally:
            for reader in readers:
                reader.close()
