"""A ``CheckpointIO`` plugin that saves with the checkpoint engine: ``Trainer(plugins=[TieredCheckpointIO()])``.

Stock Lightning calls a plugin's save on rank 0 only (DDP, single device), offers the plugin no hook before the
optimizer step, and expects that the file can be read when the save returns. So a save copies, digests and commits
before it returns; only the fsync is left for the background. With
:class:`resiliency.callbacks.model_checkpoint.ModelCheckpoint` instead, every rank writes its share, the copy is lazy,
and training does not wait for the commit.

Checkpoints at addresses (``gs://``, ``memory://``), and states that the engine refuses, are written with ``torch.save``
as by stock Lightning.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.lightning_forms import dumped_form
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.stock_reader import is_stock_folder
from resiliency.errors import ResiliencyError, UnsupportedFormat
from resiliency.inspection.by_path import locate_and_load
from resiliency.inspection.stock_state import load_lightning_folder
from resiliency.plugins._io_engines import EngineUse, FolderEngine
from resiliency.plugins._lightning import in_a_run, torch_save_is_replaced, weights_only_of
from resiliency.plugins.namespaces import AdapterClass
from resiliency.storage.names import read_name
from resiliency.storage.shard_file import Identity
from resiliency.storage.stage import Stage
from resiliency.storage.tiers._address import local_path
from resiliency.storage.tiers.local import LocalTier
from resiliency.to_thread import to_thread

__all__ = ["TieredCheckpointIO", "build"]  # noqa: F822 - TieredCheckpointIO is built on first use

logger = logging.getLogger(__name__)

#: Errors of a full or failing disk: training goes on without the checkpoint.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
#: Most bytes of a file name, on every file system of Linux.
_LONGEST_NAME = 255
#: Most folders whose engines stay open: a name like "val/loss=0.1.ckpt" makes a folder for each checkpoint.
_MOST_FOLDERS = 4
_numbers = itertools.count()


class TieredIO:
    """A ``CheckpointIO`` that saves with the checkpoint engine and loads stock checkpoints and its own.

    The Lightning base class comes from the user's package, see :class:`AdapterClass`.

    Args:
        run: name of the run, see :class:`Checkpointer`.
        options: options of the engine; None: this process does the agent's work, because the save waits for it anyway.
        flush_timeout: the longest time that a save waits for its commit, and :meth:`teardown` for the disk.

    Threads: any thread; a lock lets one save or removal run at a time. Blocks: ``save_checkpoint`` for the copy and the
    commit; ``load_checkpoint`` for reading and checking.
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
        self._options = options or CheckpointerOptions(agent="embedded")
        self._flush_timeout = flush_timeout
        self._told_of_replaced = False
        #: True after the first teardown. A save that comes later closes its engine, because no teardown may follow.
        self._torn_down = False
        self._saved_last = ""  # folder of the newest save
        self._failed: dict[str, str] = {}  # folder -> path whose save failed there, if no save has succeeded since
        self._postponed: dict[str, list[str]] = {}  # folder -> paths to remove once a save succeeds there again
        self._start()

    def _start(self) -> None:
        """Creates the parts that are not pickled. Strategies that spawn processes pickle the plugin, and users pickle
        trainers."""
        self._lock = threading.RLock()  # because Lightning's AsyncCheckpointIO saves in a thread of its own
        self._engines = EngineUse(next(_numbers))
        # Also released when the plugin is collected, because no teardown follows a save of Fabric.
        self._at_end = weakref.finalize(self, self._engines.release, self._flush_timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_engines", "_at_end")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    # -- save -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint; when it returns, ``torch.load`` can read the file. Collective: no (rank 0).

        If the engine cannot save the checkpoint, ``torch.save`` does. On a full or failing disk it warns and returns,
        and the checkpoints that this one would have replaced are kept.

        Blocks: for the copy and the commit, not for the fsync.

        Raises:
            TypeError: ``storage_options`` is not None; the stock class raises it, too.
            Exception: what ``torch.save`` raises, for an object that cannot be pickled or a folder that cannot be used.
        """
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for"
                f" `{type(self).__name__}`, which has none per save; pass CheckpointerOptions to"
                " TieredCheckpointIO(options=...)"
            )
        place = place_of(path)
        if place is None or torch_save_is_replaced():
            if place is not None and not self._told_of_replaced:
                self._told_of_replaced = True
                logger.warning("other code has replaced torch.save (%r): it writes the checkpoints", torch.save)
            _stock(self).save_checkpoint(checkpoint, path)
            return
        directory, name = place
        with self._lock:
            try:
                self._save(directory, name, checkpoint)
            except ResiliencyError as error:  # torch.save does it, or raises
                unexpected = error.__cause__ is not None
                logger.warning(
                    "%s is written by torch.save, because the engine cannot: %s", path, error, exc_info=unexpected
                )
                try:
                    _stock(self).save_checkpoint(checkpoint, path)
                except OSError as failure:
                    if failure.errno not in _DISK_ERRORS:
                        raise
                    logger.warning(
                        "%s was not saved, the checkpoints it would have replaced are kept: %s", path, failure
                    )
                    self._failed[directory] = str(path)
                    return
            finally:
                of_trainer = isinstance(checkpoint, Mapping) and "pytorch-lightning_version" in checkpoint
                if self._is_last() or (of_trainer and not in_a_run()):
                    self._engines.release_one(directory, self._run, self._flush_timeout)
            self._failed.pop(directory, None)
            for other in self._postponed.pop(directory, []):
                if place_of(other) != place:
                    self.remove_checkpoint(other)

    def _save(self, directory: str, name: str, checkpoint: Mapping[str, Any]) -> None:
        """Saves with the engine and waits until the file exists.

        Raises:
            ResiliencyError: the save failed, or did not commit in ``flush_timeout``.
        """
        if not self._engines.holds(directory, self._run):
            self._engines.release_oldest(_MOST_FOLDERS - 1, self._flush_timeout)
        folder = self._take(directory)
        engine = folder.engine
        step = step_of(checkpoint, engine)
        ticket = engine.save(step, checkpoint, names=[name])
        if ticket is None and engine.flush(Stage.COMMITTED, timeout=self._flush_timeout):
            ticket = engine.save(step, checkpoint, names=[name])
        if ticket is None:
            raise ResiliencyError("the save was skipped, because the one before it is not recorded or no file was made")
        ticket.wait(Stage.COMMITTED, timeout=self._flush_timeout)
        found = _identity(directory, name)
        if found is None or found.id != ticket.id:
            raise ResiliencyError(f"the step was saved, but its name was not given to it; see {directory}")
        folder.names.add(name)
        self._saved_last = directory

    def _is_last(self) -> bool:
        """True when perhaps no teardown of this plugin follows: after the first teardown, and outside the main thread,
        because Lightning's AsyncCheckpointIO saves in a thread of its own and tears down only itself."""
        return self._torn_down or threading.current_thread() is not threading.main_thread()

    def _take(self, directory: str) -> FolderEngine:
        return self._engines.take(directory, self._run, self._options)

    # -- load -----------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of this library and verifies its digests, a stock file through torch, or the folder of a
        stock distributed checkpoint. Collective: no.

        Args:
            map_location: as for ``torch.load``; None: the CPU. A folder is loaded into CPU tensors.
            weights_only: False loads objects of any class. True loads user-defined classes only if they were passed to
                ``torch.serialization.add_safe_globals``. None: the default of this Lightning's stock class (before 2.6:
                False).
        """
        text = os.fspath(path)
        # A file names its run; a folder may contain several runs.
        run = self._run if os.path.isdir(text) else None
        allow_pickle = weights_only_of(self.namespace, weights_only) is False
        found = to_thread(lambda: locate_and_load(text, run=run, allow_pickle=allow_pickle))
        if found is None and is_stock_folder(text):
            folder = to_thread(lambda: load_lightning_folder(text, allow_pickle=allow_pickle))
            return dumped_form(folder, allow_pickle=allow_pickle)
        if found is None:
            return _stock_load(self, path, map_location, weights_only)
        loaded = dumped_form(found[1], allow_pickle=allow_pickle)
        if map_location is None or torch.device("cpu") == _device(map_location):
            return loaded
        # The digests are right. torch.load reads the file again, because it knows what any other location means.
        return _stock_load(self, path, map_location, weights_only)

    # -- remove ---------------------------------------------------------------------------------------------------

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint: its file at once, other files of its step in the background.

        After a save into the folder has failed, deletions there wait for the next save that succeeds.
        """
        place = place_of(path)
        if place is None:
            self._remove_file(path)
            return
        directory, name = place
        full = os.path.join(directory, name)
        with self._lock:
            if directory in self._failed:
                logger.warning("%s is kept, because %s was not saved", path, self._failed[directory])
                self._postponed.setdefault(directory, []).append(full)
                return
            found = None if os.path.islink(full) else _identity(directory, name)
            if found is None:
                if os.path.islink(full):  # save_last="link" makes links; only the link is deleted, not its target
                    os.unlink(full)
                else:
                    _stock(self).remove_checkpoint(path)
                return
            done_here = not self._engines.holds(directory, self._run)
            try:
                folder = self._take(directory)
                if found.run == folder.engine.run:
                    folder.engine.delete(name)
                folder.names.discard(name)
                # An engine keeps its newest step, which a restart needs, unless a newer one was saved elsewhere.
                done_here = done_here or (not folder.names and directory != self._saved_last)
            except ResiliencyError as error:
                logger.warning("%s is deleted, its step in %s is not: %s", path, directory, error)
            finally:
                if self._is_last() or done_here:
                    self._engines.release_one(directory, self._run, self._flush_timeout)
            self._remove_file(path)

    def _remove_file(self, path: Any) -> None:
        try:
            _stock(self).remove_checkpoint(path)
        except FileNotFoundError:
            # The stock class checks that the file exists and then removes it; the agent may have deleted it in between.
            logger.debug("%s was deleted already", path)

    def teardown(self) -> None:
        """Closes the engines that no other plugin uses, once their saves are durable.

        Blocks: up to ``flush_timeout`` for each folder.
        """
        with self._lock:
            self._engines.release(self._flush_timeout)
            self._torn_down = True


def place_of(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Folder and file name of a path; None for an address, and for a name that is too long for a file.

    A name that is too long is left to the stock class, which raises; the engine would leave a step without a name.
    """
    local = local_path(os.fspath(path))
    if local is None:
        return None
    folder, name = os.path.split(os.path.abspath(local))
    return None if len(os.fsencode(name)) > _LONGEST_NAME else (folder, name)


def _identity(directory: str, name: str) -> Identity | None:
    """Which step and run the file says it belongs to; None when the engine did not write it, or it does not exist."""
    try:
        return read_name(LocalTier(directory), name)
    except UnsupportedFormat:
        return None


def _device(location: Any) -> torch.device | None:
    """The device that a ``map_location`` of ``torch.load`` names; None when it is a function or a dict."""
    if isinstance(location, str | torch.device):
        return torch.device(location)
    return None


def step_of(checkpoint: Mapping[str, Any], engine: Checkpointer) -> int:
    """The checkpoint's ``global_step``; without one, the newest step plus one, so that saves stay in order.

    Blocks: without one, until earlier saves are committed.
    """
    step = checkpoint.get("global_step") if isinstance(checkpoint, Mapping) else None
    if isinstance(step, int) and step >= 0:
        return step
    engine.flush(Stage.COMMITTED)
    return max((known.step for known, _ in engine.steps()), default=-1) + 1


def _stock(io: TieredIO) -> Any:
    return importlib.import_module(f"{io.namespace}.plugins.io").TorchCheckpointIO()


def _stock_load(io: TieredIO, path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    stock = _stock(io)
    location: dict[str, Any] = {} if map_location is None else {"map_location": map_location}  # None: stock's default
    try:
        loaded: dict[str, Any] = stock.load_checkpoint(path, **location, weights_only=weights_only)
    except TypeError:
        # Lightning before 2.6 has no such argument.
        loaded = stock.load_checkpoint(path, **location)
    return loaded


_adapter = AdapterClass(__name__, "TieredCheckpointIO", TieredIO, base="plugins.io:TorchCheckpointIO")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
