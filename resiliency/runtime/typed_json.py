"""Encodes frozen dataclasses as JSON objects and decodes them, checking every field; used for all messages.

Supported field types: str, int, float, bool, None, ``X | None``, ``tuple[X, ...]``,
``Mapping[str, Any]`` (plain JSON), enums (by name) and other dataclasses; of those that have a class method
``from_jsonable`` it reads the fields.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

from resiliency.errors import ConfigError

__all__ = ["decode", "encode", "from_jsonable", "to_jsonable"]

T = TypeVar("T")

_PLAIN = frozenset({str, int, float, bool, type(None)})


def encode(message: Any) -> bytes:
    """A dataclass as JSON text, ASCII only."""
    return json.dumps(to_jsonable(message), separators=(",", ":")).encode()


def decode(kind: type[T], data: bytes, *, what: str) -> T:
    """Inverse of :func:`encode`.

    Args:
        what: name of the message in the error ("the inventory of rank 3").

    Raises:
        ConfigError: ``data`` is not such a message; the error says why.
    """
    try:
        return from_jsonable(kind, json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} cannot be read: {error}; start all ranks with the same version of this library"
        ) from error


def to_jsonable(value: Any) -> Any:
    """Converts a dataclass, field by field, to values that :func:`json.dumps` accepts."""
    kind = type(value)
    if kind in _PLAIN:  # most values are: a supervisor tells thousands of hosts at once
        return value
    if dataclasses.is_dataclass(kind):
        return {name: to_jsonable(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, tuple):
        return [to_jsonable(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def from_jsonable(kind: type[T], data: Any) -> T:
    """Inverse of :func:`to_jsonable`.

    Raises:
        ValueError: not an object, a field is missing, unknown, or of another type; names the field.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} must be an object, not {type(data).__name__}")
    fields = _fields(kind)  # type: ignore[arg-type]  # a class is hashable
    unknown = sorted(data.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
    values = {}
    for name, (hint, required) in fields.items():
        if name in data:
            values[name] = _checked(hint, data[name], f"{kind.__name__}.{name}")
        elif required:
            raise ValueError(f"{kind.__name__} lacks the field {name!r}")
    return kind(**values)


@functools.cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _fields(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """For each field by name: its type, and whether it is required."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    }


def _checked(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (inner,) = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return _checked(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, not {type(value).__name__}")
        inner = typing.get_args(hint)[0]
        if inner in _PLAIN and all(type(item) is inner for item in value):  # columns may be long
            return tuple(value)
        return tuple(_checked(inner, item, where) for item in value)
    if origin is Mapping or hint is Mapping or origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, not {type(value).__name__}")
        return value
    return _checked_scalar(hint, value, where)


def _checked_scalar(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        own = getattr(hint, "from_jsonable", None)
        if own is not None:
            try:
                return own(value)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{where} is invalid: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, not {type(value).__name__}")
        return from_jsonable(hint, value)  # type: ignore[arg-type]  # is_dataclass also passes instances
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if not isinstance(value, str) or value not in hint.__members__:
            raise ValueError(f"{where} is {value!r:.80}, not one of {', '.join(hint.__members__)}")
        return hint[value]
    wanted = (int, float) if hint is float else hint
    # A bool is an int for Python, but not here.
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} must be {hint.__name__}, not {type(value).__name__}")
    return float(value) if hint is float else value
