"""Taking checkpoints off the local tier: which files go in which order, and which come back as free ones.

The manifest goes first, so that what is half deleted is no step; then names, records, shards. A shard file is not
deleted but handed back to its rank, with its pages, until the rank has enough of them.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable

from resiliency import faultpoints
from resiliency.agent._reporter import Notify
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import FileFreed, FileGone
from resiliency.storage.catalog import read_name, step_prefix
from resiliency.storage.manifest import ARENA_DIR, MANIFEST, META_DIR, StepId
from resiliency.storage.tiers.local import LocalTier

__all__ = ["Remover"]

logger = logging.getLogger(__name__)

#: Free shard files kept per rank; more are deleted.
_SPARE_FILES = 2


class Remover:
    """Removes steps of one run. Thread: one at a time. What it removes was decided elsewhere.

    Args:
        config: of this attempt.
        tier: the local tier.
        notify: tells a rank of a file that is free again, or gone.
    """

    def __init__(self, config: AgentConfig, tier: LocalTier, notify: Notify) -> None:
        self._config, self._tier, self._notify = config, tier, notify
        self._run = os.path.join(config.local.address, META_DIR, config.run)
        self._arena = os.path.join(self._run, ARENA_DIR)

    def owns(self, rank: int) -> bool:
        """This agent deletes the files of its own ranks, and rank 0's agent those of ranks the job no longer has."""
        ranks = self._config.local_ranks
        return rank in ranks or (0 in ranks and rank >= self._config.world_size)

    def delete(self, step: StepId, names: Iterable[str]) -> None:
        """Deletes this agent's part of a step, and the names that still mean it.

        Raises:
            OSError, TierError: a file cannot be removed; doing it again goes on where this ended.
        """
        prefix = step_prefix(self._config.run, step)
        folder = os.path.dirname(os.path.join(self._tier.root, prefix, MANIFEST))
        faultpoints.hit("agent.prune.manifest")
        self._tier.delete(prefix + MANIFEST)
        for name in names:
            pointer = read_name(self._tier, name)
            if pointer is not None and pointer.id == step and pointer.run == self._config.run:
                self._tier.delete(name)
        for name, _ in self._files(folder):
            if name.endswith(".json"):
                faultpoints.hit("agent.prune.record")
                self._tier.delete(prefix + name)
        for name, rank in self._files(folder):
            faultpoints.hit("agent.prune.shard")
            self._recycle(rank, os.path.join(folder, name))
        try:
            os.rmdir(folder)
        except OSError:
            logger.debug("%s still holds files of other hosts", folder)

    def _files(self, folder: str) -> list[tuple[str, int]]:
        """Names of the files there that are this agent's to delete, with their ranks."""
        found = [(name, _rank_of(name)) for name in _listing(folder)]
        return [(name, rank) for name, rank in found if rank is not None and self.owns(rank)]

    def _recycle(self, rank: int, path: str) -> None:
        inode = os.stat(path).st_ino
        ours = rank in self._config.local_ranks
        if ours and sum(name.startswith(_slots_of(rank)) for name in _listing(self._arena)) < _SPARE_FILES:
            os.makedirs(self._arena, exist_ok=True)
            target = os.path.join(self._arena, f"{_slots_of(rank)}i{inode:08d}.slot")
            os.rename(path, target)
            self._notify(rank, FileFreed(inode=inode, path=target))
            return
        os.unlink(path)
        if ours:
            self._notify(rank, FileGone(inode=inode))

    def drop_free_files(self) -> None:
        """Deletes the free files of this agent's ranks."""
        for name in _listing(self._arena):
            if any(name.startswith(_slots_of(rank)) for rank in self._config.local_ranks):
                os.unlink(os.path.join(self._arena, name))

    def drop_run(self, names: Iterable[str]) -> None:
        """Deletes the whole run, with these names as far as they are its own, and folders that are empty then."""
        for name in names:
            pointer = read_name(self._tier, name)
            if pointer is not None and pointer.run == self._config.run:
                self._tier.delete(name)
        shutil.rmtree(self._run)
        for folder in (os.path.dirname(self._run), self._config.local.address):
            if os.path.isdir(folder) and not os.listdir(folder):
                os.rmdir(folder)


def _listing(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _slots_of(rank: int) -> str:
    return f"shard-{rank:05d}-"


def _rank_of(name: str) -> int | None:
    if not name.startswith("shard-"):
        return None
    digits = name.removeprefix("shard-").split(".")[0]
    return int(digits) if digits.isdigit() else None
