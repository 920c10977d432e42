"""The contract of a storage tier: seven verbs on flat keys, and the properties it declares. No torch.

Keys are POSIX paths relative to the tier's root, as laid out in :mod:`resiliency.storage.manifest`. A tier knows
nothing of steps, ranks or manifests; what keys mean and in which order they are written is up to the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from resiliency.errors import TierError

__all__ = ["ObjectInfo", "Tier", "UnreadableFolders"]


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object: its key and size in bytes."""

    key: str
    nbytes: int


class UnreadableFolders(TierError):
    """A listing is not complete, because some folders cannot be read (permissions, a failing disk).

    One such folder must not hide the rest, so the error carries what could be listed.

    Attributes:
        folders: key of each unreadable folder, without "/" at the end -> why.
        found: all objects that could be listed.
    """

    def __init__(self, folders: Mapping[str, str], found: Sequence[ObjectInfo], *, retryable: bool) -> None:
        super().__init__("; ".join(folders.values()), retryable=retryable)
        self.folders = dict(folders)
        self.found = tuple(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_listing_error, (self.folders, self.found, self.retryable)


def _rebuild_listing_error(
    folders: Mapping[str, str], found: Sequence[ObjectInfo], retryable: bool
) -> UnreadableFolders:
    return UnreadableFolders(folders, found, retryable=retryable)


class Tier(Protocol):
    """Storage for checkpoints. Every verb may be called from any thread.

    Attributes:
        name: "local" or "object_store", or another word for listings and events.
        root: address, for people ("/ckpts", "gs://bucket/job").
        is_local: True when ``root`` is a folder of this machine whose files can be mapped and renamed.
        durable: True when data survives a power loss of this machine once a put has returned.

    Errors: every verb raises :class:`~resiliency.errors.TierError` (``retryable`` set) and nothing else, except
    ``read``/``read_range`` of a missing key, which raise :class:`FileNotFoundError`, and exceptions of callbacks, which
    are passed on unchanged. No verb retries for longer than the tier's own deadline.
    """

    name: str
    root: str
    is_local: bool
    durable: bool

    def location(self, key: str) -> str:
        """Path or address of an object, or of a folder of objects, whether or not there is one; for people, and for
        callers that open files of a local tier themselves."""
        ...

    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores small data atomically: a reader sees the old object, the new one, or none; never a part."""
        ...

    def put_file(
        self,
        key: str,
        path: str,
        *,
        check: Callable[[bytes | memoryview], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Stores a local file of any size atomically.

        Args:
            check: called with each block of bytes (bytes or a memoryview, valid during the call) in file order as it is
                read, before the object becomes visible; an exception it raises aborts the put, leaves no object behind
                and propagates unchanged.
            progress: called with the number of bytes sent so far.
        """
        ...

    def alias(self, key: str, name: str) -> None:
        """Makes an object available under another key too, atomically replacing an object there, without sending its
        bytes again: a hard link, or a copy that the store makes by itself. Either of the two remains when the other is
        deleted.

        Raises:
            TierError: also when there is no object at ``key`` (not retryable).
        """
        ...

    def read(self, key: str) -> bytes:
        """The whole object (small ones: records, manifests)."""
        ...

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``; shorter when the object is."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix`` (a folder ends in "/"), recursively, in any order.

        Raises:
            UnreadableFolders: some folders cannot be read. A listing is never incomplete without an error.
        """
        ...

    def delete(self, key: str, *, keep_folder: bool = False) -> None:
        """Removes one object; a missing object is no error. Where folders are not made of keys alone, its folder goes
        with it when that is empty now, unless ``keep_folder``."""
        ...
