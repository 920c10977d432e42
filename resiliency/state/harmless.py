"""Value classes of the standard library and numpy that torch's restricted unpickler is allowed to make as well."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import pathlib
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["harmless_classes"]


@contextmanager
def harmless_classes() -> Iterator[None]:
    """Within the context, torch's restricted unpickler may also make objects of value classes of the standard library
    and numpy.

    Such objects are common among hyper-parameters and in the state of random generators. One thread at a time: torch
    has one list for the whole process, and the first thread to leave would remove entries that another one still needs.
    Blocks: until no other thread is inside.
    """
    with _one_at_a_time:
        known = torch.serialization.get_safe_globals()  # what the user has allowed must stay allowed afterwards
        with torch.serialization.safe_globals([item for item in _harmless() if item not in known]):
            yield


_one_at_a_time = threading.RLock()


def _harmless() -> list[Any]:
    return _harmless_with("numpy" in sys.modules)


@functools.cache
def _harmless_with(numpy_is_there: bool) -> list[Any]:
    found: list[Any] = [
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        types.SimpleNamespace,
        uuid.UUID,
        uuid.SafeUUID,
        range,
        slice,
        frozenset,
        dict,
        list,
        int,
        float,
        str,
        bytes,  # an empty one is pickled as a call of its class
    ]
    found += [pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath]
    if numpy_is_there:
        import numpy

        # Functions that numpy's own pickles name, under either of two module names.
        core = getattr(numpy, "_core", None) or numpy.core
        found += [numpy.ndarray, numpy.dtype]
        for function in (core.multiarray._reconstruct, core.multiarray.scalar):
            found += [_named(function, f"numpy.{name}.multiarray") for name in ("core", "_core")]
        found += sorted({type(numpy.dtype(kind)) for kind in numpy.sctypeDict.values()}, key=repr)
    return found


def _named(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    """The function under the name of a module; torch before 2.6 allows one only under the name that it says itself."""

    def called(*arguments: Any) -> Any:
        return function(*arguments)

    called.__module__, called.__name__, called.__qualname__ = module, function.__name__, function.__name__
    return called
