"""Finds the newest checkpoint in folders, and tells which rank handles checkpoint files. For scripts: a fit finds the
newest step of all tiers by itself."""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from resiliency.compat.markers import CONTEXT_SUFFIX, UNFINISHED_CHECKPOINT_SUFFIX, unfinished_marker_path
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.inspection.by_path import Located, locate
from resiliency.settings import environment
from resiliency.storage.manifest import META_DIR

__all__ = ["find_latest_checkpoint_path", "get_is_checkpoint_file_handler"]

logger = logging.getLogger(__name__)

_STEP = re.compile(r"(?:^|[-_=])step=(\d+)(?=$|[-_.])")
_NO_CHECKPOINTS = (UNFINISHED_CHECKPOINT_SUFFIX, CONTEXT_SUFFIX)


def get_is_checkpoint_file_handler(is_cluster_local_checkpointing: bool = False) -> bool:
    """True when this process creates and deletes checkpoint files. Collective: no. Blocks: no.

    Args:
        is_cluster_local_checkpointing: True: each host has its own folder, and one rank per host handles files. False:
            rank 0 of the job does.

    Raises:
        ConfigError: True, in a job of several ranks, and the environment does not say which rank of its host this is.
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
    """The path of the checkpoint with the largest step in the folders; None when there is none.

    A checkpoint is a file or folder whose name contains its step (``step=5``, ``epoch=1-step=5.ckpt``), or any
    ``*.ckpt`` of this library. Incomplete checkpoints are skipped: those with an ``-unfinished`` marker, torch files
    without their end, folders without the metadata that is written last, and uncommitted steps of this library. When
    several checkpoints have the same step, the first folder in the list wins. Of this library's checkpoints in a folder
    only the newest step counts; after a job has gone back to an older step, that is the last one saved, which need not
    have the largest number.

    Args:
        checkpoint_dir: a folder or a list of folders. None in it is skipped; a folder that does not exist counts as
            empty.
        synchronize: all ranks get the same path: that of the largest step for which every rank has a path, or if there
            is none, of the largest step of any rank. The path is that of the lowest rank that has the step.

    Collective: with ``synchronize``; then every rank must call it. Blocks: for a listing and a few small reads per
    folder; with ``synchronize`` up to the timeout of the process group.

    Raises:
        TypeError: ``checkpoint_dir`` is of another type.
        ConfigError: a folder is an address; or ``synchronize`` with several ranks and no process group.
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
    """Complete checkpoints directly in a folder, with their steps; of this library's only the newest."""
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
    """Says what a checkpoint that this library did not write lacks; "" when it seems complete."""
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
    """The step and path that all ranks take, as a dict of one entry; empty when no rank has any. Collective: yes."""
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
