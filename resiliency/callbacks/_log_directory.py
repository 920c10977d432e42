"""``LogDirectoryCallback``: each rank's log as a file in a folder or a bucket."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from resiliency.callbacks._remote_folder import RemoteFolder
from resiliency.callbacks._step_hooks import StepHooks
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of

__all__ = ["LogDirectoryCallback", "build"]  # noqa: F822 - LogDirectoryCallback is built on first use

logger = logging.getLogger(__name__)

#: A file of a remote folder is sent whole when it has changed.
_PART_BYTES = 8 << 20
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class PartFiles(logging.Handler):
    """Writes to NAME-00.log, and where that is full to NAME-01.log and so on. Never raises into what is logged.

    On the root logger it takes the place of no other handler: Python shows warnings that no handler takes, and would
    take this one for one that shows them.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self._stem, self._part, self._size = os.path.join(folder, name), 0, 0
        self._failing = False
        self.setFormatter(logging.Formatter(_FORMAT))
        self._file = self._open()

    def _open(self) -> FileIO:
        return open(f"{self._stem}-{self._part:02d}.log", "ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record)
        shown_by = logging.lastResort
        if shown_by is not None and record.levelno >= shown_by.level and _is_first(self, record.name):
            shown_by.handle(record)

    def write(self, record: logging.LogRecord) -> None:
        """To the file alone."""
        if self._file.closed:
            return  # a thread that logs while the fit ends
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # Boundary: arguments that do not fit the message, as any handler has it.
            self.handleError(record)
            return
        try:
            if self._size >= _PART_BYTES:
                self._part += 1  # before: a file that cannot be opened leaves the full one, which goes on
                self._size = 0
                full, self._file = self._file, self._open()
                full.close()
            self._size += self._file.write(line)
        except OSError as error:
            failing, self._failing = self._failing, True  # first: the warning comes here, too
            if not failing:
                logger.warning("this rank's log is not written to %s: %s", os.path.dirname(self._stem), error)
        else:
            self._failing = False

    def close(self) -> None:
        self._file.close()
        super().close()


def is_shown(name: str) -> bool:
    """True when a handler other than for these files takes what a logger emits."""
    return any(not isinstance(one, PartFiles) for one in _handlers(name))


def _is_first(handler: PartFiles, name: str) -> bool:
    """True when only handlers for files take what a logger emits, and this is the first of them."""
    found = _handlers(name)
    return all(isinstance(one, PartFiles) for one in found) and found[:1] == [handler]


def _handlers(name: str) -> list[logging.Handler]:
    found: list[logging.Handler] = []
    one: logging.Logger | None = logging.getLogger(name)
    while one is not None:
        found += one.handlers
        one = one.parent if one.propagate else None
    return found


class KeepsLogs(StepHooks):
    """Writes what this rank logs to a file in a folder, from ``setup`` to the end.

    It is called ``rank-00003-20261123T210508-00.log``, with the rank and the time it began, so that a restart writes
    files of its own. What Python's logging is set up to emit goes there, and Lightning's messages; not what is printed.
    At an address such as gs://bucket/logs files are sent in the background when they have changed; where one cannot be
    sent, training goes on, it is tried again, and stays in a temporary folder that is named in the log.

    Thread: the training thread, and one of its own. Collective: no. Blocks: at the end, up to ``flush_timeout``.

    Args:
        log_dir: folder or address.
        every: between two looks at what has changed.
        flush_timeout: for sending one file, and for what is left at the end.

    Raises:
        ConfigError: a value that cannot work; at the start, ``log_dir`` cannot be used.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        every: timedelta = timedelta(seconds=30),
        flush_timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        super().__init__()
        for name, value in (("every", every), ("flush_timeout", flush_timeout)):
            if not isinstance(value, timedelta) or value <= timedelta(0):
                raise ConfigError(f"{name}={value!r}: pass a positive timedelta, as timedelta(seconds=30)")
        self._log_dir, self._every, self._flush_timeout = os.fspath(log_dir), every, flush_timeout
        self._folder: RemoteFolder | None = None
        self._handler: PartFiles | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_folder": None, "_handler": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "LogDirectoryCallback", f"{__package__}.logging")
        self._close()  # of a fit that Lightning left without its last hooks
        try:
            self._folder = RemoteFolder(self._log_dir, every=self._every, flush_timeout=self._flush_timeout)
            began = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
            self._handler = PartFiles(self._folder.path, f"rank-{trainer.global_rank:05d}-{began}")
        except OSError as error:
            raise ConfigError(f"log_dir={self._log_dir!r} cannot be written to: {error}") from error
        for one in self._loggers():
            one.addHandler(self._handler)
        super().setup(trainer, pl_module, stage)

    def _loggers(self) -> list[logging.Logger]:
        """The root, and those of Lightning's that do not pass on to it."""
        own = [logging.getLogger(name) for name in (self.namespace, _FABRICS[self.namespace])]
        return [logging.getLogger(), *(one for one in own if not one.propagate)]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self._handler is not None:  # not to the logger: Python shows the exception itself
            info = type(exception), exception, exception.__traceback__
            said = "the fit ends with an exception"
            self._handler.write(logger.makeRecord(__name__, logging.ERROR, __file__, 0, said, (), info))
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._close()

    def _close(self) -> None:
        if self._handler is not None:
            for one in [logging.getLogger(), *self._loggers()]:
                one.removeHandler(self._handler)
            self._handler.close()
            self._handler = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


_adapter = AdapterClass(__name__, "LogDirectoryCallback", KeepsLogs, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
