"""The older library's CheckpointIO plugins: :class:`~resiliency.plugins.checkpoint_io.TieredIO` with other arguments,
and saves in the background."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.ticket import Ticket
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.plugins._io_engines import FolderEngine
from resiliency.plugins.checkpoint_io import TieredIO, place_of, step_of
from resiliency.plugins.namespaces import AdapterClass
from resiliency.storage.stage import Stage

__all__ = ["ARGUMENTS", "OlderIO", "adapter"]

logger = logging.getLogger(__name__)

_COMMON = {
    "save_ckpt_format": "torch_dist",
    "load_directly_on_device": True,
    "load_strictness": None,
    "async_save": False,
    "torch_dist_multiproc": None,
    "assume_constant_structure": False,
}
_PARALLEL = ("parallel_save", "parallel_save_within_dp", "parallel_load")
_TIERED = {
    **_COMMON,
    **{f"{tier}_{name}": False for tier in ("persistent", "local") for name in _PARALLEL},
    "use_ckpt_load_replication": False,
    "local_ckpt_dir": None,
}
#: Arguments of each plugin and their defaults, in the older library's order.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "MinCkptOverheadCheckpointIO": {**_COMMON, **dict.fromkeys(_PARALLEL, False)},
    "InClusterLocalCheckpointIO": _TIERED,
    "CombinedCheckpointIO": _TIERED,
    "PersistentCheckpointProcessIO": {"checkpoint_io": inspect.Parameter.empty, "profile_dir": None},
}
#: Keys that the ``storage_options`` of a save may have.
_STORAGE_OPTIONS = ("content_metadata", "finalize_fn", "is_persistent_storage")


@dataclass
class _Running:
    """A save into one folder that goes on in the background, and the paths to remove once it is committed."""

    ticket: Ticket
    path: str
    finalize: Callable[[], Any] | None
    replaces: list[str] = field(default_factory=list)


class OlderIO(TieredIO):
    """Saves with this library's engine, with the arguments of one of the older library's plugins.

    ``storage_options`` of a save may have ``is_persistent_storage`` (False: commit, but do not flush to the disk),
    ``finalize_fn`` (called once the checkpoint is committed) and ``content_metadata`` (ignored, because the checkpoint
    describes itself).

    Threads, Collective, Blocks: as :class:`TieredIO`; with ``async_save`` a save blocks for the copy, and until the
    previous save into the same folder is committed. A failure in the background is logged as a warning; deletions then
    wait for the next save that succeeds.

    Args:
        run, options, flush_timeout: as for :class:`TieredIO`.
        arguments: those of :data:`ARGUMENTS`; docs/migration.md says what each does.

    Raises:
        ConfigError: a value that this library cannot do; the message says what to pass instead.
    """

    def __init__(
        self,
        *,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
        **arguments: Any,
    ) -> None:
        _check(arguments)
        options = options or CheckpointerOptions(agent="embedded")
        threads = arguments.get("torch_dist_multiproc")
        options = options if threads is None else replace(options, copy_threads=threads)
        super().__init__(run=run, options=options, flush_timeout=flush_timeout)
        self._arguments = arguments
        self._persistent: bool | None = None  # is_persistent_storage of the running call of save_checkpoint
        self._finalize: Callable[[], Any] | None = None
        for note in _notes(arguments):
            logger.info("%s: %s", type(self).__name__, note)

    def _start(self) -> None:
        super()._start()
        self._running: dict[str, _Running] = {}  # folder -> the save in the background

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_running": {}, "_finalize": None}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As :meth:`TieredIO.save_checkpoint`; see the class for ``storage_options``.

        Raises:
            TypeError: ``storage_options`` is no dict, or has an unknown key.
        """
        given = _storage_options(storage_options)
        with self._lock:
            self._persistent, self._finalize = given.get("is_persistent_storage"), given.get("finalize_fn")
            try:
                super().save_checkpoint(checkpoint, path)
                if self._finalize is not None:  # _save has not handed it to a save in the background
                    self._finalize()
            finally:
                self._persistent = self._finalize = None

    def _take(self, directory: str) -> FolderEngine:
        durable = not self._is_local(directory) if self._persistent is None else self._persistent
        return self._engines.take(directory, self._run, self._options, durable=durable)

    def _is_local(self, directory: str) -> bool:
        root = self._arguments.get("local_ckpt_dir")
        if root is None:
            return False
        folder: str = os.path.realpath(root)
        return os.path.commonpath([folder, os.path.realpath(directory)]) == folder

    def _save(self, directory: str, name: str, checkpoint: Mapping[str, Any]) -> None:
        if not self._arguments.get("async_save") or self._is_last():  # no later call may finish it
            super()._save(directory, name, checkpoint)
            return
        self._finish(directory)
        engine = self._take(directory).engine
        ticket = engine.save(step_of(checkpoint, engine), checkpoint, names=[name])
        if ticket is None:
            raise ResiliencyError("the save was skipped, because no file could be made for it")
        self._running[directory] = _Running(ticket, os.path.join(directory, name), self._finalize)
        self._finalize = None

    def _finish(self, directory: str) -> None:
        """Waits until the folder's save in the background is committed, then carries out the removals that waited for
        it and calls its ``finalize_fn``. When the save failed, warns and keeps the checkpoints.

        Blocks: up to ``flush_timeout``.
        """
        running = self._running.pop(directory, None)
        if running is None:
            return
        try:
            running.ticket.wait(Stage.COMMITTED, timeout=self._flush_timeout)
        except ResiliencyError as error:
            logger.warning("%s was not saved, the checkpoints it would have replaced are kept: %s", running.path, error)
            self._failed[directory] = running.path
            self._postponed.setdefault(directory, []).extend(running.replaces)
            return
        for other in running.replaces:
            if other != running.path:
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
        if map_location is None and self._arguments.get("load_directly_on_device"):
            map_location = _device()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        place = place_of(path)
        with self._lock:
            if place is not None and place[0] in self._running:
                self._running[place[0]].replaces.append(os.path.join(*place))
            else:
                super().remove_checkpoint(path)

    def teardown(self) -> None:
        with self._lock, ExitStack() as stack:  # so that all folders are finished even if a finalize_fn raises
            stack.callback(super().teardown)
            for directory in list(self._running):
                stack.callback(self._finish, directory)


def adapter(module: str, name: str) -> AdapterClass:
    """Makes the plugin ``name`` for ``module``, the import path that it had in the older library."""
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for argument, default in {"self": empty, **ARGUMENTS[name]}.items()
    ]
    wraps = "checkpoint_io" in ARGUMENTS[name]
    if not wraps:  # those of the engine
        every = inspect.signature(OlderIO.__init__, eval_str=True).parameters.values()
        parameters += [parameter for parameter in every if parameter.kind is parameter.KEYWORD_ONLY]
    signature = inspect.Signature(parameters)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {key: value for key, value in bound.arguments.items() if key != "self"}
        OlderIO.__init__(self, **(_wrapped(**given) if wraps else given))

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    part = type(name, (OlderIO,), {"__init__": __init__, "__doc__": OlderIO.__doc__})
    return AdapterClass(module, name, part, base="plugins.io:TorchCheckpointIO")


def _wrapped(checkpoint_io: Any, profile_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Arguments of a plugin with the settings of the given one, which saves in the background and has its agent in a
    process of its own."""
    if not isinstance(checkpoint_io, TieredIO):
        raise ConfigError(
            f"PersistentCheckpointProcessIO(checkpoint_io={type(checkpoint_io).__name__}(...)) needs a plugin of this"
            " library, such as MinCkptOverheadCheckpointIO; for another one use Lightning's AsyncCheckpointIO"
        )
    if profile_dir is not None:
        logger.warning(
            "profile_dir=%s has no effect; ProfileCheckpointCallback(trace_dir=..., profile_checkpoint_interval=...)"
            " writes traces of saves, with what the agent does",
            os.fspath(profile_dir),
        )
    inner = checkpoint_io._arguments if isinstance(checkpoint_io, OlderIO) else {}
    noted = {name for name in inner if "parallel" in name} | {"use_ckpt_load_replication"}  # the given one has said so
    return {
        **{name: value for name, value in inner.items() if name not in noted},
        "async_save": True,
        "run": checkpoint_io._run,
        "options": replace(checkpoint_io._options, agent="process"),
        "flush_timeout": checkpoint_io._flush_timeout,
    }


def _check(arguments: Mapping[str, Any]) -> None:
    form = arguments.get("save_ckpt_format", "torch_dist")
    if form != "torch_dist":
        raise ConfigError(
            f"save_ckpt_format={form!r} cannot be written; pass 'torch_dist': checkpoints are files that torch.load"
            " reads"
        )
    given = arguments.get("load_strictness")
    if getattr(given, "value", given) not in (None, "assume_ok_unexpected"):  # may be a member of an enum
        raise ConfigError(
            f"load_strictness={given!r}: this plugin only reads the file; set strict_loading of the LightningModule"
            " instead"
        )
    threads = arguments.get("torch_dist_multiproc")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"torch_dist_multiproc={threads!r}; pass a number of threads, 1 or more, or None")
    folder = arguments.get("local_ckpt_dir")
    if folder is not None and "://" in os.fspath(folder):
        raise ConfigError(f"local_ckpt_dir={folder!r} is an address; pass a folder of this host")


def _notes(arguments: Mapping[str, Any]) -> list[str]:
    """Messages for the user, one for each argument whose request the plugin does not carry out."""
    notes = []
    asked = [name for name, value in arguments.items() if value and "parallel" in name]
    if asked:
        notes.append(
            f"{', '.join(asked)}: Lightning calls a CheckpointIO plugin on rank 0 alone; with this library's"
            " ModelCheckpoint every rank writes and reads its share"
        )
    if arguments.get("use_ckpt_load_replication"):
        notes.append(
            "use_ckpt_load_replication: each rank reads its host's folder; a host without a copy needs a"
            " ModelCheckpoint with local_dir= and a dirpath= that all hosts see"
        )
    return notes


def _storage_options(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    known = ", ".join(_STORAGE_OPTIONS)
    if not isinstance(given, Mapping):
        raise TypeError(f"storage_options={given!r}: pass a dict with any of {known}")
    unknown = sorted(set(given) - set(_STORAGE_OPTIONS))
    if unknown:
        raise TypeError(f"storage_options has {', '.join(unknown)}; known are {known}")
    return given


def _device() -> torch.device | None:
    """This process's GPU; None when CUDA is not available."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
