"""Engines of :class:`~resiliency.plugins.checkpoint_io.TieredIO`: one per folder and run in a process.

Several Trainers of one process may each have a plugin and save into the same folder. The folder would refuse a second
engine as it refuses another job. So the plugins share one engine, and the last plugin that releases it closes it.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.settings import environment

__all__ = ["EngineUse", "FolderEngine"]

logger = logging.getLogger(__name__)


@dataclass
class FolderEngine:
    """The engine of one folder and run.

    Attributes:
        directory: the folder.
        engine: the engine; it opens at the first save.
        users: numbers of the plugins that hold the engine.
        names: of the checkpoints that were saved with it and not removed since.
    """

    directory: str
    engine: Checkpointer
    users: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


#: Engines by process id (a forked child must not use its parent's engines), folder and run.
_engines: dict[tuple[int, str, str], FolderEngine] = {}
_lock = threading.Lock()


class EngineUse:
    """The engines that one plugin holds. Thread: any.

    Args:
        number: number of the plugin, unique in the process.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: dict[tuple[int, str, str], None] = {}  # the one that was taken last is the last

    def holds(self, directory: str, run: str | None) -> bool:
        """True when this plugin has taken the engine of this folder and run and has not released it since."""
        return _key(directory, run) in self._held

    def take(
        self, directory: str, run: str | None, options: CheckpointerOptions, *, durable: bool = True
    ) -> FolderEngine:
        """The engine of a folder and run, created if necessary; held until :meth:`release`.

        Args:
            options, durable: settings of the engine and its folder; ignored when the engine exists already.

        Raises:
            ConfigError: the run or the options cannot work.
        """
        key = _key(directory, run)
        with _lock:
            found = _engines.get(key)
            if found is None:
                # Lightning calls the plugin on one rank with the whole state: for the engine this is a job of one rank.
                only_files = not environment().wants_log
                local = LocalTierOptions(directory=directory, durable=durable, only_files=only_files)
                engine = Checkpointer(local, run=run, rank=0, world_size=1, options=options)
                found = _engines[key] = FolderEngine(directory, engine)
            found.users.add(self._number)
        self._held.pop(key, None)
        self._held[key] = None
        return found

    def release(self, timeout: timedelta) -> None:
        """Releases all engines; an engine that no plugin holds any more is closed, once its saves are durable.

        Blocks: up to ``timeout`` for each engine.
        """
        self.release_oldest(0, timeout)

    def release_oldest(self, kept: int, timeout: timedelta) -> None:
        """Like :meth:`release`, for all engines but the ``kept`` ones that were taken last."""
        while len(self._held) > kept:
            self._release(next(iter(self._held)), timeout)

    def release_one(self, directory: str, run: str | None, timeout: timedelta) -> None:
        """Like :meth:`release`, for the engine of one folder and run."""
        self._release(_key(directory, run), timeout)

    def _release(self, key: tuple[int, str, str], timeout: timedelta) -> None:
        self._held.pop(key, None)
        with _lock:
            found = _engines.get(key)
            if found is None or key[0] != os.getpid():
                return
            found.users.discard(self._number)
            if found.users:
                return
            del _engines[key]
        found.engine.close(timeout=timeout)


def _key(directory: str, run: str | None) -> tuple[int, str, str]:
    return os.getpid(), os.path.realpath(directory), run or environment().run
