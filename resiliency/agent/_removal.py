"""Deletes steps from the local tier, and recycles their shard files.

A shard file with its pages is given back to its rank instead of deleted, until the rank has enough free files.
The order of a deletion is that of :func:`resiliency.storage.deletion.delete_step`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable

from resiliency.agent._reporter import Notify
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import FileFreed, FileGone
from resiliency.storage.catalog import step_prefix
from resiliency.storage.deletion import delete_names, delete_step
from resiliency.storage.manifest import ARENA_DIR, META_DIR
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier

__all__ = ["Remover"]

logger = logging.getLogger(__name__)

#: Free shard files kept per rank.
_SPARE_FILES = 2


class Remover:
    """Deletes the steps it is given from the local tier, for one run. Thread: one at a time.

    Args:
        config: of this attempt.
        tier: the local tier.
        notify: sends a message to a rank, here that one of its files can be used again or was deleted.
    """

    def __init__(self, config: AgentConfig, tier: LocalTier, notify: Notify) -> None:
        self._config, self._tier, self._notify = config, tier, notify
        self._run = os.path.join(config.local.address, META_DIR, config.run)
        self._arena = os.path.join(self._run, ARENA_DIR)

    def owns(self, rank: int) -> bool:
        """True when this agent deletes the files of a rank: its own ranks, and for rank 0's agent also the ranks of a
        larger job before this one."""
        ranks = self._config.local_ranks
        return rank in ranks or (0 in ranks and rank >= self._config.world_size)

    def delete(self, step: StepId, names: Iterable[str]) -> None:
        """Deletes this agent's part of a step, and the names that still point to it.

        Raises:
            OSError, TierError: a file cannot be removed; another call continues from there.
        """
        folder = os.path.join(self._tier.root, step_prefix(self._config.run, step).rstrip("/"))
        owned = {name: rank for name in _listing(folder) if (rank := _rank_of(name)) is not None and self.owns(rank)}
        delete_step(
            self._tier,
            self._config.run,
            step,
            files=owned,
            names=names,
            remove_shard=lambda name: self._recycle(owned[name], os.path.join(folder, name)),
        )

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
        """Deletes the run's folder, those of ``names`` that point into it, and parent folders left empty."""
        delete_names(self._tier, self._config.run, names)
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
