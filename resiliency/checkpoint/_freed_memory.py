"""Lets a late copy end before Python code takes the memory away that it reads.

``storage.resize_(0)`` (which sharding and offloading code calls to free a tensor's memory) gives the memory back to the
system while the copy thread reads it, which would end the process with SIGSEGV. Nothing can be asked of a storage that
would keep its memory. So the method is wrapped while a copy is pending, and at no other time: it first helps with the
copies that read this storage. What resizes a storage without this method (torch's C++ code) is not noticed.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch.storage import UntypedStorage

__all__ = ["LetsGo", "guard", "release"]


class LetsGo(Protocol):
    """Reads memory of tensors in the background."""

    def let_go(self, storage: UntypedStorage) -> None:
        """Returns when it does not read the memory of this storage any more. Thread: any."""


_storage_class: Any = UntypedStorage  # torch does not annotate it
_resize: Any = UntypedStorage.resize_
_lock = threading.Lock()
_guarded: dict[int, LetsGo] = {}


def _resize_when_let_go(self: UntypedStorage, *args: Any) -> Any:
    for reader in list(_guarded.values()):
        reader.let_go(self)
    return _resize(self, *args)


def guard(reader: LetsGo) -> None:
    """Has ``reader`` asked before memory is taken away. Thread: any."""
    with _lock:
        _guarded[id(reader)] = reader
        _storage_class.resize_ = _resize_when_let_go


def release(reader: LetsGo) -> None:
    """Ends :func:`guard`. Idempotent. Thread: any."""
    with _lock:
        if _guarded.pop(id(reader), None) is not None and not _guarded:
            del _storage_class.resize_  # the class has inherited its own
