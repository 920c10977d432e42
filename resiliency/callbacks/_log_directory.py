"""``LogDirectoryCallback``: writes each rank's log to files in a folder or a bucket."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from resiliency.callbacks._remote_folder import RemoteFolder
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.step_hooks import StepHooks

__all__ = ["LogDirectoryCallback", "build"]  # noqa: F822 - LogDirectoryCallback is built on first use

logger = logging.getLogger(__name__)

#: Size at which the next file begins; small, because a changed file of a remote folder is uploaded whole.
_PART_BYTES = 8 << 20
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class PartFiles(logging.Handler):
    """Writes to NAME-00.log, when that has 8 MiB to NAME-01.log, and so on. Never raises into the code that logs.

    If it is the only handler, it passes warnings on to ``logging.lastResort``: Python shows warnings itself only when
    no logger has a handler, and this handler must not hide them.
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
        """Writes a record to the file only."""
        if self._file.closed:
            return  # a thread may still log while the fit ends
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # Boundary: the arguments may not fit the message; handled as in Python's own handlers.
            self.handleError(record)
            return
        try:
            if self._size >= _PART_BYTES:
                self._part += 1  # before _open: if the next file cannot be opened, the full one is used further
                self._size = 0
                full, self._file = self._file, self._open()
                full.close()
            self._size += self._file.write(line)
        except OSError as error:
            failing, self._failing = self._failing, True  # before the warning, which this handler receives, too
            if not failing:
                logger.warning("this rank's log is not written to %s: %s", os.path.dirname(self._stem), error)
        else:
            self._failing = False

    def close(self) -> None:
        self._file.close()
        super().close()


def is_shown(name: str) -> bool:
    """True when a handler other than :class:`PartFiles` receives what the logger ``name`` emits."""
    return any(not isinstance(one, PartFiles) for one in _handlers(name))


def _is_first(handler: PartFiles, name: str) -> bool:
    """True when only :class:`PartFiles` receive what the logger ``name`` emits, and ``handler`` is the first one."""
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
    """Writes this rank's log to files in a folder, from ``setup`` to ``teardown`` or an exception.

    The first file is ``rank-00003-20261123T210508-00.log``, with the rank and the UTC time of its start, so that a
    restart writes files of its own. The files contain what Python's logging is set up to emit and Lightning's messages,
    but not what is printed. When ``log_dir`` is an address such as gs://bucket/logs, changed files are uploaded in the
    background. When an upload fails, training goes on, the upload is tried again, and the file stays in a temporary
    folder that the log names.

    Thread: the training thread, and a thread of its own. Collective: no. Blocks: at the end, up to ``flush_timeout``.

    Args:
        log_dir: folder or address.
        every: time between two searches for changed files.
        flush_timeout: time limit for the upload of one file, and for the last uploads at the end.

    Raises:
        ConfigError: an argument has a value that cannot work; at the start, ``log_dir`` cannot be used.
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
        self._close()  # what a fit that Lightning ended without its last hooks has left open
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
        """The root logger, and those loggers of Lightning that do not propagate to it."""
        own = [logging.getLogger(name) for name in (self.namespace, _FABRICS[self.namespace])]
        return [logging.getLogger(), *(one for one in own if not one.propagate)]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self._handler is not None:  # to the file only, because Python itself shows the exception
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
