"""Deletes steps from the local tier. Large shard files go to the file pool, for later saves.

The order of a deletion is that of :func:`resiliency.storage.deletion.delete_step`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress

from resiliency.agent._fence import Fence
from resiliency.agent.config import AgentConfig
from resiliency.agent.file_pool import FilePool
from resiliency.errors import AgentError
from resiliency.storage.catalog import step_prefix
from resiliency.storage.deletion import delete_step
from resiliency.storage.manifest import COMMIT_MARK, rank_of_shard
from resiliency.storage.names import delete_names
from resiliency.storage.shard_file import STOCK_METADATA
from resiliency.storage.single_files import remove_run_folder
from resiliency.storage.step_id import StepId
from resiliency.storage.stock_folder import is_stock_file
from resiliency.storage.tiers.local import LocalTier

__all__ = ["Remover"]

logger = logging.getLogger(__name__)

#: Stands for the rank of a stock file beside the shards, which goes with shard 0 but is of no use to a later save.
_NO_RANK = -1


class Remover:
    """Deletes given steps of one run from the local tier. Thread: one at a time.

    Args:
        config: of this attempt.
        tier: the local tier.
        pool: receives the files that later saves may use.
        fence: of this attempt.
    """

    def __init__(self, config: AgentConfig, tier: LocalTier, pool: FilePool, fence: Fence) -> None:
        self._config, self._tier, self._pool, self._fence = config, tier, pool, fence
        self._run = config.run_folder

    def owns(self, rank: int) -> bool:
        """True when this agent deletes the files of a rank: those of its own ranks, and for rank 0's agent also those
        of ranks that only a larger, earlier job had. In a folder that belongs to this host alone, those of all
        ranks."""
        ranks = self._config.local_ranks
        return not self._config.shared or rank in ranks or (0 in ranks and rank >= self._config.world_size)

    def delete(self, step: StepId, names: Iterable[str], *, all_ranks: bool = False) -> None:
        """Deletes this agent's part of a step (or all of it), and the names that still point to it.

        Raises:
            AgentError: a later attempt has started.
            OSError, TierError: a file cannot be removed; calling again continues from there.
        """
        folder = self._tier.location(step_prefix(self._config.run, step).rstrip("/"))
        files = _listing(folder)
        found = {name: rank for name in files if (rank := _rank_of(name)) is not None}
        found.update((name, _NO_RANK) for name in files if is_stock_file(name))
        owned = {name: rank for name, rank in found.items() if all_ranks or self.owns(max(rank, 0))}
        first = [name for name in files if name in (COMMIT_MARK, STOCK_METADATA)]
        delete_step(
            self._tier,
            self._config.run,
            step,
            files=[*owned, *first],
            names=names,
            remove_shard=lambda name: self._remove(owned[name], os.path.join(folder, name)),
            before_each=self._fence.check,
        )

    def _remove(self, rank: int, path: str) -> None:
        with suppress(FileNotFoundError):  # another agent of this host has already removed it
            if rank == 0 or rank in self._config.local_ranks:
                self._pool.use_again(path)
            else:
                os.unlink(path)

    def drop_run(self, names: Iterable[str]) -> None:
        """Deletes the run's folder, those of ``names`` that point into it, and parent folders left empty.

        Raises:
            AgentError: a later attempt has started.
        """
        delete_names(self._tier, self._config.run, names)
        if not remove_run_folder(self._run, self._tier.location(self._fence.staging)):
            raise AgentError("a later attempt has started")
        with suppress(OSError):
            os.rmdir(self._config.local.address)  # if it is empty now


def _listing(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _rank_of(name: str) -> int | None:
    if (rank := rank_of_shard(name)) is not None:
        return rank
    if not name.startswith("shard-"):
        return None
    digits = name.removeprefix("shard-").split(".")[0]
    return int(digits) if digits.isdigit() else None
