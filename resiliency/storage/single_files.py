"""Steps that are one file each: their folders can go when a job has ended, and be made again from the files. No torch.

A step of one rank, or of several of one host, is one file, which holds the records and the other ranks' shards
(:mod:`resiliency.storage.own_record`). When all steps of a run are such files and have names, a run's folder holds
nothing that they do not, and :func:`drop_folders` removes it: a folder with checkpoints then looks as stock Lightning
leaves it. :func:`restore_folders` is the inverse.

Files that the user has renamed, or copied here from somewhere else, are not taken for steps: a file is one only under a
name that its record lists. Only names without a folder count.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency import faultpoints
from resiliency.errors import CorruptShard, TierError, UnsupportedFormat
from resiliency.regular_file import open_regular
from resiliency.storage.catalog import StepListing, scan, step_prefix
from resiliency.storage.manifest import MANIFEST, META_DIR, STEPS_DIR, Manifest, record_file, shard_file
from resiliency.storage.own_record import read_other_shard, read_own_manifest
from resiliency.storage.shard_file import IDENTITY_BYTES, read_identity
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier

__all__ = [
    "SingleFile",
    "drop_folders",
    "find_single_files",
    "read_shard_inside",
    "read_single_file",
    "restore_folders",
    "single_files_of",
]

logger = logging.getLogger(__name__)

#: Folders of these names are being removed, or made.
_DROPPED, _RESTORED = "dropped-", "restored-"
_OLD_S = 3600.0


@dataclass(frozen=True)
class SingleFile:
    """A step that is one file: its name in the folder, and what the records in it say."""

    name: str
    manifest: Manifest

    @property
    def listing(self) -> StepListing:
        """The step, as a listing of the folder has it."""
        shards = self.manifest.shards
        return StepListing(
            id=self.manifest.id,
            records={shard.rank: shard for shard in shards},
            manifest=self.manifest,
            committed=True,
            sizes={
                **{shard.file: shard.nbytes for shard in shards},
                **{record_file(shard.rank): 0 for shard in shards},
                MANIFEST: 0,
            },
            single=self.name,
        )


def read_single_file(path: str) -> Manifest | None:
    """The records of a step that is this one file; None when the file is anything else.

    Blocks: two or three small reads, and one of all that follows the storages.

    Raises:
        CorruptShard: it is such a step, and its records are damaged or missing.
        UnsupportedFormat: another version of the format wrote it.
        OSError: it cannot be read.
    """
    fd = open_regular(path)
    try:
        identity = read_identity(os.pread(fd, IDENTITY_BYTES, 0), where=path)
        if identity is None or not identity.replicated or identity.rank:
            return None
        nbytes = os.fstat(fd).st_size
        return read_own_manifest(identity, lambda start, end: os.pread(fd, end - start, start), nbytes, where=path)
    finally:
        os.close(fd)


def read_shard_inside(tier: Tier, key: str, rank: int) -> bytes:
    """The bytes of another rank's shard in a file that is a whole step. They are not checked here.

    Blocks: a listing of that file and three reads.

    Raises:
        CorruptShard: it is not in the file, or there is no such file.
        TierError: the tier cannot be read.
    """
    where = f"{tier.root}/{key}"
    nbytes = next((info.nbytes for info in tier.list(key) if info.key == key), 0)
    return read_other_shard(lambda start, end: tier.read_range(key, start, end), nbytes, rank, where=where)


def find_single_files(root: str, run: str | None = None) -> list[SingleFile]:
    """The steps (of ``run``) that are files in a folder, each once, oldest first. Damaged ones are warned of.

    Blocks: a small read for each file in the folder.

    Raises:
        OSError: the folder cannot be listed.
    """
    found: dict[tuple[str, object], SingleFile] = {}
    entries: list[os.DirEntry[str]] = []
    if os.path.isdir(root):
        with os.scandir(root) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_file(follow_symlinks=False):
            continue
        try:
            step = read_single_file(entry.path)
        except (CorruptShard, OSError) as error:
            if not isinstance(error, UnsupportedFormat):
                logger.warning("%s is not counted as a checkpoint: %s", entry.path, error)
            continue
        if step is not None and run in (None, step.run) and entry.name in step.names:
            found.setdefault((step.run, step.id), SingleFile(entry.name, step))
    return sorted(found.values(), key=lambda file: (file.manifest.run, file.manifest.id))


def single_files_of(tier: Tier, run: str) -> list[SingleFile]:
    """The steps of a run that has no folder, as files; none for a run with step folders, which say themselves what
    there is, and none on a remote tier.

    Raises:
        OSError: the tier cannot be listed.
    """
    if not tier.is_local:
        return []
    steps = os.path.join(tier.root, META_DIR, run, STEPS_DIR)
    if os.path.lexists(steps) and not (os.path.isdir(steps) and not os.listdir(steps)):
        return []
    return find_single_files(tier.root, run)


def restore_folders(tier: LocalTier, run: str) -> int:
    """Makes the step folders of a run again from its files, if it has none. Returns how many.

    Several processes may call it at once; one that is killed leaves nothing of it. Blocks: as
    :func:`find_single_files`, and two or three small writes for each shard of each step.

    Raises:
        OSError: the tier cannot be read or written.
    """
    folder = os.path.join(tier.root, META_DIR, run)
    _remove_leftovers(folder)
    files = single_files_of(tier, run)
    if not files:
        return 0
    temp = os.path.join(folder, _RESTORED + secrets.token_hex(4))
    made = 0
    for file in files:
        step = os.path.join(temp, file.manifest.id.dirname)
        os.makedirs(step)
        try:
            os.link(os.path.join(tier.root, file.name), os.path.join(step, shard_file(0)))
        except OSError as error:
            logger.warning(
                "%s cannot be taken up as a checkpoint of run %r (%s): pass its path as ckpt_path= to load it",
                os.path.join(tier.root, file.name),
                run,
                error,
            )
            os.rmdir(step)
            continue
        try:
            _write_beside(step, file.manifest)
        except CorruptShard as error:  # somebody has put another file there meanwhile
            logger.warning("%s is not counted as a checkpoint: %s", os.path.join(tier.root, file.name), error)
            shutil.rmtree(step)
            continue
        made += 1
    steps = os.path.join(folder, STEPS_DIR)
    try:
        os.rename(temp, steps)
    except OSError:
        if not os.path.isdir(steps):
            raise
        shutil.rmtree(temp)  # another process was first
        return 0
    return made


def _write_beside(step: str, manifest: Manifest) -> None:
    """Writes what belongs beside shard 0 in a step's folder: the other shards, which it holds, and all records."""
    first = os.path.join(step, shard_file(0))
    fd = open_regular(first)
    try:
        nbytes = os.fstat(fd).st_size
        for shard in manifest.shards:
            if shard.rank:
                data = read_other_shard(
                    lambda start, end: os.pread(fd, end - start, start), nbytes, shard.rank, where=first
                )
                Path(step, shard.file).write_bytes(data)
            Path(step, record_file(shard.rank)).write_text(json.dumps(shard.to_dict()))
    finally:
        os.close(fd)
    Path(step, MANIFEST).write_text(manifest.to_json())


def _remove_leftovers(folder: str) -> None:
    """Removes what killed processes were dropping, or had begun to make long ago."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError):  # another process was first
            if name.startswith(_DROPPED) or (
                name.startswith(_RESTORED) and time.time() - os.stat(path).st_mtime > _OLD_S
            ):
                shutil.rmtree(path, ignore_errors=True)


def drop_folders(tier: LocalTier, run: str) -> str:
    """Removes the folder of a run when its steps are files that need nothing else. Nothing may be writing to the run.

    Unfinished steps go with it. Killed meanwhile: the steps are all there or all dropped, and
    :func:`restore_folders` makes them again.

    Returns:
        Why it stays; "" when it is gone.

    Raises:
        OSError, TierError: the tier cannot be read or written.
    """
    folder = os.path.join(tier.root, META_DIR, run)
    for listing in scan(tier, run):
        if listing.problems:
            return f"{listing.id}: {listing.problems[0]}"
        if listing.manifest is not None and not _has_a_file(tier, listing.manifest):
            return f"{listing.id} has no name, or has parts in other files"
    steps = os.path.join(folder, STEPS_DIR)
    faultpoints.hit("agent.drop.begin")
    if os.path.isdir(steps):
        os.rename(steps, os.path.join(folder, _DROPPED + secrets.token_hex(4)))
    faultpoints.hit("agent.drop.renamed")
    shutil.rmtree(folder)
    faultpoints.hit("agent.drop.removed")
    with suppress(OSError):  # other runs are there
        os.rmdir(os.path.dirname(folder))
    return ""


def _has_a_file(tier: LocalTier, manifest: Manifest) -> bool:
    """True when the step is one file, and a name of it in the folder is that file."""
    shard = os.stat(tier.path(step_prefix(manifest.run, manifest.id) + shard_file(0)))
    for name in manifest.names:
        try:
            found = os.lstat(tier.path(name))
        except (OSError, TierError):
            continue
        if "/" not in name and os.path.samestat(found, shard):
            return _same(read_single_file(tier.path(name)), manifest)
    return False


def _same(own: Manifest | None, step: Manifest) -> bool:
    """True when a file's own records say what the step's say. Names may still be superseded after they were written."""
    return own is not None and [replace(shard, supersedes=()) for shard in own.shards] == [
        replace(shard, supersedes=()) for shard in step.shards
    ]
