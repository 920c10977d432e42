"""A folder whose files a thread uploads to an address at intervals, with a time limit."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

from resiliency.errors import TierError
from resiliency.storage.tiers import open_tier

__all__ = ["RemoteFolder"]

logger = logging.getLogger(__name__)


class RemoteFolder:
    """A local folder, :attr:`path`, for files that belong at an address.

    If the address is a folder on this host, :attr:`path` is that folder. If it is in an object store, :attr:`path` is a
    temporary folder, and a file that has changed is uploaded whole, so files should have some MiB at most. An upload
    that fails is tried again at the next interval; one warning is logged until uploads succeed again.

    Thread: any thread may write files into :attr:`path`; only one may call ``close``.

    Args:
        address: folder or fsspec address, such as gs://bucket/logs.
        every: time between two searches for changed files.
        flush_timeout: time limit for one file, and for the last uploads in ``close``.

    Raises:
        ConfigError: the kind of address is unknown, or its package is missing.
        OSError: the folder cannot be created.
    """

    def __init__(self, address: str, *, every: timedelta, flush_timeout: timedelta) -> None:
        self.address = address
        self._every_s, self._flush_timeout_s = every.total_seconds(), flush_timeout.total_seconds()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._sent: dict[str, tuple[int, int]] = {}
        self._failing = False
        self._tier = open_tier(address, glance=True)
        if self._tier.is_local:
            self.path = Path(self._tier.root)
            self.path.mkdir(parents=True, exist_ok=True)
            return
        self._tier = open_tier(
            address, retry_timeout=flush_timeout, request_timeout=flush_timeout, pause=self._closing.wait
        )
        self.path = Path(tempfile.mkdtemp(prefix="resiliency-logs-"))
        self._thread = threading.Thread(target=self._run, name="resiliency-remote-folder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Uploads what has changed and ends the thread. Idempotent. Blocks: up to ``flush_timeout``.

        The temporary folder is removed if everything was uploaded; otherwise it stays and a warning names it.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._closing.set()
        thread.join(self._flush_timeout_s)
        if thread.is_alive():
            logger.warning(
                "not all of %s was sent to %s within %.0f s, and what is left is only there",
                self.path,
                self.address,
                self._flush_timeout_s,
            )
            return
        if not self._failing:
            shutil.rmtree(self.path, ignore_errors=True)

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._send()
        self._send()

    def _send(self) -> None:
        failed: tuple[str, Exception] | None = None
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                key = os.path.relpath(path, self.path)
                try:
                    state = os.stat(path)
                    if self._sent.get(key) == (state.st_size, state.st_mtime_ns):
                        continue
                    self._tier.put_bytes(key, Path(path).read_bytes())
                    self._sent[key] = state.st_size, state.st_mtime_ns
                except (TierError, OSError) as error:
                    failed = key, error
        if failed is not None and not self._failing:
            key, reason = failed
            logger.warning(
                "%s cannot be sent to %s now; it stays in %s and is tried again: %s",
                key,
                self.address,
                self.path,
                reason,
            )
        self._failing = failed is not None
