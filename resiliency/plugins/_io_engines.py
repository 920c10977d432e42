"""Engines of :class:`~resiliency.plugins.checkpoint_io.TieredIO`: one for each folder and run of a process.

Several Trainers of one process may have a plugin each and save into the same folder, one after the other or in turns. A
second engine would be refused there, as another job is; so they use the same one, and the last to let go closes it.
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
        engine: opened at the first save.
        users: numbers of the plugins that hold it.
    """

    directory: str
    engine: Checkpointer
    users: set[int] = field(default_factory=set)


#: By process (a forked child must not use its parent's), folder and run.
_engines: dict[tuple[int, str, str], FolderEngine] = {}
_lock = threading.Lock()


class EngineUse:
    """The engines that one plugin holds. Thread: any.

    Args:
        number: of the plugin, unique in the process.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: set[tuple[int, str, str]] = set()

    def holds(self, directory: str, run: str | None) -> bool:
        """True when :meth:`take` has been called for it, and not :meth:`release` since."""
        return _key(directory, run) in self._held

    def take(
        self, directory: str, run: str | None, options: CheckpointerOptions, *, durable: bool = True
    ) -> FolderEngine:
        """The engine of a folder and run; held until :meth:`release`.

        Args:
            options, durable: of the engine and its folder, when no other plugin has made it before.

        Raises:
            ConfigError: the run or the options cannot work.
        """
        key = _key(directory, run)
        with _lock:
            found = _engines.get(key)
            if found is None:
                # Lightning calls the plugin on one rank with the whole state: for the engine, a job of one rank.
                only_files = not environment().wants_log
                local = LocalTierOptions(directory=directory, durable=durable, only_files=only_files)
                engine = Checkpointer(local, run=run, rank=0, world_size=1, options=options)
                found = _engines[key] = FolderEngine(directory, engine)
            found.users.add(self._number)
        self._held.add(key)
        return found

    def release(self, timeout: timedelta) -> None:
        """Lets go of all engines; those that nobody holds are closed, once their saves are durable.

        Blocks: up to ``timeout`` for each.
        """
        while self._held:
            self._release(next(iter(self._held)), timeout)

    def release_one(self, directory: str, run: str | None, timeout: timedelta) -> None:
        """As :meth:`release`, for one folder."""
        self._release(_key(directory, run), timeout)

    def _release(self, key: tuple[int, str, str], timeout: timedelta) -> None:
        self._held.discard(key)
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
