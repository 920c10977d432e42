"""What earlier jobs left in the places of a callback, read from storage alone: no agent and nothing is written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.callbacks._places import CheckpointPlaces, EngineKey
from resiliency.errors import TierError, UnsupportedFormat
from resiliency.settings import environment
from resiliency.storage.catalog import StepListing, scan, step_folders
from resiliency.storage.single_files import single_files_of
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier

__all__ = ["Found", "continues_writer", "is_restart", "look", "newest_file", "newest_step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What is in the places of a callback, the same on every rank.

    Attributes:
        steps: some rank sees steps of the run, whole or not.
        unsupported: some rank sees steps that another version of the format wrote.
        unknown: a remote tier cannot be listed, so that there may be more.
    """

    steps: bool
    unsupported: bool
    unknown: bool = False


def look(trainer: Any, places: CheckpointPlaces) -> Found:
    """Whether there are steps of the run. Collective: yes. Blocks: one listing per tier."""
    steps = unsupported = unknown = False
    for number, tier in enumerate(_tiers(trainer, places)):
        try:
            steps = bool(step_folders(tier, places.key.run) or single_files_of(tier, places.key.run)) or steps
        except UnsupportedFormat:
            unsupported = True
        except (TierError, OSError) as error:
            if number == 0:  # the folder of this host, of which the engine says what is wrong
                logger.debug("%s cannot be listed: %s", tier.root, error)
                continue
            unknown = True
            logger.warning("whether there are checkpoints of run %r is not known: %s", places.key.run, error)
    return Found(
        steps=_any_rank(trainer, steps),
        unsupported=_any_rank(trainer, unsupported),
        unknown=_any_rank(trainer, unknown),
    )


def is_restart(trainer: Any) -> bool:
    """True when the launcher of any rank says that this process is a restart. Collective: yes.

    Any rank: torchrun counts restarts on each host, and a host that is new in a job counts from zero.
    """
    return _any_rank(trainer, bool(environment().launch.restarts))


def continues_writer(trainer: Any, places: CheckpointPlaces, step: StepId) -> bool:
    """True when a rank's launcher says that this is a restart of the job that wrote ``step``. Collective: yes.

    Raises:
        TierError: the step is on a tier that cannot be listed. A start from scratch would be a loss in silence.
    """
    launch, problem = environment().launch, ""
    writers: list[Mapping[str, str]] = []
    if launch.job:
        try:
            # Not at a glance: the step is there, and who wrote it decides about the whole training.
            for tier in _tiers(trainer, places, glance=False):
                writers = [_writer(listing) for listing in scan(tier, places.key.run) if listing.id == step]
                if writers:
                    break
        except (TierError, OSError) as error:
            problem = str(error)
    continues = _any_rank(trainer, any(launch.continues(writer) for writer in writers))
    if not continues and _any_rank(trainer, bool(problem)):
        raise TierError(f"which job has written {step} cannot be told: {problem or 'see rank 0'}", retryable=True)
    return continues


def newest_step(trainer: Any, places: CheckpointPlaces) -> StepId | None:
    """The newest complete step that this rank sees. Collective: no."""
    found = [listing.id for listing in _listings(trainer, places) if listing.manifest is not None]
    for tier in _tiers(trainer, places):
        found += [file.manifest.id for file in single_files_of(tier, places.key.run)]
    return max(found, default=None)


def newest_file(key: EngineKey, *, prefer: Iterable[str] = ()) -> set[str]:
    """The path of the newest step, if its job has left only files; empty otherwise.

    Args:
        prefer: of the names of that step, one of these paths.
    """
    for file in single_files_of(LocalTier(key.directory), key.run)[-1:]:
        found = os.path.join(key.directory, file.name)
        return {next((path for path in sorted(prefer) if os.path.samefile(path, found)), found)}
    return set()


def _listings(trainer: Any, places: CheckpointPlaces) -> Iterator[StepListing]:
    for tier in _tiers(trainer, places):
        try:
            yield from scan(tier, places.key.run)
        except (TierError, OSError, UnsupportedFormat) as error:
            logger.debug("%s cannot be listed: %s", tier.root, error)


def _writer(listing: StepListing) -> Mapping[str, str]:
    return next((record.job for record in listing.records.values() if record.job), {})


def _tiers(trainer: Any, places: CheckpointPlaces, *, glance: bool = True) -> Iterator[Tier]:
    """The tiers this rank looks at: the folder of its host, and rank 0 also at the remote ones."""
    yield open_tier(places.local.directory)
    if trainer.is_global_zero:
        for remote in places.remotes:
            options = {"storage_options": dict(remote.storage_options)} if remote.storage_options else {}
            yield open_tier(remote.address, glance=glance, **options)


def _any_rank(trainer: Any, decision: bool) -> bool:
    return bool(trainer.strategy.reduce_boolean_decision(decision, all=False))
