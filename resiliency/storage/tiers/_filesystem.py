"""Makes fsspec file systems, one per process. The only module that imports fsspec, at the first use."""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["PerProcess"]


_LARGE_BYTES = 256 * 1024


class PerProcess:
    """Creates a file system per process, because its event loop and connections do not survive a fork.

    Thread: any.

    Args:
        scheme: "gs", "s3", "memory".
        options: for the file system's constructor. Instance and listing caches are always switched off: a cached
            instance may have other options, and listings must show other processes' writes.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        self._scheme = scheme
        self._options = {**options, "skip_instance_cache": True, "use_listings_cache": False}
        self._made: tuple[int, Any] | None = None
        self._lock = (os.getpid(), threading.Lock())

    def __call__(self) -> Any:
        pid = os.getpid()
        made = self._made
        if made is not None and made[0] == pid:
            return made[1]
        if self._lock[0] != pid:
            # The lock of the parent may be held by a thread that does not exist in this process.
            self._lock = (pid, threading.Lock())
        with self._lock[1]:
            if self._made is None or self._made[0] != pid:
                self._made = (pid, self._make())
            return self._made[1]

    def close(self) -> None:
        """Closes this process's connections; the next call makes new ones. Idempotent. Blocks up to: 5 s."""
        made, self._made = self._made, None
        if made is None or made[0] != os.getpid():
            return
        session = getattr(made[1], "_session", None)
        if session is not None and not getattr(session, "closed", True):
            # Otherwise the garbage collector makes gcsfs close it from the wrong thread, with a warning.
            from fsspec.asyn import sync

            sync(made[1].loop, session.close, timeout=5)

    def _make(self) -> Any:
        import fsspec

        fs = fsspec.filesystem(self._scheme, **self._options)
        once = getattr(getattr(type(fs), "_request", None), "__wrapped__", None)
        if once is not None:
            # gcsfs retries each request six times, for up to a minute. This skips that, because the tier retries with
            # its own limits. If a later gcsfs lacks this attribute, both retry: slower, but correct.
            fs._request = functools.partial(_request, once, fs)
        return fs


async def _request(once: Any, fs: Any, *args: Any, data: Any = None, **options: Any) -> Any:
    if isinstance(data, (bytes, bytearray, memoryview)) and len(data) > _LARGE_BYTES:
        # aiohttp writes plain bytes to the socket at once, which blocks all other requests of the event loop.
        data = io.BytesIO(data)
    return await once(fs, *args, data=data, **options)
