"""TensorBoard scalars, shared by the callbacks of a Trainer: written to its TensorBoardLogger or to a folder."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from resiliency.callbacks._remote_folder import RemoteFolder
from resiliency.errors import ConfigError

__all__ = ["Scalars", "open_scalars", "summary_writer", "tensorboard_logger"]

logger = logging.getLogger(__name__)

#: Of a remote folder: time between two uploads, and time limit of one upload and of the last ones.
_EVERY = timedelta(seconds=30)
_FLUSH_TIMEOUT = timedelta(seconds=30)


class Scalars:
    """The scalars of one fit, shared by callbacks. Each callback calls ``open`` and ``close``; the last ``close``
    flushes, and closes what this library has opened.

    Thread: the training thread. A write costs some ten microseconds, because a thread of TensorBoard writes the files.
    """

    def __init__(self, writer: Any, folder: RemoteFolder | None) -> None:
        self._writer, self._folder = writer, folder
        self._users = 0
        self._failed = False
        self._last: dict[str, int] = {}

    def write(self, tag: str, value: float, step: int) -> None:
        """Writes a value; nothing if another callback has written this tag for this step, or if a write has failed."""
        if self._last.get(tag) != step:
            self._last[tag] = step
            self._try(lambda: self._writer.add_scalar(tag, value, step))

    def _try(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # Boundary: a package for TensorBoard may raise anything, as when a disk is full.
            self._failed = True
            logger.warning("scalars are not written for TensorBoard any more, training goes on: %s", error)

    def open(self) -> Scalars:
        self._users += 1
        return self

    @property
    def is_open(self) -> bool:
        return self._users > 0

    def close(self) -> None:
        """Ends one callback's use. Blocks: the last call, for a remote folder, up to 30 s."""
        self._users -= 1
        if self._users:
            return
        if self._folder is None:
            self._try(self._writer.flush)  # not closed here: the writer belongs to the TensorBoardLogger
            return
        self._try(self._writer.close)
        self._folder.close()


#: The scalars of each trainer, by ``tb_dir``.
_open: weakref.WeakKeyDictionary[Any, dict[str | None, Scalars]] = weakref.WeakKeyDictionary()


def open_scalars(trainer: Any, tb_dir: str | None) -> Scalars | None:
    """Opens the scalars of this rank; the caller must close them. Returns None when nothing is to be written: on ranks
    other than 0, with ``fast_dev_run``, and if ``tb_dir`` is None and the Trainer has no TensorBoardLogger.

    Raises:
        ConfigError: no package can write for TensorBoard, or the folder cannot be used.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return None
    found = _open.setdefault(trainer, {})
    known = found.get(tb_dir)
    if known is None or not known.is_open:
        made = _of_logger(trainer) if tb_dir is None else _of_folder(tb_dir)
        if made is None:
            return None
        known = found[tb_dir] = made
    return known.open()


def tensorboard_logger(trainer: Any) -> Any:
    """The Trainer's first TensorBoardLogger, or instance of a class derived from it; None when it has none."""
    for logger in trainer.loggers:
        if any(cls.__name__ == "TensorBoardLogger" for cls in type(logger).__mro__):
            return logger
    return None


def _of_logger(trainer: Any) -> Scalars | None:
    logger = tensorboard_logger(trainer)
    return None if logger is None else Scalars(logger.experiment, None)


def _of_folder(tb_dir: str) -> Scalars:
    writer = summary_writer()
    name = datetime.now(timezone.utc).strftime("run-%Y%m%d-%H%M%S")
    separator = "" if tb_dir.endswith("/") else "/"
    try:
        folder = RemoteFolder(f"{tb_dir}{separator}{_free(tb_dir, name)}", every=_EVERY, flush_timeout=_FLUSH_TIMEOUT)
    except OSError as error:
        raise ConfigError(f"tb_dir={tb_dir!r} cannot be written to: {error}") from error
    return Scalars(writer(os.fspath(folder.path)), folder)


def _free(tb_dir: str, name: str) -> str:
    """``name``, or ``name-2``, ``name-3``, ... if a local folder has it already: two jobs may begin in one second."""
    number, free = 1, name
    while Path(tb_dir, free).exists():
        number, free = number + 1, f"{name}-{number}"
    return free


def summary_writer() -> Any:
    """The class ``SummaryWriter`` of torch (with tensorboard) or of tensorboardX.

    Raises:
        ConfigError: neither is installed.
    """
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ConfigError("tb_dir needs TensorBoard to write for: pip install 'resiliency[tensorboard]', or tensorboardX")
