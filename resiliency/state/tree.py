"""Names the tensors of a state tree by their paths, and replaces them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import kind_of_class

__all__ = ["count_leaves", "dtype_from_name", "dtype_name", "is_leaf", "keyed_leaves", "replace_leaves"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
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


def is_leaf(value: Any) -> bool:
    """True for a tensor, and for an object that a registered leaf kind takes."""
    return isinstance(value, Tensor) or kind_of_class(type(value)) is not None


def keyed_leaves(tree: Any, is_leaf: Callable[[Any], bool] = is_leaf) -> dict[str, Any]:
    """Path -> leaf, for every leaf of a tree (tensors, and objects that registered leaf kinds take).

    A leaf that occurs twice has two paths. Looks into dicts, lists, tuples, deques and their subclasses.
    """
    found: dict[str, Any] = {}

    def take(leaf: Any, path: str) -> Any:
        key = path[1:] or "value"
        while key in found:  # different paths may have the same text: 1 and "1"
            key += "~"
        found[key] = leaf
        return leaf

    _walk(tree, "", take, is_leaf)
    return found


def count_leaves(tree: Any, is_leaf: Callable[[Any], bool] = is_leaf) -> collections.Counter[int]:
    """Id of a leaf -> how often :func:`keyed_leaves` would find it if it looked into each container only once."""
    found: collections.Counter[int] = collections.Counter()
    seen: set[int] = set()

    def count(value: Any) -> None:
        if is_leaf(value):
            found[id(value)] += 1
        elif isinstance(value, dict | list | tuple | collections.deque) and id(value) not in seen:
            seen.add(id(value))
            for item in value.values() if isinstance(value, dict) else value:
                count(item)

    count(tree)
    return found


def replace_leaves(tree: Any, replacement: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = is_leaf) -> Any:
    """The tree with ``replacement(leaf)`` in place of each leaf. Changes containers in place, except tuples, which are
    made anew."""
    return _walk(tree, "", lambda leaf, _: replacement(leaf), is_leaf)


def _under(path: str, key: object) -> str:
    """The path of an item in a container; each part of a path begins with a slash."""
    part = str(key)
    if "%" in part or "/" in part:
        part = part.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{part}"


def _walk(value: Any, path: str, take: Callable[[Any, str], Any], is_leaf: Callable[[Any], bool]) -> Any:
    if is_leaf(value):
        return take(value, path)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            new = _walk(item, _under(path, key), take, is_leaf)
            if new is not item:
                value[key] = new
        return value
    if isinstance(value, list | collections.deque):
        for index, item in enumerate(value):
            new = _walk(item, _under(path, index), take, is_leaf)
            if new is not item:
                value[index] = new
        return value
    if isinstance(value, tuple):
        items = [_walk(item, _under(path, index), take, is_leaf) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
