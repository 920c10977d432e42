"""A ``CheckpointIO`` over the engine, for those who only pass a plugin: ``Trainer(plugins=[TieredCheckpointIO()])``.

Stock Lightning calls a plugin's save on rank 0 only (DDP, single device) and has no hook before the optimizer step, so
saves are copied before they return; digesting, committing and fsync go on in the background. With
:class:`resiliency.callbacks.model_checkpoint.ModelCheckpoint` every rank writes its share and the copy is lazy.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from resiliency.checkpoint.checkpointer import Checkpointer, Ticket
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.reader import load_path, locate
from resiliency.errors import ConfigError

__all__ = ["TieredCheckpointIO", "build"]

logger = logging.getLogger(__name__)


class TieredIO:
    """The methods; :func:`build` adds the namespace's base class.

    Args:
        run: name of the run, see :class:`Checkpointer`.
        options: of the engine.
        flush: how long :meth:`teardown` waits for the disk.

    Threads: training thread. Blocks: ``save_checkpoint`` for the copy; ``load_checkpoint`` for reading and checking.
    """

    def __init__(
        self, *, run: str | None = None, options: CheckpointerOptions | None = None, flush: timedelta = timedelta(minutes=10)
    ) -> None:
        super().__init__()
        self._run = run
        self._options = options
        self._flush = flush
        self._engines: dict[str, Checkpointer] = {}
        self._tickets: list[Ticket] = []

    def _engine(self, directory: str) -> Checkpointer:
        engine = self._engines.get(directory)
        if engine is None:
            if "://" in directory:
                raise ConfigError(
                    f"TieredCheckpointIO writes to folders, not to {directory}; use resiliency.callbacks.model_checkpoint.ModelCheckpoint"
                    " for addresses"
                )
            # The plugin is called on one rank with the whole state: for the engine that is a job of one rank.
            engine = Checkpointer(directory, run=self._run, rank=0, world_size=1, options=self._options)
            self._engines[directory] = engine
        return engine

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        """Copies the checkpoint into the arena and returns; the agent commits it. Collective: no (rank 0).

        Raises:
            TypeError: ``storage_options`` were passed; the engine has none per save.
            ConfigError: an object that cannot be stored.
        """
        if storage_options is not None:
            raise TypeError(
                "TieredCheckpointIO takes no storage_options per save; pass CheckpointerOptions to TieredCheckpointIO(options=...)"
            )
        directory, name = os.path.split(os.path.abspath(os.fspath(path)))
        step = checkpoint.get("global_step", 0)
        ticket = self._engine(directory).save(int(step), checkpoint, names=[name])
        if ticket is not None:
            self._tickets = [t for t in self._tickets if "committed" not in t.reached] + [ticket]

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads one of our checkpoints, or a stock file through torch. On CPU. Collective: no."""
        located = locate(os.fspath(path), run=self._run)
        if located is None:
            return _stock_load(self, path, map_location, weights_only)
        state, _ = load_path(located, allow_pickle=weights_only is False)
        loaded: dict[str, Any] = state
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint once everything saved before this call is committed."""
        directory, name = os.path.split(os.path.abspath(os.fspath(path)))
        if locate(os.fspath(path), run=self._run) is not None or directory in self._engines:
            self._engine(directory).delete(name)
        else:
            _stock(self).remove_checkpoint(path)

    def teardown(self) -> None:
        """Waits until everything is on disk and leaves the agent."""
        for engine in self._engines.values():
            engine.close(timeout=self._flush)
        self._engines.clear()


def _stock(io: TieredIO) -> Any:
    namespace: str = type(io).namespace  # type: ignore[attr-defined]
    return importlib.import_module(f"{namespace}.plugins.io").TorchCheckpointIO()


def _stock_load(io: TieredIO, path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    stock = _stock(io)
    try:
        loaded: dict[str, Any] = stock.load_checkpoint(path, map_location=map_location, weights_only=weights_only)
    except TypeError:
        # Lightning before 2.6 has no such argument.
        loaded = stock.load_checkpoint(path, map_location=map_location)
    return loaded


def build(namespace: str) -> type[Any]:
    """The plugin class for ``lightning.pytorch`` or ``pytorch_lightning``."""
    base = importlib.import_module(f"{namespace}.plugins.io").CheckpointIO
    return type("TieredCheckpointIO", (TieredIO, base), {"__module__": __name__, "__doc__": TieredIO.__doc__, "namespace": namespace})


def __getattr__(name: str) -> Any:
    if name == "TieredCheckpointIO":
        from resiliency.plugins._namespace import default_namespace

        return build(default_namespace())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
