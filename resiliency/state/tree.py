"""Names the tensors of a state tree by their paths, and replaces them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import kind_of_class

__all__ = ["count_leaves", "dtype_from_name", "dtype_name", "is_leaf", "keyed_leaves", "replace_leaves"]

_SEQUENCES = (list, tuple, collections.deque)


@functools.cache
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
    if is_leaf(tree):
        return {"value": tree}
    found: dict[str, Any] = {}
    _find_leaves(tree, "", is_leaf, found, {})
    return found


def _find_leaves(
    container: Any, above: str, is_leaf: Callable[[Any], bool], found: dict[str, Any], without: dict[int, Any]
) -> None:
    """Adds the leaves in a container to ``found``.

    Args:
        above: what their paths begin with.
        without: by id, containers that hold no leaf; they are not looked into again.
    """
    if isinstance(container, dict):
        items: Iterable[tuple[Any, Any]] = list(container.items())
    elif isinstance(container, _SEQUENCES):
        items = enumerate(container)
    else:
        return
    before = len(found)
    for name, item in items:
        part = str(name)
        if "%" in part or "/" in part:
            part = part.replace("%", "%25").replace("/", "%2F")
        if is_leaf(item):
            key = above + part or "value"
            while key in found:  # different paths may have the same text: 1 and "1"
                key += "~"
            found[key] = item
        elif id(item) not in without:
            _find_leaves(item, f"{above}{part}/", is_leaf, found, without)
    if len(found) == before:
        without[id(container)] = container


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
    made anew. A container that is in several places stays one."""
    if is_leaf(tree):
        return replacement(tree)
    return _with_replaced(tree, replacement, is_leaf, {})


def _with_replaced(
    value: Any, replacement: Callable[[Any], Any], is_leaf: Callable[[Any], bool], done: dict[int, tuple[Any, Any]]
) -> Any:
    """:func:`replace_leaves` for anything but a leaf. ``done``: by id, containers that were met, and what they are."""
    if isinstance(value, tuple):
        if id(value) in done:
            return done[id(value)][1]
        items = [
            replacement(item) if is_leaf(item) else _with_replaced(item, replacement, is_leaf, done) for item in value
        ]
        made = value
        if not all(new is old for new, old in zip(items, value, strict=True)):
            made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        done[id(value)] = value, made
        return made
    if isinstance(value, dict):
        places: Iterable[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, _SEQUENCES):
        places = enumerate(value)
    else:
        return value
    if id(value) in done:
        return value
    done[id(value)] = value, value
    for place, item in places:
        new = replacement(item) if is_leaf(item) else _with_replaced(item, replacement, is_leaf, done)
        if new is not item:
            value[place] = new
    return value
