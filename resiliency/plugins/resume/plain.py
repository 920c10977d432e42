"""Copies batches and loader states into plain Python objects and CPU tensors, and back.

``torch.load(weights_only=True)`` can read such a copy from a file. An object without a plain form is refused, so that
the caller can warn that the resume will not be exact.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch

__all__ = ["NotPlain", "from_plain", "to_plain"]

_TAG = "__resiliency_plain__"
_SCALARS = (bool, int, float, str, bytes)


class NotPlain(TypeError):
    """An object that has no plain form; the message says its type and where it was found."""


def to_plain(value: Any, where: str = "value", *, non_blocking: bool = False) -> Any:
    """A deep copy of ``value`` made of None, bool, int, float, str, bytes, list, tuple, dict and CPU tensors.

    numpy arrays and scalars, sets, deques, complex numbers and dicts with other keys than str are tagged, so that
    :func:`from_plain` restores their types. Subclasses of dict and list (OrderedDict) come back as dict and list.

    Args:
        where: how an error names ``value``.
        non_blocking: copies from CUDA devices may still run when this returns; the caller must wait for the stream.

    Raises:
        NotPlain: ``value`` contains an object of another type (a NamedTuple, a dataclass).
    """

    def plain(item: Any, place: str) -> Any:
        return to_plain(item, place, non_blocking=non_blocking)

    kind = type(value)
    if value is None or kind in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, non_blocking=non_blocking and value.is_cuda)
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [(plain(key, f"{where} key"), plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
        return {_TAG: "dict", "of": pairs}
    if kind is tuple or kind is torch.Size:
        return tuple(plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, list):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, deque):
        return {_TAG: "deque", "of": [plain(item, where) for item in value], "maxlen": value.maxlen}
    if kind in (set, frozenset):
        return {_TAG: kind.__name__, "of": [plain(item, where) for item in value]}
    if kind is complex:
        return {_TAG: "complex", "of": (value.real, value.imag)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        array = numpy.asarray(value)
        form = {_TAG: "numpy", "dtype": array.dtype.str, "shape": array.shape, "of": array.tobytes()}
        return form | {"scalar": isinstance(value, numpy.generic)}
    raise NotPlain(f"{where} is a {kind.__module__}.{kind.__qualname__}, which has no plain form")


def from_plain(value: Any) -> Any:
    """Inverse of :func:`to_plain`. Tensors are copied: the result shares no memory with ``value``."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(from_plain(item) for item in value)
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: from_plain(item) for key, item in value.items()}
    of = value["of"]
    if tag == "dict":
        return {from_plain(key): from_plain(item) for key, item in of}
    if tag == "deque":
        return deque(map(from_plain, of), maxlen=value["maxlen"])
    if tag == "complex":
        return complex(*of)
    if tag == "numpy":
        import numpy

        array = numpy.frombuffer(of, dtype=numpy.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array[()] if value["scalar"] else array
    return {"set": set, "frozenset": frozenset}[tag](map(from_plain, of))
