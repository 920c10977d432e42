"""Lets a late copy finish before Python code frees the memory that it reads.

``storage.resize_(0)`` (which sharding and offloading code calls to free a tensor's memory) returns the memory to the
system while the copy thread may be reading it, which would end the process with SIGSEGV. A storage offers no way to
keep its memory. So, while a copy is pending and at no other time, the method is wrapped: it first helps with the copies
that read this storage. Code that resizes a storage without this method (torch's C++ code) is not noticed.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch.storage import UntypedStorage

__all__ = ["LetsGo", "guard", "release"]


class LetsGo(Protocol):
    """Reads the memory of tensors in the background."""

    def let_go(self, storage: UntypedStorage) -> None:
        """Returns once this reader no longer reads the storage's memory. Thread: any. Blocks: until then."""


_storage_class: Any = UntypedStorage  # torch does not annotate it
_resize: Any = UntypedStorage.resize_
_lock = threading.Lock()
_guarded: dict[int, LetsGo] = {}


def _resize_when_let_go(self: UntypedStorage, *args: Any) -> Any:
    for reader in list(_guarded.values()):
        reader.let_go(self)
    return _resize(self, *args)


def guard(reader: LetsGo) -> None:
    """From now on calls ``reader.let_go`` before a storage's memory is freed. Thread: any."""
    with _lock:
        _guarded[id(reader)] = reader
        _storage_class.resize_ = _resize_when_let_go


def release(reader: LetsGo) -> None:
    """Ends :func:`guard`. Idempotent. Thread: any."""
    with _lock:
        if _guarded.pop(id(reader), None) is not None and not _guarded:
            del _storage_class.resize_  # restores the method that the class inherits
