"""An object store (Google Cloud Storage, or S3) as a tier, through fsspec. No torch; fsspec is imported at the first
verb.

Objects appear whole because a PUT does, and a streamed upload becomes visible only when it is finished. Rename is never
used: there it is a copy and a delete. Each process opens its own connections, so a tier may be used after a fork.

Against a GCS emulator set ``GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false`` in the environment before gcsfs is first
imported: otherwise gcsfs asks the emulator over gRPC, which it does not support, and the first call on each bucket
takes a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from resiliency.errors import ConfigError, TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers._address import store_path
from resiliency.storage.tiers._failures import SessionLost, explain
from resiliency.storage.tiers._filesystem import PerProcess
from resiliency.storage.tiers._keys import check_key, check_prefix, check_range
from resiliency.storage.tiers._retry import GaveUp, Retry
from resiliency.storage.tiers._source import Source
from resiliency.storage.tiers._upload import Upload
from resiliency.storage.tiers.base import ObjectInfo

__all__ = ["ObjectStoreTier"]

T = TypeVar("T")

# Most bytes of one read request: few enough to be answered in time, enough to use the whole bandwidth.
_PIECE_BYTES = 4 * BLOCK_BYTES


class ObjectStoreTier:
    """A bucket, or a folder in it, as a :class:`~resiliency.storage.tiers.base.Tier`.

    Thread: any. Blocks: a verb gives up ``retry_timeout`` after its last progress (a block sent or received), and one
    request takes ``request_timeout`` at most.

    Args:
        url: "gs://bucket/job", "s3://bucket/job", or "memory://name" (this process only, for tests).
        name: name in listings, events and error messages.
        storage_options: passed to fsspec's file system ("token", "project", "endpoint_url", ...).
        retry_timeout: how long busy and unreachable stores are asked again.
        attempts: requests at most for the same bytes, >= 1.
        backoff: longest first pause between two attempts; doubles up to 30 s; each pause is a random length between
            half of it and all of it.
        request_timeout: limit for one request (GCS; S3 has its own in ``storage_options``).
        part_bytes: an upload sends parts of this size, a multiple of 256 KiB; each upload holds one in memory.
        pause: waits that many seconds between attempts; a true result makes the verb give up at once. Pass the ``wait``
            of the Event that ends your process.
        clock: monotonic seconds.

    Raises:
        ConfigError: unknown scheme, no bucket, a package is missing, or a number out of range.
    """

    is_local = False

    def __init__(
        self,
        url: str,
        *,
        name: str = "object_store",
        storage_options: Mapping[str, Any] | None = None,
        retry_timeout: timedelta = timedelta(minutes=10),
        attempts: int = 5,
        backoff: timedelta = timedelta(seconds=1),
        request_timeout: timedelta = timedelta(seconds=60),
        part_bytes: int = 4 * BLOCK_BYTES,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.root = url.rstrip("/")
        self._scheme, self._base = store_path(url)
        self.durable = self._scheme != "memory"
        if attempts < 1 or retry_timeout <= timedelta(0) or request_timeout <= timedelta(0) or backoff < timedelta(0):
            raise ConfigError(
                f"{self._where}: attempts must be >= 1, backoff >= 0, retry_timeout and request_timeout > 0"
            )
        if part_bytes < 1 or part_bytes % (256 * 1024):
            raise ConfigError(f"{self._where}: part_bytes={part_bytes} must be a positive multiple of 262144 (256 KiB)")
        self._part_bytes = part_bytes
        self._retry_timeout_s = retry_timeout.total_seconds()
        options = dict(storage_options or {})
        if self._scheme in ("gs", "gcs"):
            options.setdefault("requests_timeout", request_timeout.total_seconds())
            # The store's MD5 of what arrived is compared with that of what was sent.
            options.setdefault("consistency", "md5")
        self._filesystem = PerProcess(self._scheme, options)
        self._retry = Retry(
            attempts=attempts,
            deadline_s=self._retry_timeout_s,
            first_s=backoff.total_seconds(),
            pause=pause,
            clock=clock,
        )

    def __repr__(self) -> str:
        return f"ObjectStoreTier({self.root!r}, name={self.name!r})"

    def location(self, key: str) -> str:
        """Address of an object; see the protocol."""
        return f"{self.root}/{key}" if key else self.root

    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores small data in one PUT; see the protocol."""
        path = self._path(key)
        try:
            self._do("store", key, lambda fs: fs.pipe_file(path, data, **self._limit(fs)))
        except _StoreRefused as refused:
            # Precondition failed: fine if it was an earlier, unanswered attempt of ours, or another writer with the
            # same content.
            if refused.status != 412 or self._read_back(key) != data:
                raise refused.error from refused.__cause__

    def put_file(
        self,
        key: str,
        path: str,
        *,
        check: Callable[[bytes | memoryview], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Streams a file in blocks of ``BLOCK_BYTES``; see the protocol.

        A part that fails is sent again on its own. When the store forgets the whole upload, the error is retryable and
        the caller puts again from the start, because each block is passed to ``check`` once.
        """
        check_key(key, tier=self._where)
        with Source(path, where=self._where, key=key) as source:
            blocks = source.blocks(check)
            first = next(blocks, b"")
            if len(first) == BLOCK_BYTES and self._scheme != "memory":
                self._stream(key, path, first, blocks, progress)
                return
            # One PUT for small files, and for fsspec's memory file system, which shows a file while it is written.
            data = b"".join((first, *blocks))
            self.put_bytes(key, data)
            if progress is not None:
                progress(len(data))

    def alias(self, key: str, name: str) -> None:
        """Lets the store copy the object, without its bytes passing through this process; see the protocol."""
        source, target = self._path(key), self._path(name)

        def copy(fs: Any) -> None:
            if self._scheme == "memory" and not fs.isfile(source):
                raise FileNotFoundError(source)  # fsspec's memory file system would make a folder for a folder
            fs.cp_file(source, target, **self._limit(fs))

        try:
            self._do("name", name, copy)
        except _StoreRefused as refused:
            if refused.status == 404:
                raise TierError(
                    f"{self._where}: cannot name {name!r}: no object {key!r}, or no such bucket", retryable=False
                ) from refused.__cause__
            raise refused.error from refused.__cause__

    def read(self, key: str) -> bytes:
        """The whole object; see the protocol.

        Raises:
            FileNotFoundError: no such key (or no such bucket; a listing shows which).
        """
        self._path(key)
        data = self._piece(key, 0, _PIECE_BYTES)
        return data if len(data) < _PIECE_BYTES else self._long(key, 0, None)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``; shorter when the object is. See the protocol.

        Raises:
            FileNotFoundError: no such key.
        """
        check_range(key, start, end, tier=self._where)
        self._path(key)
        return self._piece(key, start, end) if 0 < end - start <= _PIECE_BYTES else self._long(key, start, end)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in any order, as the store sees it now.

        Raises:
            TierError: also when the bucket does not exist (not retryable).
        """
        check_prefix(prefix, tier=self._where)
        folder = prefix.rpartition("/")[0]
        path = f"{self._base}/{folder}" if folder else self._base

        def find(fs: Any) -> list[tuple[str, int]]:
            found = fs.find(path, detail=True, **self._limit(fs))
            return [
                (name, info["size"])
                for name, info in found.items()
                if info["type"] == "file" and not name.endswith("/")
            ]

        try:
            found = self._do("list", prefix, find)
        except _StoreRefused as refused:
            raise refused.error from refused.__cause__
        top = len(self._base) + 1
        return iter([ObjectInfo(name[top:], int(size)) for name, size in found if name[top:].startswith(prefix)])

    def delete(self, key: str, *, keep_folder: bool = False) -> None:
        """Removes one object; a missing object is no error. There are no folders."""
        path = self._path(key)
        try:
            self._do("delete", key, lambda fs: fs.rm_file(path, **self._limit(fs)))
        except _StoreRefused as refused:
            if refused.status != 404:
                raise refused.error from refused.__cause__

    def close(self) -> None:
        """Closes this process's connections; a later verb opens new ones. Idempotent. Blocks up to: 5 s."""
        self._filesystem.close()

    @property
    def _where(self) -> str:
        return f"{self.name} tier {self.root}"

    def _path(self, key: str) -> str:
        check_key(key, tier=self._where)
        return f"{self._base}/{key}"

    def _limit(self, fs: Any) -> dict[str, float]:
        """Limit for requests that have no timeout of their own; understood by fsspec's asynchronous file systems."""
        return {"timeout": self._retry_timeout_s} if fs.async_impl else {}

    def _stream(
        self, key: str, path: str, block: bytes | None, blocks: Iterator[bytes], progress: Callable[[int], None] | None
    ) -> None:
        name = self._path(key)
        upload = Upload(self._do("open", key, lambda fs: fs.open(name, "wb", block_size=self._part_bytes)))
        sent = 0
        try:
            while block is not None:
                upload.add(block)
                self._do("store", key, lambda fs: upload.send())
                sent += len(block)
                if progress is not None:
                    progress(sent)
                block = next(blocks, None)
            self._do("store", key, lambda fs: upload.finish())
        except _StoreRefused as refused:
            upload.abort()
            if refused.status != 412 or not self._holds(key, path):
                raise refused.error from refused.__cause__
        except BaseException:
            upload.abort()
            if upload.spoilt:
                with suppress(TierError):
                    self.delete(key)
            raise

    def _piece(self, key: str, start: int, end: int, **pin: Any) -> bytes:
        """One range request."""
        path = self._path(key)

        def get(fs: Any) -> bytes:
            try:
                return bytes(fs.cat_file(path, start=start, end=end, **pin, **self._limit(fs)))
            except (
                Exception
            ) as error:  # Boundary: every client library has its own error for this; others are raised again.
                if explain(error).status == 416:
                    return b""
                raise

        return self._get(key, get)

    def _long(self, key: str, start: int, end: int | None) -> bytes:
        """A range read in pieces, all of the same version of the object if the store has versions."""
        path = self._path(key)
        info = self._get(key, lambda fs: fs.info(path, **self._limit(fs)))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._where}: no object {key!r}")
        stop = int(info["size"]) if end is None else min(int(info["size"]), end)
        pin = {"generation": info["generation"]} if "generation" in info else {}
        pieces = []
        for at in range(start, stop, _PIECE_BYTES):
            want = min(stop - at, _PIECE_BYTES)
            try:
                pieces.append(self._piece(key, at, at + want, **pin))
            except FileNotFoundError as error:
                raise self._changed(key) from error
            if len(pieces[-1]) != want:
                raise self._changed(key)
        return b"".join(pieces)

    def _changed(self, key: str) -> TierError:
        return TierError(
            f"{self._where}: {key!r} was replaced or deleted while it was read; read it again", retryable=True
        )

    def _get(self, key: str, get: Callable[[Any], T]) -> T:
        try:
            return self._do("read", key, get)
        except _StoreRefused as refused:
            if refused.status == 404:
                raise FileNotFoundError(f"{self._where}: no object {key!r}") from refused.__cause__
            raise refused.error from refused.__cause__

    def _read_back(self, key: str) -> bytes | None:
        try:
            return self.read(key)
        except FileNotFoundError:
            return None

    def _holds(self, key: str, path: str) -> bool:
        """True when the object has the same bytes as the file."""
        at = 0
        try:
            with Source(path, where=self._where, key=key) as source:
                for block in source.blocks(None):
                    if self.read_range(key, at, at + len(block)) != block:
                        return False
                    at += len(block)
            return not self.read_range(key, at, at + 1)
        except FileNotFoundError:
            return False

    def _do(self, action: str, key: str, call: Callable[[Any], T]) -> T:
        """Calls with retries.

        Raises:
            _StoreRefused: the store answered 404 or 412, which mean different things to each verb.
            TierError: everything else.
        """
        try:
            return self._retry.run(lambda: call(self._filesystem()), retryable=_is_retryable)
        except GaveUp as gave_up:
            cause = gave_up.__cause__
            assert cause is not None
            failure = explain(cause)
            status = f"HTTP {failure.status}, " if failure.status else ""
            error = TierError(
                f"{self._where}: cannot {action} {key!r}: {failure.what} ({status}{gave_up});"
                f" {'stopped on request' if gave_up.stopped else failure.advice}",
                retryable=failure.retryable,
            )
            if failure.status in (404, 412):
                raise _StoreRefused(failure.status, error) from cause
            raise error from cause


def _is_retryable(error: Exception) -> bool:
    return not isinstance(error, SessionLost) and explain(error).retryable


class _StoreRefused(Exception):
    """The store answered 404 or 412. ``error`` is what to raise when the verb does not handle that status."""

    def __init__(self, status: int, error: TierError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
