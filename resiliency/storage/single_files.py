"""Steps that are one file each: their folders can go when a job has ended, and be made again from the files. No torch.

A step of one rank, or of several of one host, is one file, which holds the records and the other ranks' shards
(:mod:`resiliency.storage.own_record`). When all steps of a run are such files and have names, the run's folder holds
nothing that the files do not, and :func:`drop_folders` removes it: a folder with checkpoints then looks as stock
Lightning leaves it. :func:`restore_folders` is the inverse.

A file counts as a step only under a name that its record lists, so files that the user has renamed, or copied here from
elsewhere, do not count. In folders below the root ("val/loss=0.5.ckpt") only files that end with ".ckpt" count, at most
two folders deep, so that no other files there need to be opened.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency.errors import CorruptShard, TierError, UnsupportedFormat
from resiliency.faultpoints import hit
from resiliency.regular_file import open_regular
from resiliency.storage.catalog import StepListing, scan, step_prefix
from resiliency.storage.change_times import unlink_in_order
from resiliency.storage.manifest import MANIFEST, META_DIR, STEPS_DIR, Manifest, ShardRecord, rank_of_shard, record_file
from resiliency.storage.own_record import check_identity_is_absent, read_other_shard, read_own_manifest
from resiliency.storage.shard_file import IDENTITY_BYTES, read_identity
from resiliency.storage.state_dir import remove_state_dir
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.storage.unlink_hardlinks import unlink_hardlinks

__all__ = [
    "SingleFile",
    "drop_folders",
    "find_single_files",
    "read_shard_inside",
    "read_single_file",
    "remove_run_folder",
    "restore_folders",
    "single_file_at",
    "single_files_of",
]

logger = logging.getLogger(__name__)

#: Prefix of folders that are being made.
_RESTORED = "restored-"
#: Prefix of the files with the numbers of attempts.
_ATTEMPT = "attempt"
_OLD_S = 3600.0
#: How many folders deep below the root names count, and how they must end there.
_DEPTH, _ENDING = 2, ".ckpt"


@dataclass(frozen=True)
class SingleFile:
    """A step that is one file: its name in the folder, and the records in it."""

    name: str
    manifest: Manifest

    @property
    def listing(self) -> StepListing:
        """The step as a listing of the folder would show it."""
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

    Blocks: two or three small reads, and one of everything that follows the storages.

    Raises:
        CorruptShard: the file is such a step, and its records are damaged or missing; or it has a checkpoint's name and
            is empty, as a power loss may leave it.
        UnsupportedFormat: another version of the format wrote it.
        OSError: it cannot be read.
    """
    fd = open_regular(path)
    try:
        identity = read_identity(os.pread(fd, IDENTITY_BYTES, 0), where=path)
        nbytes = os.fstat(fd).st_size
        if not nbytes and path.endswith(_ENDING):
            raise CorruptShard(f"{path}: it is empty", path=path)

        def read(start: int, end: int) -> bytes:
            return os.pread(fd, end - start, start)

        if identity is None:
            check_identity_is_absent(read, nbytes, where=path)
        if identity is None or not identity.replicated or identity.rank:
            return None
        return read_own_manifest(identity, read, nbytes, where=path)
    finally:
        os.close(fd)


def read_shard_inside(tier: Tier, key: str, record: ShardRecord) -> bytes:
    """The bytes of another rank's shard in a file that is a whole step. They are not checked here.

    Blocks: a listing of that file and three reads.

    Raises:
        CorruptShard: the shard is not in the file, or there is no such file.
        TierError: the tier cannot be read.
    """
    where = tier.location(key)
    nbytes = next((info.nbytes for info in tier.list(key) if info.key == key), 0)
    return read_other_shard(lambda start, end: tier.read_range(key, start, end), nbytes, record, where=where)


def single_file_at(tier: Tier, run: str, name: str) -> Manifest | None:
    """The records of the step that the file of this name is, if :func:`single_files_of` has it; None for anything else.

    Blocks: a few small reads. Raises: as :func:`read_single_file`.
    """
    if not isinstance(tier, LocalTier) or not _files_count(tier, run) or not _may_count(name):
        return None
    step = read_single_file(tier.location(name))
    if step is None or step.run != run or name not in step.names:
        return None
    return step


def find_single_files(
    root: str, run: str | None = None, *, below: bool = True, damaged: dict[str, str] | None = None
) -> list[SingleFile]:
    """The steps (of ``run``) that are files in a folder, each once, by run and oldest first. Damaged ones are left out,
    with a warning when they are directly in the folder.

    Blocks: a small read for each file in the folder, and for each in folders below that may be a step.

    Args:
        below: also look in folders below.
        damaged: gets the path of each file that a warning would name, and why, instead of the warning.

    Raises:
        OSError: the folder cannot be listed.
    """
    found: dict[tuple[str, object], SingleFile] = {}
    for name in _files(root, below=below):
        path = os.path.join(root, name)
        try:
            step = read_single_file(path)
        except (CorruptShard, OSError) as error:
            if "/" in name or isinstance(error, UnsupportedFormat):
                logger.debug("%s is not counted as a checkpoint: %s", path, error)  # probably another program's
            elif damaged is not None:
                damaged[path] = str(error)
            else:
                is_damaged = isinstance(error, CorruptShard)
                advice = "put back a good copy of it, or delete it" if is_damaged else "let this user read it"
                logger.warning("%s is not counted as a checkpoint: %s; %s", path, error, advice)
            continue
        if step is not None and run in (None, step.run) and name in step.names:
            found.setdefault((step.run, step.id), SingleFile(name, step))
    return sorted(found.values(), key=lambda file: (file.manifest.run, file.manifest.id))


def _files(root: str, folder: str = "", *, below: bool = True) -> Iterator[str]:
    """Names of the files that may be steps, sorted; those in folders last. Raises OSError when the root cannot be
    read."""
    folders = []
    if folder or os.path.isdir(root):
        with os.scandir(os.path.join(root, folder)) as listing:
            for entry in sorted(listing, key=lambda entry: entry.name):
                name = os.path.join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif _may_count(name) and entry.is_file(follow_symlinks=False):
                    yield name
    for name in folders if below else ():
        if _may_count(f"{name}/x{_ENDING}"):
            try:
                yield from _files(root, name)
            except OSError as error:
                logger.debug("%s cannot be listed: %s", os.path.join(root, name), error)


def _may_count(name: str) -> bool:
    parts = name.split("/")
    deep = len(parts) - 1
    return not any(part.startswith(".") for part in parts) and (not deep or (deep <= _DEPTH and name.endswith(_ENDING)))


def single_files_of(tier: Tier, run: str) -> list[SingleFile]:
    """The steps of a run that are files and nothing else, oldest first; empty on a remote tier, and when there are step
    folders, which hold all steps of the run themselves.

    Raises:
        OSError: the tier cannot be listed.
    """
    if not isinstance(tier, LocalTier) or not _files_count(tier, run):
        return []
    return find_single_files(tier.root, run)


def _files_count(tier: LocalTier, run: str) -> bool:
    """True when the run has no step folders."""
    steps = tier.location(f"{META_DIR}/{run}/{STEPS_DIR}")
    return not os.path.lexists(steps) or (os.path.isdir(steps) and not os.listdir(steps))


def restore_folders(tier: LocalTier, run: str) -> int:
    """Makes the step folders of a run again, of the files that :func:`single_files_of` finds. Returns the number of
    steps.

    Several processes may call it at once; a killed one leaves nothing that counts. Blocks: as
    :func:`find_single_files`, and two or three small writes for each shard of each step.

    Raises:
        OSError: the tier cannot be read or written.
    """
    folder = tier.location(f"{META_DIR}/{run}")
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
            os.link(tier.location(file.name), os.path.join(step, file.manifest.shards[0].file))
        except OSError as error:
            logger.warning(
                "%s cannot be taken up as a checkpoint of run %r (%s): pass its path as ckpt_path= to load it",
                tier.location(file.name),
                run,
                error,
            )
            os.rmdir(step)
            continue
        try:
            _write_beside(step, file.manifest)
        except CorruptShard as error:  # another file was put there meanwhile
            logger.warning("%s is not counted as a checkpoint: %s", tier.location(file.name), error)
            shutil.rmtree(step)
            continue
        made += 1
    steps = os.path.join(folder, STEPS_DIR)
    try:
        os.rename(temp, steps)  # all at once
    except OSError:
        if not os.path.isdir(steps):
            raise
        shutil.rmtree(temp)  # another process was first
        return 0
    return made


def _write_beside(step: str, manifest: Manifest) -> None:
    """Writes what belongs beside shard 0 in a step's folder: the other shards, taken out of shard 0, and all
    records."""
    first = os.path.join(step, manifest.shards[0].file)
    fd = open_regular(first)
    try:
        nbytes = os.fstat(fd).st_size
        for shard in manifest.shards:
            if shard.rank:
                data = read_other_shard(lambda start, end: os.pread(fd, end - start, start), nbytes, shard, where=first)
                Path(step, shard.file).write_bytes(data)
            Path(step, record_file(shard.rank)).write_text(json.dumps(shard.to_dict()))
    finally:
        os.close(fd)
    Path(step, MANIFEST).write_text(manifest.to_json())


def _remove_leftovers(folder: str) -> None:
    """Removes folders that killed processes began to make more than an hour ago."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError):  # another process was first
            if name.startswith(_RESTORED) and time.time() - os.stat(path).st_mtime > _OLD_S:
                shutil.rmtree(path, ignore_errors=True)


def drop_folders(tier: LocalTier, run: str, *, through: str) -> str:
    """Removes the folder of a run when its steps are files that need nothing else. Nothing may be writing to the run.

    Unfinished steps go with it. So do steps whose files the user has deleted or renamed, if a newer step has its file:
    the user wanted the room, or has the files where the library does not look. When this process is killed, the steps
    are either all there or all dropped, and :func:`restore_folders` makes them again.

    Of several names of a step each gets a file of its own (:mod:`resiliency.storage.unlink_hardlinks`).

    Blocks: for these copies, about a second per GiB.

    Args:
        through: a folder in the run's folder, into which everything is moved before it is removed. Whoever removes that
            folder stops this at any point, and nothing is lost.

    Returns:
        Why the folder stays; "" when it is gone.

    Raises:
        OSError, TierError: the tier cannot be read or written.
    """
    folder = tier.location(f"{META_DIR}/{run}")
    without = []
    steps: list[Manifest] = []
    for listing in scan(tier, run):
        if listing.problems:
            return next(iter(listing.problems.values()))
        if listing.manifest is None and listing.part is not None:
            return f"{listing.id} has its other shards on other hosts"
        if listing.manifest is None:
            continue
        if _has_a_file(tier, listing.manifest):
            steps.append(listing.manifest)
        elif _names_left(tier, listing.manifest) or not listing.manifest.names:
            return f"{listing.id} has no name, or has parts in other files"
        else:
            without.append(listing.id)
    newest = max((step.id for step in steps), default=None)
    if without and (newest is None or max(without) > newest):
        return f"the files of {max(without)} were deleted, and no newer step has a file"
    try:
        names = {step.id.dirname: [tier.path(name) for name in _names_left(tier, step)] for step in steps}
        copies = {step: unlink_hardlinks(paths, through=through) for step, paths in names.items()}
    except FileNotFoundError as error:
        return f"a later job has begun, or somebody deletes checkpoints now ({error})"
    return "" if remove_run_folder(folder, through, copies) else "a later job has begun"


def remove_run_folder(folder: str, through: str, copies: Mapping[str, Sequence[str]] | None = None) -> bool:
    """Removes the folder of a run by way of a folder in it (see :func:`drop_folders`), and the parent folder if it is
    empty.

    Args:
        copies: folder name of a step -> copies of its file.

    Returns:
        False when another process has removed the folder that everything goes through.

    Raises:
        OSError: something cannot be moved or removed.
    """
    hit("agent.drop.begin")
    # The steps go first and all at once. The numbers of attempts go last, so that no other start uses the same one
    # before.
    entries = sorted(os.listdir(folder), key=lambda name: (name != STEPS_DIR, name.startswith(_ATTEMPT), name))
    for path in (os.path.join(folder, name) for name in entries):
        if path == through:
            continue
        try:
            os.rename(path, os.path.join(through, os.path.basename(path)))
        except FileNotFoundError:
            if os.path.isdir(through):
                continue  # it was only a temp file
            return False
        if os.path.basename(path) == STEPS_DIR:
            hit("agent.drop.renamed")
    _unlink_in_order(os.path.join(through, STEPS_DIR), copies or {})
    with suppress(FileNotFoundError):  # a later job removes the folder too
        shutil.rmtree(through)
    hit("agent.drop.removed")
    with suppress(OSError):  # a job has begun meanwhile
        os.rmdir(folder)
    remove_state_dir(os.path.dirname(folder))  # unless there are other runs
    return True


def _unlink_in_order(steps: str, copies: Mapping[str, Sequence[str]]) -> None:
    """Unlinks the first shards of steps, which the names stay of, so that the newest file is changed last."""
    found = sorted((step, name) for name in _listing(steps) if (step := StepId.parse(name)) is not None)
    shards: dict[str, str] = {}
    for _, name in found:
        for file in _listing(os.path.join(steps, name)):
            if rank_of_shard(file) == 0:
                shards[name] = os.path.join(steps, name, file)
    unlink_in_order(shards.values(), {shards[name]: copies[name] for name in shards if name in copies})


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _names_left(tier: LocalTier, manifest: Manifest) -> list[str]:
    """Names of the step that still point to it."""
    try:
        shard = os.stat(tier.path(step_prefix(manifest.run, manifest.id) + manifest.shards[0].file))
    except FileNotFoundError:
        shard = None  # a script that deletes old files wherever they lie has deleted one of the two links
    left = []
    for name in manifest.names:
        try:
            found = os.lstat(tier.path(name))
        except (OSError, TierError):
            continue
        if stat.S_ISDIR(found.st_mode):  # a sharded step's name is a folder
            left.append(name)
        elif os.path.samestat(found, shard) if shard is not None else _is_the_step(tier.path(name), manifest):
            left.append(name)
    return left


def _is_the_step(path: str, manifest: Manifest) -> bool:
    """True when a file is the whole step, of which nothing else tells."""
    try:
        return _same(read_single_file(path), manifest)
    except (CorruptShard, OSError):
        return False


def _has_a_file(tier: LocalTier, manifest: Manifest) -> bool:
    """True when the step is one file, and a name of it that counts points to that file."""
    names = [name for name in _names_left(tier, manifest) if _may_count(name) and os.path.isfile(tier.path(name))]
    return bool(names) and _same(read_single_file(tier.path(names[0])), manifest)


def _same(own: Manifest | None, step: Manifest) -> bool:
    """True when a file's own records equal the step's, except for superseded names, which may be added later."""
    return own is not None and [replace(shard, supersedes=()) for shard in own.shards] == [
        replace(shard, supersedes=()) for shard in step.shards
    ]
