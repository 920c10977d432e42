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
from collections.abc import Iterator
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
    with _one_at_a_time, _allowed():
        yield


_one_at_a_time = threading.RLock()


@contextmanager
def _allowed() -> Iterator[None]:
    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:  # torch 2.4 cannot remove classes again
        torch.serialization.add_safe_globals(_harmless())
        yield
        return
    # classes that the user has allowed must stay allowed afterwards
    known = torch.serialization.get_safe_globals()
    with safe_globals([item for item in _harmless() if item not in known]):
        yield


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
        found += [numpy.ndarray, numpy.dtype, core.multiarray._reconstruct, core.multiarray.scalar]
        torch_version = tuple(map(int, torch.__version__.split(".")[:2]))
        if torch_version >= (2, 6):  # older versions cannot allow a class under another name
            found += [(core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct")]
            found += [(core.multiarray.scalar, "numpy.core.multiarray.scalar")]
        found += sorted({type(numpy.dtype(kind)) for kind in numpy.sctypeDict.values()}, key=repr)
    return found
