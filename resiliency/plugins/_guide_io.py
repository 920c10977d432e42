"""Common code of the guide's CheckpointIO plugins: checked arguments, and saves in the background.

``MinCkptOverheadCheckpointIO``, ``InClusterLocalCheckpointIO``, ``CombinedCheckpointIO`` and
``PersistentCheckpointProcessIO`` are :class:`~resiliency.plugins.checkpoint_io.TieredIO` with other settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.ticket import Ticket
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.plugins._io_engines import FolderEngine
from resiliency.plugins.checkpoint_io import TieredIO, place_of, step_of
from resiliency.storage.stage import Stage

__all__ = ["GuideIO", "IOArguments"]

logger = logging.getLogger(__name__)

#: Keys that the ``storage_options`` of a save may have.
_STORAGE_OPTIONS = ("content_metadata", "finalize_fn", "is_persistent_storage")


@dataclass(frozen=True, kw_only=True)
class IOArguments:
    """The guide's arguments of a CheckpointIO, checked.

    Attributes:
        save_ckpt_format: must be "torch_dist"; files are nevertheless stock torch checkpoints.
        load_directly_on_device: a load without ``map_location`` puts tensors on this process's GPU, if it has one.
        load_strictness: None or "assume_ok_unexpected"; has no effect, because the LightningModule decides how strict
            a load is.
        async_save: a save returns when the state is copied; the commit happens in the background.
        torch_dist_multiproc: threads of a rank that copy a save; None: as the engine's options say.
        assume_constant_structure: has no effect: the engine keeps its plan as long as a comparison finds the state's
            structure unchanged.
        parallel: names of those arguments, set to True, that ask to share the work among ranks.
        use_ckpt_load_replication: asks that ranks without a local copy get it from other ranks; has no effect, which is
            logged.
        local_ckpt_dir: saves below this folder are in the local tier: committed, but not flushed to the disk.

    Raises:
        ConfigError: a value that this library cannot do.
    """

    save_ckpt_format: str = "torch_dist"
    load_directly_on_device: bool = False
    load_strictness: Any = None
    async_save: bool = False
    torch_dist_multiproc: int | None = None
    assume_constant_structure: bool = False
    parallel: tuple[str, ...] = ()
    use_ckpt_load_replication: bool = False
    local_ckpt_dir: str | None = None

    def __post_init__(self) -> None:
        if self.save_ckpt_format != "torch_dist":
            raise ConfigError(
                f"save_ckpt_format={self.save_ckpt_format!r} cannot be written; pass 'torch_dist': checkpoints"
                f" are files"
                " that torch.load reads"
            )
        strictness = getattr(self.load_strictness, "value", self.load_strictness)  # may be a member of an enum
        if strictness not in (None, "assume_ok_unexpected"):
            raise ConfigError(
                f"load_strictness={self.load_strictness!r}: this plugin only reads the file; set strict_loading of the"
                " LightningModule instead"
            )
        threads = self.torch_dist_multiproc
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ConfigError(f"torch_dist_multiproc={threads!r}; pass a number of threads, 1 or more, or None")
        if self.local_ckpt_dir is not None and "://" in self.local_ckpt_dir:
            raise ConfigError(f"local_ckpt_dir={self.local_ckpt_dir!r} is an address; pass a folder of this host")

    def options(self, given: CheckpointerOptions | None) -> CheckpointerOptions:
        """The engine's options: those given, with ``torch_dist_multiproc`` as the number of copy threads if it is set.

        ``given`` is None: this process does the agent's work.
        """
        options = given or CheckpointerOptions(agent="embedded")
        return (
            options if self.torch_dist_multiproc is None else replace(options, copy_threads=self.torch_dist_multiproc)
        )

    def notes(self) -> list[str]:
        """Messages for the user, one for each argument whose request the plugin does not carry out."""
        notes = []
        if self.parallel:
            notes.append(
                f"{', '.join(self.parallel)}: Lightning calls a CheckpointIO plugin on rank 0 alone; with this"
                f" library's"
                " ModelCheckpoint every rank writes and reads its share"
            )
        if self.use_ckpt_load_replication:
            notes.append(
                "use_ckpt_load_replication: each rank reads its host's folder; a host without a copy needs a"
                " ModelCheckpoint"
                " with local_dir= and a dirpath= that all hosts see"
            )
        return notes

    def is_local(self, path: str) -> bool:
        """True when a path is at or below ``local_ckpt_dir``."""
        if self.local_ckpt_dir is None or "://" in path:
            return False
        root = os.path.realpath(self.local_ckpt_dir)
        return os.path.commonpath([root, os.path.realpath(path)]) == root


@dataclass
class _Running:
    """A save into one folder that goes on in the background."""

    ticket: Ticket
    name: str
    finalize: Callable[[], Any] | None


class GuideIO(TieredIO):
    """Base class of the guide's plugins.

    ``storage_options`` of a save may have ``is_persistent_storage`` (False: commit, but do not flush to the disk),
    ``finalize_fn`` (called once the checkpoint is committed) and ``content_metadata`` (ignored, because the checkpoint
    describes itself).

    Threads, Collective, Blocks: as :class:`TieredIO`; with ``async_save`` a save blocks for the copy, and until the
    previous save into the same folder is committed. A failure in the background is logged as a warning; deletions then
    wait for the next save that succeeds.
    """

    def __init__(
        self,
        arguments: IOArguments,
        *,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__(run=run, options=arguments.options(options), flush_timeout=flush_timeout)
        self._arguments = arguments
        self._persistent: bool | None = None  # is_persistent_storage of the running call of save_checkpoint
        self._finalize: Callable[[], Any] | None = None
        for note in arguments.notes():
            logger.info("%s: %s", type(self).__name__, note)

    def _start(self) -> None:
        super()._start()
        self._running: dict[str, _Running] = {}  # folder -> the save in the background
        self._waiting: dict[str, list[str]] = {}  # folder -> paths to remove once that save is committed

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in super().__getstate__().items()
            if key not in ("_running", "_waiting", "_finalize")
        } | {"_finalize": None}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As :meth:`TieredIO.save_checkpoint`; see the class for ``storage_options``.

        Raises:
            TypeError: ``storage_options`` is no dict, or has an unknown key.
        """
        told = _told(storage_options)
        with self._lock:
            self._persistent, self._finalize = told.get("is_persistent_storage"), told.get("finalize_fn")
            try:
                super().save_checkpoint(checkpoint, path)
                if self._finalize is not None:  # _save has not handed it to a save in the background
                    self._finalize()
            finally:
                self._persistent = self._finalize = None

    def _take(self, directory: str) -> FolderEngine:
        local = self._arguments.is_local(directory) if self._persistent is None else not self._persistent
        return self._engines.take(directory, self._run, self._options, durable=not local)

    def _save(self, directory: str, name: str, checkpoint: Mapping[str, Any]) -> None:
        if not self._arguments.async_save or self._is_last():  # no later call may finish a save in the background
            super()._save(directory, name, checkpoint)
            return
        self._finish(directory)
        engine = self._take(directory).engine
        ticket = engine.save(step_of(checkpoint, engine), checkpoint, names=[name])
        if ticket is None:
            raise ResiliencyError("the save was skipped, because no file could be made for it")
        self._running[directory] = _Running(ticket, name, self._finalize)
        self._finalize = None

    def _finish(self, directory: str) -> None:
        """Waits until the folder's save in the background is committed, then carries out the removals that waited for
        it and calls its ``finalize_fn``. When the save failed, warns and keeps the checkpoints.

        Blocks: up to ``flush_timeout``.
        """
        running, waiting = self._running.pop(directory, None), self._waiting.pop(directory, [])
        if running is None:
            return
        path = os.path.join(directory, running.name)
        try:
            running.ticket.wait(Stage.COMMITTED, timeout=self._flush_timeout)
        except ResiliencyError as error:
            logger.warning("%s was not saved, the checkpoints it would have replaced are kept: %s", path, error)
            self._failed[directory] = path
            self._postponed.setdefault(directory, []).extend(waiting)
            return
        for other in waiting:
            if other != path:
                super().remove_checkpoint(other)
        if running.finalize is not None:
            running.finalize()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        with self._lock:
            place = place_of(path)
            if place is not None:
                self._finish(place[0])
        if map_location is None and self._arguments.load_directly_on_device:
            map_location = _device()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        place = place_of(path)
        with self._lock:
            if place is not None and place[0] in self._running:
                if not self._running[place[0]].ticket.has_reached(Stage.COMMITTED):
                    self._waiting.setdefault(place[0], []).append(os.path.join(*place))
                    return
                self._finish(place[0])
            super().remove_checkpoint(path)

    def teardown(self) -> None:
        with self._lock, ExitStack() as stack:  # so that all folders are finished even if a finalize_fn raises
            stack.callback(super().teardown)
            for directory in list(self._running):
                stack.callback(self._finish, directory)


def _told(storage_options: Any) -> Mapping[str, Any]:
    if storage_options is None:
        return {}
    if not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options={storage_options!r}: pass a dict with any of {', '.join(_STORAGE_OPTIONS)}")
    unknown = sorted(set(storage_options) - set(_STORAGE_OPTIONS))
    if unknown:
        raise TypeError(f"storage_options has {', '.join(unknown)}; known are {', '.join(_STORAGE_OPTIONS)}")
    return storage_options


def _device() -> torch.device | None:
    """This process's GPU; None when CUDA is not available."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
