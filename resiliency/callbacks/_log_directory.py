"""``LogDirectoryCallback``: each rank's log as a file in a folder or a bucket."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from resiliency.callbacks._remote_folder import RemoteFolder
from resiliency.callbacks._step_hooks import StepHooks
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of

__all__ = ["LogDirectoryCallback", "build"]  # noqa: F822 - LogDirectoryCallback is built on first use

#: A file of a remote folder is sent whole when it has changed.
_PART_BYTES = 8 << 20
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class PartFiles(logging.FileHandler):
    """Writes to NAME-00.log, and where that is full to NAME-01.log and so on."""

    def __init__(self, folder: Path, name: str) -> None:
        self._stem, self._part = os.path.join(folder, name), 0
        super().__init__(f"{self._stem}-00.log", encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.stream is not None and self.stream.tell() >= _PART_BYTES:
            self.stream.close()
            self._part += 1
            self.baseFilename = os.path.abspath(f"{self._stem}-{self._part:02d}.log")
            self.stream = self._open()


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
        for logger in self._loggers():
            logger.addHandler(self._handler)
        super().setup(trainer, pl_module, stage)

    def _loggers(self) -> list[logging.Logger]:
        """The root, and those of Lightning's that do not pass on to it."""
        own = [logging.getLogger(name) for name in (self.namespace, _FABRICS[self.namespace])]
        return [logging.getLogger(), *(one for one in own if not one.propagate)]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        logging.getLogger(__name__).error("the fit ends with an exception", exc_info=exception)
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._close()

    def _close(self) -> None:
        if self._handler is not None:
            for logger in [logging.getLogger(), *self._loggers()]:
                logger.removeHandler(self._handler)
            self._handler.close()
            self._handler = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


_adapter = AdapterClass(__name__, "LogDirectoryCallback", KeepsLogs, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
