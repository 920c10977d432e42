"""Which rank handles the files of checkpoints, and which checkpoint of some folders is the newest.

The functions have the names and arguments of the library whose guide this project implements. A fit needs neither:
:class:`resiliency.callbacks.model_checkpoint.ModelCheckpoint` finds the newest step of all tiers itself.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.inspection.by_path import Located, locate
from resiliency.settings import environment
from resiliency.storage.manifest import META_DIR

__all__ = [
    "CONTEXT_SUFFIX",
    "UNFINISHED_CHECKPOINT_SUFFIX",
    "find_latest_checkpoint_path",
    "get_is_checkpoint_file_handler",
    "unfinished_marker_path",
]

logger = logging.getLogger(__name__)

#: An empty file of this name beside a checkpoint says that it is being written or deleted.
UNFINISHED_CHECKPOINT_SUFFIX = "-unfinished"
#: Of the folder beside a checkpoint that says what the training was made of.
CONTEXT_SUFFIX = "-context"
_STEP = re.compile(r"(?:^|[-_=])step=(\d+)(?=$|[-_.])")
_NO_CHECKPOINTS = (UNFINISHED_CHECKPOINT_SUFFIX, CONTEXT_SUFFIX)


def unfinished_marker_path(checkpoint: str | os.PathLike[str]) -> Path:
    """The marker of a checkpoint, beside it: of ``a/step=5.ckpt`` and ``a/step=5`` it is ``a/step=5-unfinished``."""
    path = Path(checkpoint)
    name = path.name.removesuffix(".ckpt").removesuffix("-EMA")
    return path.with_name(name + UNFINISHED_CHECKPOINT_SUFFIX)


def get_is_checkpoint_file_handler(is_cluster_local_checkpointing: bool = False) -> bool:
    """Whether this process makes and deletes the files of checkpoints. Collective: no. Blocks: no.

    Args:
        is_cluster_local_checkpointing: checkpoints lie in folders that each host has for itself: one rank of each host
            does it. False: rank 0 of the job.

    Raises:
        ConfigError: of several ranks, none knows its place on its host.
    """
    rank, ranks = _rank_and_ranks()
    if not is_cluster_local_checkpointing:
        return rank == 0
    local = environment().local_rank
    if local is None and ranks == 1:
        return True
    if local is None:
        raise ConfigError(
            f"rank {rank} of {ranks} does not know its place on its host: none of LOCAL_RANK, SLURM_LOCALID and"
            " LOCAL_WORLD_SIZE is set; start the job with torchrun or resiliency run, or set LOCAL_RANK"
        )
    return local == 0


def find_latest_checkpoint_path(
    checkpoint_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | None] | None,
    synchronize: bool = False,
) -> Path | None:
    """The checkpoint of the largest step in the folders; None when there is none.

    A checkpoint is a file or folder whose name says its step (``step=5``, ``epoch=1-step=5.ckpt``), or any ``*.ckpt``
    of this library. One that is not whole is passed over: with a marker ``-unfinished`` beside it, a torch
    file without its end, a folder without the metadata that is written last, a step of this library that is not
    committed. Of several with the same step, the one of the folder that comes first in the list. Where a job has gone
    back to an older step, the newest of this library's steps is the last one saved, not the largest.

    Args:
        checkpoint_dir: a folder or several; None among them is passed over, and a folder that is not there is empty.
        synchronize: all ranks get the same path: of the largest step that every rank has a path of, or when there is
            none, of the largest step of any rank; the path is that of the lowest rank that has it.

    Collective: with ``synchronize``; then every rank must call it. Blocks: a listing and a few small reads for each
    folder; with ``synchronize`` up to the timeout of the process group.

    Raises:
        TypeError: ``checkpoint_dir`` is of another type.
        ConfigError: an address, or ``synchronize`` with several ranks and no process group.
    """
    best: dict[int, str] = {}
    for folder in _folders(checkpoint_dir):
        for step, path in _checkpoints_in(folder):
            best.setdefault(step, str(path))
    if synchronize:
        best = _agreed(best)
    return Path(best[max(best)]) if best else None


def _rank_and_ranks() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    settings = environment()
    return settings.rank, settings.world_size


def _folders(given: object) -> Iterator[Path]:
    items = list(given) if isinstance(given, list | tuple) else [given]
    for item in items:
        if item is None:
            continue
        if not isinstance(item, str | os.PathLike):
            raise TypeError(f"checkpoint_dir={given!r}: pass a folder as str or Path, a list of folders, or None")
        if "://" in os.fspath(item):
            raise ConfigError(
                f"{item} is an address; ModelCheckpoint(dirpath={os.fspath(item)!r}) resumes from it by itself, and"
                " `resiliency ckpt ls` lists it"
            )
        yield Path(item)


def _checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Whole checkpoints directly in a folder, with their steps."""
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: list[tuple[int, Path]] = []
    own: list[tuple[Located, Path]] = []
    for path in entries:
        if path.name.startswith(".") or path.name == META_DIR or path.name.endswith(_NO_CHECKPOINTS):
            continue
        if unfinished_marker_path(path).exists():
            logger.info("%s is passed over: %s says that it is unfinished", path, unfinished_marker_path(path))
            continue
        try:
            located = locate(str(path)) if path.suffix == ".ckpt" or _STEP.search(path.name) else None
        except (NoCheckpointFound, CorruptShard, ConfigError, TierError) as error:
            logger.warning("%s is passed over: %s", path, error)
            continue
        if located is not None:
            if located.replicated or located.listing.manifest is not None:
                own.append((located, path))
            else:
                logger.warning("%s is passed over: %s is not committed", path, located.id)
            continue
        step = _STEP.search(path.name)
        if step is None:
            continue
        problem = _what_is_missing(path)
        if problem:
            logger.warning("%s is passed over: %s", path, problem)
            continue
        found.append((int(step[1]), path))
    if own:
        newest, path = max(own, key=lambda item: item[0].id)
        found.insert(0, (newest.id.step, path))
    return found


def _what_is_missing(path: Path) -> str:
    """What a checkpoint of others lacks, in words; "" for one that seems whole."""
    if path.is_file():
        # A torch file is an archive whose directory is written last.
        return "" if zipfile.is_zipfile(path) else "it is no torch file, or its end is missing"
    if not path.is_dir():
        return "it is no file and no folder"
    ranks = [child for child in path.iterdir() if child.name.isdecimal() and child.is_dir()]
    parts = ranks or [path]
    for part in parts:
        metadata = part / ".metadata"
        if not metadata.is_file() or not metadata.stat().st_size:
            return f"{metadata}, which is written last, is not there"
    if path.suffix == ".ckpt" and not (path / "meta.pt").exists():
        return f"{path / 'meta.pt'}, which Lightning writes last, is not there"
    if (path / "common.pt").exists() and not (path / "metadata.json").exists():
        return f"{path / 'metadata.json'} is not there"
    return ""


def _agreed(own: dict[int, str]) -> dict[int, str]:
    """The one step and path that all ranks take. Collective: yes."""
    if not (dist.is_available() and dist.is_initialized()):
        rank, ranks = _rank_and_ranks()
        if ranks > 1:
            raise ConfigError(
                f"synchronize=True on rank {rank} of {ranks} needs the process group; call it after"
                " torch.distributed.init_process_group, such as in Callback.setup"
            )
        return own
    gathered: list[dict[int, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    common = set.intersection(*(set(one) for one in gathered))
    steps = common or set().union(*gathered)
    if not steps:
        return {}
    step = max(steps)
    return {step: next(one[step] for one in gathered if step in one)}
