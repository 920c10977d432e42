"""Deletes a step from a tier. The agent, the uploader and ``ckpt prune`` all delete steps with this function."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable

from resiliency.errors import TierError
from resiliency.faultpoints import hit
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import COMMIT_MARK, MANIFEST
from resiliency.storage.names import delete_names
from resiliency.storage.shard_file import STOCK_METADATA
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["delete_step"]


def delete_step(
    tier: Tier,
    run: str,
    step: StepId,
    *,
    files: Iterable[str],
    names: Iterable[str],
    remove_shard: Callable[[str], None] | None = None,
    leftovers: bool = False,
    before_each: Callable[[], None] = lambda: None,
) -> list[str]:
    """Deletes a step, or one host's part of it, in an order that is safe when a kill interrupts it:

    1. the manifest, before it what stock readers look for, and the mark of one host's part. Killed after it: the step
       no longer counts as committed. The next
       deletion finds it by its records and, because the records list the names, deletes the same names;
    2. names that still point to this step; names that point to another step by now stay. Killed after it: the step has
       no name;
    3. records. Killed after the first: the step is unfinished and is never restored from. It is deleted like any
       unfinished step once a newer one is committed;
    4. shards, and all other ``files``. Killed before the last: shards without records, deleted like 3.

    Another call continues where an interrupted one ended. Blocks: one delete per file and one read per name.

    Args:
        files: names of the files in the step's folder that this caller may delete, in any order. The manifest is always
            deleted.
        names: names of the step, relative to the tier's root.
        remove_shard: called with the name of each shard file instead of deleting it, to use the file again.
        leftovers: also remove all other files in the folder, such as temp files of killed writers, which no listing
            shows. Only when no other process writes there. Without effect on object stores.
        before_each: called right before each change; when it raises, nothing further is deleted.

    Returns:
        The names that were deleted.

    Raises:
        TierError: the tier refused.
        OSError: raised by ``remove_shard``.
    """
    prefix = step_prefix(run, step)
    found = set(files)
    rest = sorted(found - {MANIFEST, COMMIT_MARK, STOCK_METADATA})
    hit("agent.prune.manifest")
    before_each()
    if STOCK_METADATA in found:
        tier.delete(prefix + STOCK_METADATA)
    tier.delete(prefix + MANIFEST)
    if COMMIT_MARK in found:
        tier.delete(prefix + COMMIT_MARK)
    before_each()
    gone = delete_names(tier, run, names, step=step)
    for file in (file for file in rest if _is_record(file)):
        hit("agent.prune.record")
        before_each()
        tier.delete(prefix + file)
    for file in (file for file in rest if not _is_record(file)):
        hit("agent.prune.shard")
        before_each()
        if remove_shard is not None:
            remove_shard(file)
        else:
            tier.delete(prefix + file)
    if tier.is_local:
        _remove_folder(tier.location(prefix.rstrip("/")), leftovers)
    return gone


def _is_record(file: str) -> bool:
    return file.endswith(".json")


def _remove_folder(folder: str, leftovers: bool) -> None:
    try:
        if leftovers:
            shutil.rmtree(folder)
        else:
            os.rmdir(folder)
    except FileNotFoundError:
        return  # deleting the last file has removed the folder already
    except OSError as error:
        if not leftovers and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            return  # the folder still has files of other hosts
        raise TierError(f"{folder} cannot be removed: {error}", retryable=False) from error
