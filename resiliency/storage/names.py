"""The names of a step on a tier: which file a name is, whose it is, and how it is given and taken away. No torch.

The name of a replicated step ("step=100.ckpt") is shard 0 of the step itself: a hard link in a folder, a copy that the
store makes by itself in a bucket. So it is a stock torch checkpoint, which can be loaded, copied and uploaded as any
other. The name of a sharded step is a folder with all its shards and its manifest.
"""

from __future__ import annotations

from collections.abc import Iterable

from resiliency.errors import UnsupportedFormat
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import MANIFEST, StepRecords, shard_file
from resiliency.storage.shard_file import IDENTITY_BYTES, Identity, read_identity
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["delete_names", "give_name", "read_name"]


def read_name(tier: Tier, name: str) -> Identity | None:
    """The step whose name this is; None when there is nothing, or something else (a stock checkpoint).

    Blocks: one or two small reads.

    Raises:
        UnsupportedFormat: another version of the format wrote it.
        TierError: the tier cannot be read.
    """
    for key in (name, f"{name}/{shard_file(0)}"):
        try:
            head = tier.read_range(key, 0, IDENTITY_BYTES)
        except FileNotFoundError:
            continue
        return read_identity(head, where=f"{tier.root}/{key}")
    return None


def give_name(tier: Tier, step: StepRecords, name: str) -> None:
    """Gives a step on the tier a name, which no other step has then. Safe to repeat.

    Raises:
        TierError: the tier refused.
    """
    prefix = step_prefix(step.run, step.id)
    if step.replicated:
        tier.alias(prefix + shard_file(0), name)
        return
    files = [shard.file for shard in step.shards]
    for file in files:
        tier.alias(prefix + file, f"{name}/{file}")
    # Last, as in the step itself: a name without a manifest is being written.
    if len(files) == step.world_size:
        tier.alias(prefix + MANIFEST, f"{name}/{MANIFEST}")
    for info in list(tier.list(f"{name}/")):
        file = info.key.removeprefix(f"{name}/")
        if file != MANIFEST and file not in files and file.startswith("shard-"):
            tier.delete(info.key)  # of a larger job that had the name before


def delete_names(tier: Tier, run: str, names: Iterable[str], *, step: StepId | None = None) -> list[str]:
    """Deletes those of ``names`` that belong to a run, and returns them. Other files of that name stay.

    Args:
        step: delete a name only when it is this step's; None: any step's of the run.

    Raises:
        TierError: the tier refused.
    """
    gone = []
    for name in names:
        try:
            found = read_name(tier, name)
        except UnsupportedFormat:
            continue  # another version wrote it
        if found is None or found.run != run or step not in (None, found.id):
            continue
        if not found.replicated:
            for info in sorted(tier.list(f"{name}/"), key=lambda info: info.key != f"{name}/{MANIFEST}"):
                tier.delete(info.key)
        tier.delete(name)
        gone.append(name)
    return gone
