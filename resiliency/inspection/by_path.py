"""Loads a checkpoint by its path, in one process, without an agent or other ranks.

For everything except resuming a fit: ``validate``, ``test``, fine-tuning from another run's files, exporting. A path is
a name (``/ckpts/step=100.ckpt``: a stock checkpoint that also says which step it is; for a sharded step a folder), a
step folder, or a directory with runs in it (its newest step).

A name stands for the bytes of its file: these are read, and compared with the digests of the step. A copy of the file
is recognised even where the step's records are out of reach; it is then loaded like a stock checkpoint, without any
check, and with a warning.
"""

from __future__ import annotations

import glob
import logging
import os
import posixpath
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from resiliency.checkpoint.read_plan import ReadPlanner
from resiliency.checkpoint.shard_assembler import ShardAssembler, threads_for
from resiliency.checkpoint.shard_reader import MAX_OPEN_FILES, RangeReader, ShardReader
from resiliency.checkpoint.stored_state import rank_state
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.inspection import survey
from resiliency.regular_file import opened
from resiliency.state.harmless import harmless_classes
from resiliency.storage.archive import read_directory
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.catalog import StepListing
from resiliency.storage.manifest import MANIFEST, META_DIR, STEPS_DIR, Manifest, ShardRecord, rank_of_shard
from resiliency.storage.names import first_shard, read_name
from resiliency.storage.own_record import check_identity_is_absent, read_own_manifest
from resiliency.storage.shard_file import IDENTITY_BYTES, RANK_STATE, Identity, read_identity
from resiliency.storage.single_files import SingleFile, read_shard_inside
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier

__all__ = ["Located", "NameMoved", "load_path", "locate", "locate_and_load"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Located:
    """A step found by its path.

    Attributes:
        tier, run: where the step is.
        listing: the step, with the records that were found; without records nothing can be checked.
        world_size: number of ranks that wrote it.
        replicated: shard 0 holds the whole state.
        files: rank -> key of its shard on the tier. If the path named a file, that file is shard 0.
        name: the name that was passed, for messages; "" for a folder.
    """

    tier: Tier
    run: str
    listing: StepListing
    world_size: int
    replicated: bool
    files: Mapping[int, str]
    name: str = ""

    @property
    def id(self) -> StepId:
        return self.listing.id

    @property
    def is_checked(self) -> bool:
        """True when the digests of the state are known."""
        record = self.listing.records.get(0)
        return record is not None and record.complete

    def where(self, rank: int) -> str:
        """Path or address of a rank's shard."""
        return self.tier.location(self.files[rank])


def locate(path: str, *, run: str | None = None) -> Located | None:
    """The step that a path stands for; None when the path is not ours (a stock checkpoint, or no file).

    Args:
        run: which run; needed when a directory holds several.

    Raises:
        NoCheckpointFound: the path is ours, but its step is gone, not committed, or of another run than ``run``.
        CorruptShard: the path is a file of ours whose beginning or records are damaged.
        ConfigError: the directory holds several runs; pass ``run``.
        TierError: the tier cannot be read.
    """
    path = path if "://" in path else os.path.abspath(path)
    try:
        target = survey.find(path)
    except (ConfigError, NoCheckpointFound):
        return _copy_elsewhere(path, run)
    if target.run is None and not survey.runs_in(target.tier):
        return _copy_elsewhere(path, run)
    if run is not None and target.run not in (None, run):
        raise NoCheckpointFound(f"{path} is a checkpoint of run {target.run!r}, not of {run!r}")
    name, step = survey.one_step(target, run=run)
    listing = next((listing for listing in survey.listings(target.tier, name) if listing.id == step), None)
    if target.name is not None:
        return _named(target.tier, target.name, listing)
    if listing is None or listing.manifest is None:
        shows = f"`resiliency ckpt ls {target.tier.root}` shows what is there"
        why = "".join(f" ({text})" for text in list(listing.problems.values())[:1]) if listing is not None else ""
        raise NoCheckpointFound(f"{path}: {step} of run {name!r} is not committed{why}; {shows}")
    return Located(
        tier=target.tier,
        run=name,
        listing=listing,
        world_size=listing.manifest.world_size,
        replicated=listing.manifest.replicated,
        files=_files_of(listing),
    )


def _copy_elsewhere(path: str, run: str | None) -> Located | None:
    folder, name = posixpath.split(path.rstrip("/"))
    try:
        tier = open_tier(folder or "/")
    except ConfigError:
        return None  # an address scheme that this library does not write to
    identity = read_name(tier, name) if name and name not in (".", "..") else None
    if identity is None:
        _check_is_not_ours(tier, name)
        return None  # a stock checkpoint, or no file: the caller decides
    if run not in (None, identity.run):
        raise NoCheckpointFound(f"{path} is a checkpoint of run {identity.run!r}, not of {run!r}")
    return _named(tier, name, None)


def _check_is_not_ours(tier: Tier, name: str) -> None:
    """Raises CorruptShard for a file of ours, or a folder with one, whose first bytes no longer identify it."""
    if name in ("", ".", ".."):
        return
    found = next((info for info in tier.list(name) if info.key == name), None) or first_shard(tier, name)
    if found is not None and found.nbytes:
        with suppress(FileNotFoundError):  # the file has just been deleted
            read = partial(tier.read_range, found.key)
            check_identity_is_absent(read, found.nbytes, where=tier.location(found.key))


def _files_of(listing: StepListing) -> dict[int, str]:
    return {rank: listing.key(record) for rank, record in listing.records.items()}


def _named(tier: Tier, name: str, listing: StepListing | None) -> Located:
    """The step that a file or folder is a name of.

    Args:
        listing: the step's listing, if the step is on the tier.

    Raises:
        NoCheckpointFound: the file is gone, or is only a part of a step.
    """
    where = tier.location(name)
    identity = read_name(tier, name)
    if identity is None:
        raise NoCheckpointFound(f"{where} is gone")
    in_folder = {
        rank: info.key
        for info in tier.list(f"{name}/")
        if (rank := rank_of_shard(posixpath.basename(info.key), [identity.version])) is not None
    }
    if listing is None or 0 not in listing.records or listing.id != identity.id:  # the name may have moved meanwhile
        listing = StepListing(identity.id)
        if in_folder:
            listing.records = _records_of(tier, f"{name}/{MANIFEST}", identity)
        elif identity.replicated and identity.rank == 0:
            step = _own_manifest(tier, name, identity)
            if step is not None:
                listing = SingleFile(name, step).listing
    files = in_folder or {0: name}
    record = listing.records.get(0)
    facts = identity if record is None else record  # what the file says of itself may be damaged
    located = Located(
        tier=tier,
        run=identity.run,
        listing=listing,
        world_size=facts.world_size,
        replicated=facts.replicated,
        files={**_files_of(listing), **files, **_linked(tier, name, identity, listing)},
        name=name,
    )
    if identity.rank != 0 or not (located.replicated or located.is_checked):
        raise NoCheckpointFound(
            f"{where} is shard {identity.rank} of {identity.world_size} of {identity.id} of run {identity.run!r}; the"
            f" step they make together is not there, or its {MANIFEST} is missing or damaged"
        )
    return located


def _own_manifest(tier: Tier, name: str, identity: Identity) -> Manifest | None:
    """The records inside a file that is a whole step; None when the file only holds the state that all ranks share.

    Raises:
        CorruptShard: the records are damaged or missing.
        NoCheckpointFound: the file is gone.
    """
    where = tier.location(name)
    nbytes = next((info.nbytes for info in tier.list(name) if info.key == name), None)
    if nbytes is None:
        raise NoCheckpointFound(f"{where} is gone")
    return read_own_manifest(identity, lambda start, end: tier.read_range(name, start, end), nbytes, where=where)


def _linked(tier: Tier, name: str, identity: Identity, listing: StepListing) -> dict[int, str]:
    """{0: the step's own file} where a name is a link to it, else empty. The own file is better to open: the name may
    move to another step before that, the file belongs to this step for ever."""
    if not tier.is_local or 0 not in listing.records:
        return {}
    own = listing.key(listing.records[0])
    try:
        return {0: own} if os.path.samefile(tier.location(name), tier.location(own)) else {}
    except OSError:
        return {}  # one of them has just been deleted; opening it will say so


def _records_of(tier: Tier, key: str, identity: Identity) -> dict[int, ShardRecord]:
    """The records in a manifest that was copied along with its shards; empty when it is missing or belongs to another
    step."""
    try:
        manifest = Manifest.from_json(tier.read(key), where=tier.location(key))
    except (FileNotFoundError, CorruptShard) as error:
        logger.warning("%s cannot be used: %s", tier.location(key), error)
        return {}
    same = (manifest.id, manifest.run) == (identity.id, identity.run)
    return {record.rank: record for record in manifest.shards} if same else {}


def load_path(
    located: Located,
    *,
    rank: int = 0,
    allow_pickle: bool = False,
    planner: ReadPlanner | None = None,
) -> tuple[Any, Any]:
    """Reads and checks the shards of a located step, in one process. Remote shards go through a temporary folder.

    For a replicated step, shard 0 and the shard of ``rank`` are read; for a sharded step, all shards.

    Args:
        rank: the rank whose per-rank tree is returned.
        allow_pickle: also load objects of any class. Only for checkpoints you trust: it can run code.
        planner: plans what is read, and into which tensors; None: all. Not used for a copy without records.

    Returns:
        The state tree and the per-rank tree (None when the step has no such rank).

    Raises:
        CorruptShard: bytes are damaged; names the file and the byte ranges.
        NameMoved: the name belongs to another step by now; locate it again.
        TierError: the tier cannot be read.
        pickle.UnpicklingError: the state holds objects of classes that may not be loaded; the error says how to allow
            them.
    """
    try:
        return _load(located, rank, allow_pickle, planner)
    except (CorruptShard, NoCheckpointFound, TierError, OSError) as error:
        # A job that saves moves its names to newer steps; that must not be reported as damage.
        now = read_name(located.tier, located.name) if located.name else None
        if now is None or (now.run, now.id) == (located.run, located.id):
            raise
        raise NameMoved(
            f"{located.tier.location(located.name)} was {located.id} when it was looked up, and is {now.id} of run"
            f" {now.run!r} now; look it up again"
        ) from error


def locate_and_load(
    path: str,
    *,
    run: str | None = None,
    rank: int = 0,
    allow_pickle: bool = False,
    planner: ReadPlanner | None = None,
) -> tuple[Located, Any, Any] | None:
    """Calls :func:`locate` and :func:`load_path`, again when a job has moved the name, or has saved and deleted in the
    folder, in between.

    Returns:
        (step, state tree, per-rank tree); None when the path is not ours.

    Raises:
        The exceptions of these two functions.
    """
    for tries in range(_MOVES, -1, -1):
        before = _file_at(path)
        try:
            located = locate(path, run=run)
            if located is None:
                return None
            return located, *load_path(located, rank=rank, allow_pickle=allow_pickle, planner=planner)
        except (CorruptShard, NoCheckpointFound, TierError) as error:
            if not tries or not (isinstance(error, NameMoved) or _file_at(path) != before):
                raise
            logger.info("%s is read again, because it is another file now: %s", path, error)
    raise AssertionError  # the last try returns or raises


def _file_at(path: str) -> object:
    """A value that stays equal while the path is the same file, or, for a folder of steps, while no step comes or goes;
    None: nothing is there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino
    steps = [path, *glob.glob(f"{glob.escape(path)}/{META_DIR}/*/{STEPS_DIR}"), f"{path}/{STEPS_DIR}"]
    times = {}
    for folder in (inner for place in steps for inner in (place, *glob.glob(f"{glob.escape(place)}/*/"))):
        with suppress(OSError):
            times[folder] = os.stat(folder).st_mtime_ns
    return times


class NameMoved(NoCheckpointFound):
    """A name belonged to one step when it was looked up, and to another one when it was read."""


#: Most times that a name may move while it is being read.
_MOVES = 20


def _load(
    located: Located,
    rank: int,
    allow_pickle: bool,
    planner: ReadPlanner | None,
) -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory(prefix="resiliency-") as scratch:
        if not located.is_checked:
            return _load_unchecked(located, scratch, rank, allow_pickle)
        records = located.listing.records
        needed = sorted({0, rank} & set(records)) if located.replicated else range(located.world_size)
        readers: dict[int, ShardReader] = {}
        try:
            for writer in needed:
                if writer not in records:
                    where = located.where(0)
                    raise CorruptShard(f"{where}: the record of shard {writer} of its step is missing", path=where)
                readers[writer] = _open(located, writer, scratch)
                if len(needed) > MAX_OPEN_FILES:
                    readers[writer].close()  # reading opens it again
            assembler = ShardAssembler(readers, rank=rank, planner=planner, allow_pickle=allow_pickle)
            for writer, error in assembler.read(threads=threads_for(1)).items():
                if isinstance(error, TierError):
                    raise error
                where, bad = located.where(writer), list(error.ranges)
                named = f"{located.tier.location(located.name)}: " if located.name and writer == 0 else ""
                raise CorruptShard(f"{named}{where}: bytes {bad} do not match their digests", path=where, ranges=bad)
            return assembler.result()
        finally:
            for reader in readers.values():
                reader.close()


def _open(located: Located, rank: int, scratch: str) -> ShardReader:
    """A shard, of a remote tier read by ranges; one that is inside the single file is first written to ``scratch``."""
    record, key = located.listing.records[rank], located.files[rank]
    if located.listing.single and rank > 0:  # its bytes are an entry of the single file
        path = Path(scratch, record.file)
        try:
            path.write_bytes(read_shard_inside(located.tier, key, record))
        except OSError as error:
            raise TierError(f"{located.where(rank)} cannot be written to {path}: {error}", retryable=False) from error
        return ShardReader(str(path), record)
    return ShardReader(located.where(rank), record) if located.tier.is_local else RangeReader(located.tier, key, record)


# -- a copy whose step is out of reach --------------------------------------------------------------------------------


def _load_unchecked(located: Located, scratch: str, rank: int, allow_pickle: bool) -> tuple[Any, Any]:
    where, key = located.where(0), located.files[0]
    logger.warning(
        "%s is a copy of %s of run %r, whose record is not there: it is loaded as it is, without a check of its bytes",
        where,
        located.id,
        located.run,
    )
    path = where if located.tier.is_local else _download(located.tier, key, os.path.join(scratch, "copy.ckpt"))
    try:
        # opened only once, because the name may move to another step between two opens
        with opened(path) as file, harmless_classes():
            _check_same(file.read(IDENTITY_BYTES), located)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=not allow_pickle)
            own = _own_state(file, where, allow_pickle) if rank == 0 else None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CorruptShard(f"{where}: cannot be read ({error})", path=where) from error
    return state, own


def _check_same(head: bytes, located: Located) -> None:
    where = located.where(0)
    found = read_identity(head, where=where)
    if found is None or (found.run, found.id) != (located.run, located.id):
        holds = f"{found.id} of run {found.run!r}" if found is not None else "something else"
        raise NoCheckpointFound(f"{where} was {located.id} when it was looked up, and is {holds} now; look it up again")


def _own_state(file: BinaryIO, where: str, allow_pickle: bool) -> Any:
    size = file.seek(0, os.SEEK_END)

    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    entry = read_directory(read, size, where=where).get(RANK_STATE)
    if entry is None:
        return None
    data = read(entry.start, entry.end)
    return rank_state(data, where=f"{where}:{RANK_STATE}", allow_pickle=allow_pickle)


def _download(tier: Tier, key: str, path: str) -> str:
    with open(path, "wb") as file:
        while True:
            at = file.tell()
            block = tier.read_range(key, at, at + BLOCK_BYTES)
            file.write(block)
            if len(block) < BLOCK_BYTES:
                return path
