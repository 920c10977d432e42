"""A ``CheckpointIO`` that saves with the engine: ``Trainer(plugins=[TieredCheckpointIO()])``.

Stock Lightning calls a plugin's save on rank 0 only (DDP, single device) and has no hook before the optimizer step, so
saves are copied and digested before they return; the agent commits and fsyncs them in the background. With
:class:`resiliency.callbacks.model_checkpoint.ModelCheckpoint` every rank writes its share and the copy is lazy.
"""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

from resiliency.checkpoint.checkpointer import Checkpointer, Ticket
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.errors import ConfigError
from resiliency.inspection.by_path import load_path, locate
from resiliency.plugins.namespaces import AdapterClass
from resiliency.storage.manifest import META_DIR, NameFile
from resiliency.storage.stage import Stage

__all__ = ["TieredCheckpointIO", "build"]  # noqa: F822 - TieredCheckpointIO is built on first use

logger = logging.getLogger(__name__)


class TieredIO:
    """The methods; the base class comes from the user's Lightning package, see :class:`AdapterClass`.

    Args:
        run: name of the run, see :class:`Checkpointer`.
        options: of the engine.
        flush_timeout: how long :meth:`teardown` waits for the disk.

    Threads: training thread. Blocks: ``save_checkpoint`` for the copy; ``load_checkpoint`` for reading and checking.
    """

    #: The Lightning package the class is built for; added by ``AdapterClass``.
    namespace: ClassVar[str]

    def __init__(
        self,
        *,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__()
        self._run = run
        self._options = options
        self._flush_timeout = flush_timeout
        self._engines: dict[str, Checkpointer] = {}
        self._latest: dict[str, Ticket | None] = {}  # directory -> its latest save, None when it was skipped
        self._postponed_deletes: dict[str, list[str]] = {}  # directory -> names to delete once a save succeeds again
        self._at_end: weakref.finalize[..., Any] | None = None

    def _engine(self, directory: str) -> Checkpointer:
        engine = self._engines.get(directory)
        if engine is None:
            # Lightning calls the plugin on one rank with the whole state: for the engine, a job of one rank.
            engine = Checkpointer(directory, run=self._run, rank=0, world_size=1, options=self._options)
            self._engines[directory] = engine
            if self._at_end is None:
                # No teardown follows a trainer.save_checkpoint() after fit. Not made in the constructor, because
                # strategies that spawn processes pickle the plugin.
                self._at_end = weakref.finalize(self, _close, self._engines, self._flush_timeout)
        return engine

    def _place(self, path: str | os.PathLike[str]) -> tuple[str, str]:
        """Folder and name of a path."""
        text = os.fspath(path)
        if "://" in text:
            raise ConfigError(
                f"TieredCheckpointIO writes to folders, not to {text}; use"
                " resiliency.callbacks.model_checkpoint.ModelCheckpoint for addresses"
            )
        return os.path.split(os.path.abspath(text))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Copies the checkpoint into the arena and returns; the agent commits it. Collective: no (rank 0).

        Raises:
            TypeError: ``storage_options`` were passed; the engine has none per save.
            ConfigError: an object that cannot be stored.
        """
        if storage_options is not None:
            raise TypeError(
                "TieredCheckpointIO takes no storage_options per save;"
                " pass CheckpointerOptions to TieredCheckpointIO(options=...)"
            )
        directory, name = self._place(path)
        engine = self._engine(directory)
        step = _step_of(checkpoint, engine)
        ticket = engine.save(step, checkpoint, names=[name])
        if ticket is None and engine.flush(Stage.COMMITTED, timeout=self._flush_timeout):
            # The calling callback assumes that this save succeeded and may delete others: skipping must be rare.
            ticket = engine.save(step, checkpoint, names=[name])
        self._latest[directory] = ticket
        if ticket is None:
            logger.warning("%s was not saved; the checkpoints it would have replaced are kept", path)
            return
        postponed = [other for other in self._postponed_deletes.pop(directory, []) if other != name]
        if postponed:
            engine.delete(*postponed)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads one of our checkpoints, or a stock file through torch. On CPU. Collective: no.

        Objects of user-defined classes are loaded only with ``weights_only=False``.
        """
        self._commit_all()
        located = locate(os.fspath(path), run=self._run)
        if located is None:
            return _stock_load(self, path, map_location, weights_only)
        state, _ = load_path(located, allow_pickle=weights_only is False)
        loaded: dict[str, Any] = state
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint once everything saved before this call is committed. Blocks: no, except for a stock
        file.

        After a skipped save, deletion waits for the next save that is not skipped.
        """
        directory, name = self._place(path)
        full = os.path.join(directory, name)
        if (
            directory not in self._engines
            and not os.path.isdir(os.path.join(directory, META_DIR))
            and not os.path.lexists(full)
        ):
            return
        if os.path.lexists(full) and not os.path.islink(full) and not _is_ours(full):
            self._remove_stock(directory, full)
        elif directory in self._latest and self._latest[directory] is None:
            self._postponed_deletes.setdefault(directory, []).append(name)
        else:
            self._engine(directory).delete(name)

    def _remove_stock(self, directory: str, path: str) -> None:
        """Deletes a stock checkpoint of an earlier run, after the checkpoint that replaces it is committed."""
        self._commit_all()
        latest = self._latest.get(directory)
        if directory in self._latest and (latest is None or not latest.has_reached(Stage.COMMITTED)):
            logger.warning("%s is kept, because the checkpoint saved after it is not committed", path)
            return
        _stock(self).remove_checkpoint(path)

    def _commit_all(self) -> None:
        """Waits until all saves are committed, so that their paths can be read. Blocks: up to ``flush_timeout``."""
        for directory, engine in self._engines.items():
            if not engine.flush(Stage.COMMITTED, timeout=self._flush_timeout):
                logger.warning("not every checkpoint of %s was committed within %s", directory, self._flush_timeout)

    def teardown(self) -> None:
        """Waits until all saves are durable and closes the engines. A later save opens one again.

        Blocks: up to ``flush_timeout``.
        """
        _close(self._engines, self._flush_timeout)
        if self._at_end is not None:
            self._at_end.detach()
            self._at_end = None


def _close(engines: dict[str, Checkpointer], flush_timeout: timedelta) -> None:
    while engines:
        _, engine = engines.popitem()
        engine.close(timeout=flush_timeout)


def _step_of(checkpoint: Mapping[str, Any], engine: Checkpointer) -> int:
    """The checkpoint's ``global_step``; without one, the newest step plus one, so that saves stay in order."""
    step = checkpoint.get("global_step")
    if step is not None:
        return int(step)
    engine.flush(Stage.COMMITTED)
    return max((known.step for known, _ in engine.steps()), default=-1) + 1


def _is_ours(path: str) -> bool:
    """True for a name file, False for anything else, such as a stock checkpoint."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return NameFile.from_json(file.read(65536)) is not None


def _stock(io: TieredIO) -> Any:
    return importlib.import_module(f"{io.namespace}.plugins.io").TorchCheckpointIO()


def _stock_load(io: TieredIO, path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    stock = _stock(io)
    try:
        loaded: dict[str, Any] = stock.load_checkpoint(path, map_location=map_location, weights_only=weights_only)
    except TypeError:
        # Lightning before 2.6 has no such argument.
        loaded = stock.load_checkpoint(path, map_location=map_location)
    return loaded


_adapter = AdapterClass(__name__, "TieredCheckpointIO", TieredIO, base="plugins.io:CheckpointIO")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
