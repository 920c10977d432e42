"""The exceptions of the library, in one tree.

::

    ResiliencyError
    ├── ConfigError          (also a ValueError) a setting or argument that cannot work
    ├── TierError            a storage tier refused or failed; ``retryable`` says whether trying again can help
    ├── CorruptShard         bytes that do not match their digest; they are never loaded
    │   └── UnsupportedFormat  a checkpoint that another version of the format wrote; neither loaded nor changed
    ├── TornSnapshot         a tensor changed while it was being copied; the save is given up
    ├── NoCheckpointFound    no checkpoint that can be restored, though one was asked for
    ├── AgentError           the host agent cannot be reached or refused a request
    │   └── DirectoryInUse     another job on this host is using the directory
    └── Timeout              (also a TimeoutError) a wait passed its deadline

Every message says what happened, where (rank, step, tier, path) and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AgentError",
    "ConfigError",
    "CorruptShard",
    "DirectoryInUse",
    "NoCheckpointFound",
    "ResiliencyError",
    "TierError",
    "Timeout",
    "TornSnapshot",
    "UnsupportedFormat",
]


def _rebuild(kind: type[Exception], message: str, values: dict[str, Any]) -> Exception:
    return kind(message, **values)


class ResiliencyError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(ResiliencyError, ValueError):
    """A setting or argument that cannot work; the message says what to pass instead."""


class TierError(ResiliencyError):
    """A storage tier refused or failed an operation.

    Attributes:
        retryable: True when the same call may succeed later (503, timeout, disk full), False when it
            cannot (permission denied, bad address).
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their positional arguments alone; the keyword arguments must survive a process pool,
        # too.
        return _rebuild, (type(self), str(self), {"retryable": self.retryable})


class CorruptShard(ResiliencyError):
    """A shard whose bytes do not match its record.

    Attributes:
        path: the file (or object) that is bad.
        ranges: ``[(first byte, end byte), ...]`` that differ, half open; empty when the whole file is unusable.
    """

    def __init__(self, message: str, *, path: str, ranges: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.ranges = tuple(ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"path": self.path, "ranges": self.ranges})


class UnsupportedFormat(CorruptShard):
    """A checkpoint that another version of the on-disk format wrote; it is neither loaded nor changed."""


class TornSnapshot(ResiliencyError):
    """A tensor was changed while a save was still copying it; the save is given up, because it may mix two steps."""


class NoCheckpointFound(ResiliencyError):
    """No checkpoint that can be restored was found, though one was asked for by name or path."""


class AgentError(ResiliencyError):
    """The host agent cannot be reached, refused the request, or answered with an error."""


class DirectoryInUse(AgentError):
    """Another job on this host is using the directory under the same run name."""


class Timeout(ResiliencyError, TimeoutError):
    """A wait passed its deadline; the message names what did not answer."""
