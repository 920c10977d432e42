"""Checked access to the fields of JSON objects that another process sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from resiliency.errors import ConfigError
from resiliency.storage.manifest import StepId

__all__ = ["field", "integers", "objects", "refused", "step_id", "strings"]

T = TypeVar("T")


def refused(what: str, problem: str) -> ConfigError:
    """The error for a message that cannot be read."""
    return ConfigError(f"{what} cannot be read: {problem}; start all ranks with the same version of this library")


def field(data: Any, name: str, kind: type[T], *, what: str) -> T:
    """The field ``name`` of a JSON object, which must be of type ``kind``.

    Args:
        what: the message, for the error ("the inventory of rank 3").

    Raises:
        ConfigError: not an object, the field is missing, or it has another type.
    """
    if not isinstance(data, Mapping):
        raise refused(what, f"{data!r:.80} is not an object with fields")
    if name not in data:
        raise refused(what, f"the field {name!r} is missing")
    value = data[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise refused(what, f"{name} is {value!r:.80}, not of type {kind.__name__}")
    return value


def objects(data: Any, name: str, *, what: str) -> list[Any]:
    """A field that is a list; whoever asks checks its items. Raises ConfigError."""
    return field(data, name, list, what=what)


def strings(data: Any, name: str, *, what: str) -> tuple[str, ...]:
    """A field that is a list of strings. Raises ConfigError."""
    return _items(data, name, str, what)


def integers(data: Any, name: str, *, what: str) -> tuple[int, ...]:
    """A field that is a list of integers. Raises ConfigError."""
    return _items(data, name, int, what)


def _items(data: Any, name: str, kind: type[T], what: str) -> tuple[T, ...]:
    items = field(data, name, list, what=what)
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise refused(what, f"{name} holds {item!r:.80}, not of type {kind.__name__}")
    return tuple(items)


def step_id(data: Any, name: str, *, what: str) -> StepId:
    """A field that holds the folder name of a step. Raises ConfigError."""
    text = field(data, name, str, what=what)
    step = StepId.parse(text)
    if step is None:
        raise refused(what, f"{name} is {text!r:.80}, which is no folder name of a step")
    return step
