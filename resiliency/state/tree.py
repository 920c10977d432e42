"""Names the tensors of a state tree by their paths, and puts others in their place."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import kind_of_class

__all__ = ["dtype_from_name", "dtype_name", "join_path", "keyed_leaves", "replace_leaves"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`.

    Raises:
        ConfigError: this torch does not know the dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"the checkpoint holds tensors of dtype {name!r}, which torch {torch.__version__} does not know"
        )
    return dtype


def join_path(parts: Sequence[str]) -> str:
    """Joins keys from the root. Different paths may give the same text; callers must make such keys unique."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def keyed_leaves(tree: Any) -> dict[str, Any]:
    """Every leaf of a tree (tensors and what registered kinds take) by its key, which is its path.

    A leaf that occurs twice has two keys. Dicts, lists, tuples and what derives from them are looked into.
    """
    found: dict[str, Any] = {}

    def take(leaf: Any, path: tuple[str, ...]) -> Any:
        key = join_path(path) or "value"
        while key in found:
            key += "~"
        found[key] = leaf
        return leaf

    _walk(tree, (), take)
    return found


def replace_leaves(tree: Any, replacement: Callable[[Any], Any]) -> Any:
    """The tree with ``replacement(leaf)`` in the place of each leaf. Containers are changed in place where they can
    be."""
    return _walk(tree, (), lambda leaf, _: replacement(leaf))


def _walk(value: Any, path: tuple[str, ...], take: Callable[[Any, tuple[str, ...]], Any]) -> Any:
    if isinstance(value, Tensor) or kind_of_class(type(value)) is not None:
        return take(value, path)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            new = _walk(item, (*path, str(key)), take)
            if new is not item:
                value[key] = new
        return value
    if isinstance(value, list | collections.deque):
        for index, item in enumerate(value):
            new = _walk(item, (*path, str(index)), take)
            if new is not item:
                value[index] = new
        return value
    if isinstance(value, tuple):
        items = [_walk(item, (*path, str(index)), take) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
