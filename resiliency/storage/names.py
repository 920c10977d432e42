"""The names of a step on a tier: which file a name is, which step it points to, how it is given and deleted. No torch.

The name of a replicated step ("step=100.ckpt") is shard 0 of the step itself: a hard link in a folder, a copy that the
store makes by itself in a bucket. So it is a stock torch checkpoint, which can be loaded, copied and uploaded like any
other. The name of a sharded step is a folder with all its shards, its manifest, and what makes it a stock distributed
checkpoint (:mod:`resiliency.storage.stock_folder`).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from resiliency.errors import TierError, UnsupportedFormat
from resiliency.storage.catalog import step_prefix
from resiliency.storage.change_times import newer_than_before
from resiliency.storage.known_files import recall
from resiliency.storage.manifest import MANIFEST, StepRecords, rank_of_shard, record_file, shard_file
from resiliency.storage.shard_file import IDENTITY_BYTES, STOCK_METADATA, Identity, read_identity
from resiliency.storage.step_id import StepId
from resiliency.storage.stock_folder import has_stock_metadata, stock_files
from resiliency.storage.tiers._keys import partial_name
from resiliency.storage.tiers.base import ObjectInfo, Tier
from resiliency.storage.tiers.local import LocalTier

__all__ = [
    "delete_names",
    "first_shard",
    "give_name",
    "give_names",
    "is_in_stock_folder",
    "is_taken_since",
    "link_symbolically",
    "missing_names",
    "read_name",
]

logger = logging.getLogger(__name__)

#: Files of a distributed checkpoint of torch, and the one that Lightning adds.
_IN_STOCK_FOLDER = re.compile(r"\.metadata|__\d+_\d+\.distcp|meta\.pt")

#: Of a sharded step: without these nobody takes the folder for a whole checkpoint.
_FIRST_TO_GO = (STOCK_METADATA, MANIFEST)


def is_in_stock_folder(file: str) -> bool:
    """True for the name of a file of torch's distributed checkpoint, or of the one that Lightning adds."""
    return _IN_STOCK_FOLDER.fullmatch(file) is not None


def read_name(tier: Tier, name: str) -> Identity | None:
    """The step that a name points to; None when there is none, or a file that is not ours (a stock checkpoint).

    Blocks: one small read, or when there is no such file a listing and a read.

    Raises:
        UnsupportedFormat: another version of the format wrote it.
        TierError: the tier cannot be read.
    """
    try:
        return _identity_of(tier, name)
    except FileNotFoundError:
        found = first_shard(tier, name)
    if found is None:
        return None
    try:
        return read_identity(tier.read_range(found.key, 0, IDENTITY_BYTES), where=tier.location(found.key))
    except FileNotFoundError:
        return None  # deleted meanwhile


def first_shard(tier: Tier, name: str) -> ObjectInfo | None:
    """The shard with the lowest number in the folder that a name is; None when there is none. Blocks: a listing.

    It need not be shard 0: a folder that one host has for itself may not have it, and an interrupted deletion leaves
    only some. A stock distributed checkpoint has files of the same names.

    Raises:
        TierError: the tier cannot be read.
    """
    infos = [info for start in ("shard-", "__") for info in tier.list(f"{name}/{start}")]
    ranks = {info: rank for info in infos if (rank := rank_of_shard(info.key.removeprefix(f"{name}/"))) is not None}
    return min(ranks, key=lambda info: ranks[info], default=None)


def _identity_of(tier: Tier, key: str) -> Identity | None:
    """The identity in a file; without opening it, if this process has saved it."""
    known = recall(tier.location(key)) if tier.is_local else None
    return known or read_identity(tier.read_range(key, 0, IDENTITY_BYTES), where=tier.location(key))


def give_name(tier: Tier, step: StepRecords, name: str) -> bool:
    """Gives a step on the tier a name, so that no other step of its run has the name. Safe to repeat.

    A name that points to a committed step of another run stays there, because a user who loads by path must not get the
    weights of a run that was not asked for. A warning says so; the step can still be found by its own run. Two runs
    that give one name at the same moment may both find it free; then the later one gets it. A name that points to a
    newer committed step of the same run stays there too, because this step was saved earlier and comes late.

    Blocks: two or three small reads, and a link or a server-side copy for each file.

    Returns:
        False when another run has the name.

    Raises:
        TierError: the tier refused, or the name is taken by something that must not be replaced (a folder of a stock
            sharded checkpoint, a file where a folder is needed).
    """
    refusal = _give(tier, step, name)
    if refusal:
        _warn_once(refusal)
    return not refusal


def give_names(
    tier: Tier, step: StepRecords, names: Iterable[str], *, before_each: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Gives a step several names, see :func:`give_name`. A name that it cannot have does not stop the others.

    Args:
        before_each: called before each name; when it raises, no further name is given.

    Returns:
        For each name that the step does not get, why: another run has it, or something else has that path.

    Raises:
        TierError: the tier failed, and trying again may help; raised after all names were tried.
    """
    refused: dict[str, str] = {}
    failure: TierError | None = None
    for name in names:
        before_each()
        try:
            refusal = _give(tier, step, name)
        except TierError as error:
            failure = failure or (error if error.retryable else None)
            refusal = "" if error.retryable else str(error)
        if refusal:
            refused[name] = refusal
    if failure is not None:
        raise failure
    return refused


def missing_names(tier: Tier, step: StepRecords) -> list[str]:
    """Those names of a step that do not point to it, or not with all its shards; another step may have them.

    Blocks: one small read for each name, two when the step is sharded.

    Raises:
        TierError: the tier failed, and trying again may help.
    """
    return [name for name in step.names if not _has_name(tier, step, name)]


def is_taken_since(tier: LocalTier, step: StepRecords, name: str) -> bool:
    """True when somebody has put a file or folder under a name since the step was saved, be it a copy of another
    checkpoint. Not noticed: a link to one, which is what a name is, too.

    Raises:
        TierError: the tier failed, and trying again may help.
    """
    try:
        ours = read_name(tier, name) is not None
    except UnsupportedFormat:
        return False  # another version of this library wrote it
    except TierError as error:
        if error.retryable:
            raise
        ours = False
    try:
        found = os.lstat(tier.location(name))
    except FileNotFoundError:
        return False
    if ours and (not stat.S_ISREG(found.st_mode) or found.st_nlink > 1):
        return False
    return found.st_ctime > step.created  # a copy or a move keeps the time of the last write, but not this one


def _has_name(tier: Tier, step: StepRecords, name: str) -> bool:
    files = [name] if step.replicated else [f"{name}/{shard.file}" for shard in step.shards[:1]]
    if not step.replicated and len(step.shards) == step.world_size:
        # The last file that the folder gets. It is not of an earlier step: that one went before the first shard came.
        files.append(f"{name}/{STOCK_METADATA if has_stock_metadata(tier, step) else MANIFEST}")
    try:
        for file in files[1:]:
            tier.read_range(file, 0, 1)
        found = _identity_of(tier, files[0])
    except (FileNotFoundError, UnsupportedFormat):
        return False
    except TierError as error:
        if error.retryable:
            raise
        return False  # something else is there
    return found is not None and (found.run, found.id) == (step.run, step.id)


def _give(tier: Tier, step: StepRecords, name: str) -> str:
    """Gives a step a name. Returns why it cannot have the name, "" otherwise; raises as :func:`give_name`."""
    prefix = step_prefix(step.run, step.id)
    try:
        holder = read_name(tier, name)
    except UnsupportedFormat as error:
        return f"the name {name!r} is not given to {step.id} of run {step.run!r}: {error}"
    if holder is not None and holder.run != step.run and _is_committed(tier, holder):
        return (
            f"the name {name!r} in {tier.root} belongs to a checkpoint of run {holder.run!r} and is not given to those"
            f" of run {step.run!r}; they are kept without it. Save the two runs in different folders, or under"
            " different names"
        )
    if holder is not None and holder.run == step.run and holder.id > step.id and _is_committed(tier, holder):
        # An agent that was stopped between a save and its commit comes late: the name points to a later step already.
        logger.info("the name %r stays with %s, which was saved after %s", name, holder.id, step.id)
        return ""
    if holder is not None and holder.run != step.run:
        # Stock writers overwrite too, but this may be all that is left of that run.
        _warn_once(
            f"the name {name!r} in {tier.root} was {holder.id} of run {holder.run!r}, whose own folder is gone; now it"
            f" is {step.id} of run {step.run!r}"
        )
    if step.replicated:
        if holder is not None and not holder.replicated:
            _delete_folder(tier, name)
        with newer_than_before(tier.location(name)) if tier.is_local else nullcontext():
            tier.alias(prefix + shard_file(0, step.version), name)
        return ""
    if holder is not None and holder.replicated:
        tier.delete(name)
    there = [info.key.removeprefix(f"{name}/") for info in tier.list(f"{name}/")]
    if holder is None or (holder.run, holder.id) != (step.run, step.id):
        for file in filter(there.__contains__, _FIRST_TO_GO):  # as in a deletion: the shards are about to go
            tier.delete(f"{name}/{file}")
    files = [shard.file for shard in step.shards]
    for file in files:
        tier.alias(prefix + file, f"{name}/{file}")
    # The manifest comes after the shards, as in the step itself: a name without a manifest is unfinished.
    last = [MANIFEST, *stock_files(tier, step)] if len(files) == step.world_size else []
    for file in there:
        if file not in (*files, *last) and (file.startswith("shard-") or is_in_stock_folder(file)):
            tier.delete(f"{name}/{file}")  # left by a larger job, or a stock one, that had the name before
    for file in last:
        tier.alias(prefix + file, f"{name}/{file}")
    return ""


def _is_committed(tier: Tier, found: Identity) -> bool:
    """True when the step is on the tier and has a manifest, or a record of shard 0: in a folder that one host has for
    itself no step has a manifest."""
    prefix = step_prefix(found.run, found.id)
    for file in (MANIFEST, record_file(0)):
        try:
            tier.read_range(prefix + file, 0, 1)
        except FileNotFoundError:
            continue
        return True
    return False


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _delete_folder(tier: Tier, name: str) -> None:
    """Deletes the name of a sharded step: what readers look for first."""
    order = {f"{name}/{file}": number for number, file in enumerate(_FIRST_TO_GO)}
    for info in sorted(tier.list(f"{name}/"), key=lambda info: (order.get(info.key, len(order)), info.key)):
        tier.delete(info.key)


def delete_names(tier: Tier, run: str, names: Iterable[str], *, step: StepId | None = None) -> list[str]:
    """Deletes those of ``names`` that point to a step of the run, and returns them. Other files of these names stay.

    Args:
        step: delete a name only when it points to this step; None: to any step of the run.

    Raises:
        TierError: the tier failed, and trying again may help. A name that is no file or cannot be read stays.
    """
    gone = []
    for name in names:
        try:
            found = read_name(tier, name)
        except UnsupportedFormat:
            continue  # another version wrote it
        except TierError as error:
            if error.retryable:
                raise
            logger.info("%s stays: %s", tier.location(name), error)  # it must not hold up the deletion of the step
            continue
        if found is None or found.run != run or step not in (None, found.id):
            continue
        if found.replicated:
            tier.delete(name, keep_folder=True)  # the user's, as the stock class leaves it
        else:
            _delete_folder(tier, name)
        gone.append(name)
    return gone


def link_symbolically(linkpath: str, path: str) -> None:
    """Replaces a second hard link of a local file by a relative symbolic link to it; does nothing for anything else."""
    if "://" in path or os.path.islink(linkpath) or not (os.path.isfile(linkpath) and os.path.isfile(path)):
        return
    if os.path.samefile(linkpath, path):
        temp = os.path.join(os.path.dirname(linkpath), partial_name())
        os.symlink(os.path.relpath(path, os.path.dirname(linkpath)), temp)
        os.replace(temp, linkpath)
