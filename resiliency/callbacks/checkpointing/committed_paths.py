"""Attributes that hold checkpoint paths: reading one waits until the checkpoints exist.

The stock class writes a checkpoint before it returns from a hook. The engine commits in the background, and only then
the file gets its name. So code that reads ``best_model_path`` in a hook of another callback, in a logger or after
training must wait to get a path that can be opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

__all__ = ["CommittedPaths"]


class _Waiting(Protocol):
    def _wait_until_committed(self, paths: Iterable[str]) -> None: ...


class CommittedPaths:
    """A data descriptor over the instance attribute of the same name: a path, or a mapping with paths as keys."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: _Waiting | None, owner: type[Any] | None = None) -> Any:
        """The value. Blocks: in a fit, when user code reads it, until the checkpoints of these paths are committed."""
        if instance is None:
            return self
        try:
            value = vars(instance)[self._name]
        except KeyError:
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self._name!r}") from None
        instance._wait_until_committed(value if isinstance(value, Mapping) else (value,))
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self._name]
