"""Finds what earlier jobs have left in a callback's places. Only reads storage: starts no agent and writes nothing."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.callbacks.checkpointing.places import CheckpointPlaces, EngineKey
from resiliency.errors import CorruptShard, TierError, UnsupportedFormat
from resiliency.inspection.by_path import locate
from resiliency.inspection.pickle_view import read_pickle
from resiliency.settings import environment
from resiliency.storage.catalog import StepListing, scan, step_folders
from resiliency.storage.single_files import single_file_at, single_files_of
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.to_thread import to_thread

__all__ = ["Found", "continues_writer", "is_restart", "look", "newest_file", "newest_step", "step_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What the places of a callback contain, the same on every rank.

    Attributes:
        steps: some rank sees steps of the run, committed or not.
        unsupported: some rank sees steps in an unsupported version of the format.
        unknown: some rank cannot list a remote tier, so that further steps may exist.
    """

    steps: bool
    unsupported: bool
    unknown: bool = False


def look(trainer: Any, places: CheckpointPlaces) -> Found:
    """Looks for steps of the run. Warns when a remote tier cannot be listed. Collective: yes. Blocks: one listing per
    tier."""
    steps, unsupported, unknown = to_thread(lambda: _look_here(trainer, places))
    return Found(
        steps=_any_rank(trainer, steps),
        unsupported=_any_rank(trainer, unsupported),
        unknown=_any_rank(trainer, unknown),
    )


def _look_here(trainer: Any, places: CheckpointPlaces) -> tuple[bool, bool, bool]:
    """What this rank sees of :class:`Found`."""
    steps = unsupported = unknown = False
    for number, tier in enumerate(_tiers(trainer, places)):
        try:
            steps = bool(step_folders(tier, places.key.run) or single_files_of(tier, places.key.run)) or steps
        except UnsupportedFormat:
            unsupported = True
        except (TierError, OSError) as error:
            if number == 0:  # the folder of this host; the engine reports what is wrong with it when it is opened
                logger.debug("%s cannot be listed: %s", tier.root, error)
                continue
            unknown = True
            logger.warning("whether there are checkpoints of run %r is not known: %s", places.key.run, error)
    return steps, unsupported, unknown


def is_restart(trainer: Any) -> bool:
    """True when the launcher of any rank says that this process is a restart. Collective: yes.

    One rank is enough, because torchrun counts restarts on each host, and a host new in the job counts from zero.
    """
    return _any_rank(trainer, bool(environment().launch.restarts))


def continues_writer(trainer: Any, writer: Mapping[str, str]) -> bool:
    """True when the launcher of any rank says that this is a restart of the job ``writer``. Collective: yes."""
    return _any_rank(trainer, environment().launch.continues(writer))


def newest_step(trainer: Any, places: CheckpointPlaces) -> StepId | None:
    """The newest committed step of which this rank sees at least its host's part; None when it sees none. Collective:
    no."""
    found = [listing.id for listing in _listings(trainer, places) if listing.manifest or listing.part]
    for tier in _tiers(trainer, places):
        found += [file.manifest.id for file in single_files_of(tier, places.key.run)]
    return max(found, default=None)


def step_of(path: str) -> int | None:
    """The optimizer step of any checkpoint, ours or stock; None, with a warning, when it cannot be read.

    Collective: no. Blocks: for a small read; no tensor is loaded, and no class that the file names is imported.
    """
    try:
        located = locate(path)
        if located is not None:
            return located.id.step
        if os.path.isdir(path):
            path = os.path.join(path, "meta.pt")  # of a sharded checkpoint of Lightning
        with _opened(path) as file, zipfile.ZipFile(file) as archive:
            data = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return int(read_pickle(archive.read(data))["global_step"])
    except Exception as error:  # Boundary: a damaged file, or the client library of a store, raises anything.
        logger.warning("the step of %s cannot be read, so it counts as the oldest checkpoint: %r", path, error)
        return None


def _opened(path: str) -> Any:
    if "://" not in path:
        return open(path, "rb")
    import fsspec

    return fsspec.open(path, "rb")


def newest_file(key: EngineKey, *, prefer: Iterable[str] = ()) -> set[str]:
    """The path of the run's newest step, if only its file is left (no step folder); empty otherwise.

    Args:
        prefer: if one of these paths is a name of that step, it is returned instead of the file's first name.
    """
    tier = LocalTier(key.directory)
    for file in single_files_of(tier, key.run)[-1:]:
        names = {path: os.path.relpath(path, key.directory) for path in sorted(prefer)}
        found = os.path.join(key.directory, file.name)
        return {next((path for path in names if _is_of(tier, key.run, names[path], file.manifest.id)), found)}
    return set()


def _is_of(tier: LocalTier, run: str, name: str, step: StepId) -> bool:
    """True when the file of this name is that step."""
    try:
        manifest = single_file_at(tier, run, name)
    except (CorruptShard, OSError):
        return False
    return manifest is not None and manifest.id == step


def _listings(trainer: Any, places: CheckpointPlaces) -> Iterator[StepListing]:
    for tier in _tiers(trainer, places):
        try:
            yield from scan(tier, places.key.run)
        except (TierError, OSError, UnsupportedFormat) as error:
            logger.debug("%s cannot be listed: %s", tier.root, error)


def _tiers(trainer: Any, places: CheckpointPlaces) -> Iterator[Tier]:
    """The tiers that this rank searches: its host's folder, and on rank 0 also the remote tiers."""
    yield open_tier(places.local.directory)
    if trainer.is_global_zero:
        for remote in places.remotes:
            options = {"storage_options": dict(remote.storage_options)} if remote.storage_options else {}
            yield open_tier(remote.address, glance=True, **options)


def _any_rank(trainer: Any, decision: bool) -> bool:
    return bool(trainer.strategy.reduce_boolean_decision(decision, all=False))
