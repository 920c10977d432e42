"""Receives notices by a file, or from the metadata server of Google's cloud."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from contextlib import suppress

__all__ = ["FileSource", "METADATA_KEYS", "MetadataSource", "UnheardKeys", "metadata_address", "notices_of"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
#: Address of Google's metadata server, and the file in which Linux names the maker of the machine.
_GOOGLE = "http://metadata.google.internal/computeMetadata/v1"
_DMI = "/sys/class/dmi/id/product_name"
#: The keys that are read from the server, each with the values with which the machine stays. From Google's pages "Query
#: the metadata server for maintenance event notices" and "Handle GPU host maintenance events" (docs/preemption.md has
#: them as a table). MIGRATE: the machine is moved while it runs; one with accelerators cannot be, and is never told so.
#: Any other value, known or not, means that it goes: preempted=TRUE (Spot, half a minute), and
#: TERMINATE_ON_HOST_MAINTENANCE (a minute, with accelerators an hour).
METADATA_KEYS = {
    "instance/preempted": ("FALSE", ""),
    "instance/maintenance-event": ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", ""),
}
#: The server answers after this many seconds when the value has not changed.
_HANG_UP_S = 60
_PAUSE_S = 5.0


def metadata_address(server: str | None) -> str | None:
    """The address of the metadata server to ask; None: ask none.

    Args:
        server: its address; "auto": Google's, on a machine of Google's; None: none.
    """
    if server != "auto":
        return server or None
    try:
        with open(_DMI) as file:
            return _GOOGLE if "Google" in file.read(200) else None
    except OSError:
        return None


def notices_of(address: str, *, timeout_s: float = 2.0) -> tuple[list[str], dict[str, Exception]]:
    """What the metadata server says about the end of this machine, in words, nothing when the machine stays; and by
    key, why it has not answered. GKE's server does not have all keys.

    Blocks: up to ``timeout_s`` for each key.

    Raises:
        ValueError: ``address`` is no http address.
    """
    split = urllib.parse.urlsplit(address)
    if split.scheme != "http" or not split.hostname:
        raise ValueError(_no_address(address))
    said: list[str] = []
    failed: dict[str, Exception] = {}
    for key, nothing in METADATA_KEYS.items():
        connection = http.client.HTTPConnection(split.hostname, split.port, timeout=timeout_s)
        try:
            value, _ = _get(connection, f"{split.path.rstrip('/')}/{key}", key)
        except (OSError, http.client.HTTPException) as error:
            failed[key] = error
            continue
        finally:
            connection.close()
        if value not in nothing:
            said.append(_words(key, value))
    return said, failed


class UnheardKeys:
    """Says once of each key that the metadata server does not answer for it, and again when it has answered since.
    Thread: one for each key."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._said: set[str] = set()

    def failed(self, key: str, error: Exception) -> None:
        if key in self._said:
            return
        self._said.add(key)
        logger.warning(
            "the metadata server %s does not answer for %s (%r): what it would say there is not seen while it does not",
            self._server,
            key,
            error,
        )

    def answered(self, key: str) -> None:
        self._said.discard(key)


def _no_address(address: str) -> str:
    return f"{address!r} is no address of a metadata server, as http://metadata.google.internal/..."


def _words(key: str, value: str) -> str:
    return f"the metadata server, {key.rpartition('/')[2]}={value}"


def _get(connection: http.client.HTTPConnection, path: str, key: str) -> tuple[str, str]:
    """The value of a key in upper case, and its etag."""
    connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
    answer = connection.getresponse()
    text = answer.read(4096).decode(errors="replace").strip()
    if answer.status != 200:
        raise http.client.HTTPException(f"HTTP {answer.status} for {key}")
    return text.upper(), answer.headers.get("ETag", "0")


class FileSource:
    """Tells once when a file appears. It polls, because a shared file system has no notification.

    Args:
        path: looked for once a second.
        told: called with words for the log, on a thread of this object.
    """

    def __init__(self, path: str, told: Callable[[str], None]) -> None:
        self._path, self._told = path, told
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="resiliency-notice-file", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not os.path.lexists(self._path):
            if self._closed.wait(_LOOK_EVERY_S):
                return
        self._told(f"the file {self._path}")

    def close(self) -> None:
        """Stops looking. Idempotent. Blocks: until the file system answers, up to a second."""
        self._closed.set()
        self._thread.join(1)


class MetadataSource:
    """Tells once when the metadata server says that this machine will stop.

    Each key is requested with ``wait_for_change``, so that an answer comes at once when the value changes, and
    otherwise once a minute. When the server does not answer for a key it is asked again every 5 s, and that is logged
    once.

    Args:
        address: such as ``http://metadata.google.internal/computeMetadata/v1``.
        told: called with words for the log, on a thread of this object; once for each key.
    """

    def __init__(self, address: str, told: Callable[[str], None]) -> None:
        self._address = urllib.parse.urlsplit(address)
        if self._address.scheme != "http" or not self._address.hostname:
            raise ValueError(_no_address(address))
        self._told = told
        self._closed = threading.Event()
        self._sockets: dict[str, socket.socket] = {}
        self._unheard = UnheardKeys(self._address.netloc)
        self._threads = [
            threading.Thread(target=self._watch, args=(key,), name="resiliency-notice-metadata", daemon=True)
            for key in METADATA_KEYS
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self, key: str) -> None:
        etag = "0"
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                value, etag = self._ask(key, etag)
            except (OSError, http.client.HTTPException) as error:
                if not self._closed.is_set():
                    self._unheard.failed(key, error)
                self._closed.wait(_PAUSE_S)
                continue
            self._unheard.answered(key)
            if value not in METADATA_KEYS[key]:
                self._told(_words(key, value))
                return
            # A server that ignores wait_for_change is asked once a second.
            self._closed.wait(max(0.0, began + _LOOK_EVERY_S - time.monotonic()))

    def _ask(self, key: str, etag: str) -> tuple[str, str]:
        host, port = self._address.hostname, self._address.port
        assert host is not None
        connection = http.client.HTTPConnection(host, port, timeout=_HANG_UP_S + 10)
        try:
            connection.connect()
            # The socket, which a connection forgets while an answer is still read. And first the socket, then the
            # look: close() does the two the other way round, so that one of them sees the other.
            self._sockets[key] = connection.sock
            if self._closed.is_set():
                raise ConnectionAbortedError("closed")
            query = f"?wait_for_change=true&timeout_sec={_HANG_UP_S}&last_etag={urllib.parse.quote(etag)}"
            path = f"{self._address.path.rstrip('/')}/{key}{query}"
            return _get(connection, path, key)
        finally:
            connection.close()

    def close(self) -> None:
        """Cancels the requests under way. Idempotent. Blocks: up to a second for each key."""
        self._closed.set()
        for one in list(self._sockets.values()):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(1)
