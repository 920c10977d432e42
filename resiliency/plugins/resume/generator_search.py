"""Searches the objects that a data loader holds for random generators.

Generators are ``random.Random``, ``torch.Generator`` and numpy's ``Generator``, ``RandomState`` and bit generators. The
search follows attributes of objects and classes, containers, partial and bound functions, closures, local variables of
suspended generator functions, and global variables that functions and methods name. The generators of the process
(``random``, ``numpy.random``, torch's default) belong to :mod:`resiliency.plugins.resume.rng` and are left out.

Bounds: 1000 objects, nearest first; containers of more than 256 entries (those of samples) and tensors are not looked
into; attributes are read from ``__dict__`` and slots, so that no property runs. A generator in C++ or in a worker
process is not found.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

__all__ = ["Found", "asks_its_nodes", "attributes_of", "is_stateful", "of_the_process", "search"]

_MOST_OBJECTS = 1000
_MOST_ENTRIES = 256

#: Where the search stops: these own no generator, or are many.
_LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, types.ModuleType, type, logging.Logger)
#: Packages whose classes keep no generator in class attributes or global variables, apart from those of the process.
_KNOWN = {"builtins", "collections", "lightning", "numpy", "pytorch_lightning", "torch", "torchdata", "typing"}

#: class -> the global variables that its methods name, as (their module's variables, name).
_named: weakref.WeakKeyDictionary[type, tuple[tuple[dict[str, Any], str], ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Found:
    """A generator and how it was reached.

    Attributes:
        path: from a root: attribute names, keys and indices (``dataset.parts[0].rng``).
        generator: for numpy's ``Generator``, which may share it, its bit generator.
        self_restored: an object whose own ``load_state_dict`` the holder of the roots calls is responsible for it.
        below_source: it is below a node of torchdata that finds its place by reading what it wraps again.
    """

    path: str
    generator: Any
    self_restored: bool
    below_source: bool


class _Role(Enum):
    LEAF = "leaf"
    GENERATOR = "generator"
    NUMPY = "numpy's Generator"
    NODE = "node"
    SOURCE = "source node"
    OTHER = "other"


def search(roots: Mapping[str, Any], seen: set[int], *, asking: bool = False, opaque: bool = False) -> Iterator[Found]:
    """Yields the generators below ``roots``, nearest first, each once.

    Args:
        seen: ids of objects to pass over; those that are looked at are added.
        asking: whoever holds the roots calls their ``state_dict``, if they have one.
        opaque: whoever holds the roots restores all that is below them.
    """
    kinds: dict[type, tuple[_Role, list[tuple[str, Any]]]] = {}
    todo = deque((name, value, asking, opaque, False) for name, value in roots.items())
    left = _MOST_OBJECTS
    while todo and left:
        path, value, asked, restored, source = todo.popleft()
        kind = type(value)
        if new := kind not in kinds:
            kinds[kind] = _role_of(kind), _slots_of(kind)
        role, slots = kinds[kind]
        if role is _Role.LEAF:
            continue
        value = value.bit_generator if role is _Role.NUMPY else value
        if id(value) in seen:
            continue
        seen.add(id(value))
        left -= 1
        if role in (_Role.GENERATOR, _Role.NUMPY):
            yield Found(path, value, restored, source)
            continue
        node = role in (_Role.NODE, _Role.SOURCE)
        restored = restored or (asked and not node and is_stateful(value))
        source = source or role is _Role.SOURCE
        asks = asked and (node or kind in (list, tuple, dict))
        todo.extend((path + step, child, asks, restored, source) for step, child in _children(value, slots))
        if new:
            todo.extend((path + step, child, False, restored, source) for step, child in _of_class(kind))


def is_stateful(value: Any) -> bool:
    """True when the object saves and loads its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def asks_its_nodes(loader: Any) -> bool:
    """True for torchdata's loader of nodes: its state is made of theirs."""
    nodes = sys.modules.get("torchdata.nodes")
    return nodes is not None and isinstance(loader, nodes.Loader)


def of_the_process() -> set[int]:
    """Ids of the generators that :mod:`resiliency.plugins.resume.rng` saves."""
    known: list[Any] = [
        getattr(random.random, "__self__", None),
        torch.default_generator,
        *torch.cuda.default_generators,
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        own = numpy.random.rand.__self__
        known += [own, own._bit_generator]
    return {id(one) for one in known}


def _role_of(kind: type) -> _Role:
    numpy, nodes = sys.modules.get("numpy"), sys.modules.get("torchdata.nodes")
    generators = (random.Random, torch.Generator)
    if issubclass(kind, _LEAVES):
        return _Role.LEAF
    if issubclass(kind, generators):
        return _Role.GENERATOR
    if numpy is not None and issubclass(kind, numpy.random.Generator):
        return _Role.NUMPY
    if numpy is not None and issubclass(kind, (numpy.random.RandomState, numpy.random.BitGenerator)):
        return _Role.GENERATOR
    if nodes is not None and issubclass(kind, nodes.BaseNode):
        return _Role.SOURCE if issubclass(kind, (nodes.SamplerWrapper, nodes.IterableWrapper)) else _Role.NODE
    return _Role.OTHER


def _is_generator(value: Any) -> bool:
    return _role_of(type(value)) in (_Role.GENERATOR, _Role.NUMPY)


# ---- one step


def _children(value: Any, slots: list[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        entries = list(dict.items(value)) if len(value) <= _MOST_ENTRIES else []  # a copy: threads may change it
        return [(f"[{key!r}]", child) for key, child in entries if isinstance(key, str | int)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", child) for index, child in enumerate(list(value) if len(value) <= _MOST_ENTRIES else [])]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        names = _names_in(value.__code__)
        return [(f".{name}", _content(cell)) for name, cell in cells] + _globals(
            (value.__globals__, name) for name in names
        )
    if isinstance(value, types.GeneratorType):
        local = dict(value.gi_frame.f_locals) if value.gi_frame is not None else {}
        return [(f".{name}", child) for name, child in local.items()]
    return [(f".{name}", child) for name, child in attributes_of(value, slots).items()]


def attributes_of(value: Any, slots: Iterable[tuple[str, Any]] = ()) -> dict[str, Any]:
    """What an object keeps in its ``__dict__`` and in these slots, as (name, descriptor)."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = {}
    for name, descriptor in slots:
        with suppress(AttributeError):  # not set
            found[name] = descriptor.__get__(value)
    return found


def _slots_of(kind: type) -> list[tuple[str, Any]]:
    slotted = [base.__dict__ for base in kind.__mro__ if base.__dict__.get("__slots__")]
    return [item for own in slotted for item in own.items() if isinstance(item[1], types.MemberDescriptorType)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set
        return None


def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Generators in attributes of a class, and in global variables that its methods name."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _KNOWN]
    named = _named.get(kind)
    if named is None:
        methods = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
        named = _named[kind] = tuple(
            (method.__globals__, name) for method in methods for name in _names_in(method.__code__)
        )
    own = [(f".{name}", value) for base in bases for name, value in vars(base).items() if _is_generator(value)]
    return own + _globals(named)


def _globals(named: Iterable[tuple[dict[str, Any], str]]) -> list[tuple[str, Any]]:
    values = ((name, variables.get(name)) for variables, name in named)
    return [(f".globals[{name}]", value) for name, value in values if value is not None and _is_generator(value)]


def _names_in(code: types.CodeType) -> set[str]:
    """All names of global variables (and attributes) in a function, with those of the functions in it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
