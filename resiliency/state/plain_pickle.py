"""Reads the structure of a plain state: dicts, lists, numbers, strings and tensors, and nothing else.

Torch's restricted unpickler takes about 100 microseconds a tensor, half of it to ask whether the tensor is a fake one.
This one takes a quarter, and leaves every other pickle to it. Nothing outside a short table can be named here, and of a
pickle's operations only those that make plain values are known.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resiliency.errors import ResiliencyError
from resiliency.state.describe import STORAGE_CLASSES

__all__ = ["NotPlain", "StorageKind", "load_plain"]


class NotPlain(Exception):
    """The pickle holds something else, or is no pickle."""


@dataclass(frozen=True, slots=True)
class StorageKind:
    """Stands for one of torch's storage classes. Cannot be called, so that a pickle makes nothing of it."""

    _dtype: torch.dtype


def load_plain(data: bytes, persistent_load: Callable[[Any], Any]) -> Any:
    """The value of a pickle.

    Args:
        persistent_load: returns the typed storage of ``("storage", StorageKind, key, location, number of elements)``.

    Raises:
        NotPlain: it is for torch's unpickler, to read or to refuse.
        ResiliencyError: of ``persistent_load``.
    """
    if not data.startswith(b"\x80\x02"):
        raise NotPlain("another protocol than torch's")
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.persistent_load = persistent_load
    try:
        return unpickler.load()
    except (NotPlain, ResiliencyError):
        raise
    except Exception as error:
        # Boundary: whatever is wrong with it, torch's unpickler has the words.
        raise NotPlain(str(error)) from error


def _rebuild_tensor(
    storage: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: OrderedDict[Any, Any],
    metadata: Any = None,
) -> Tensor:
    """As torch's function of this name, without a question about fake tensors."""
    if metadata or hooks:
        raise NotPlain("a tensor with properties of its own")
    untyped = storage._untyped_storage
    tensor = torch.empty((0,), dtype=storage._dtype, device=untyped.device)
    tensor.set_(untyped, offset, size, stride)
    tensor.requires_grad = requires_grad
    tensor._backward_hooks = hooks
    return tensor


def _rebuild_parameter(data: Tensor, requires_grad: bool, hooks: OrderedDict[Any, Any]) -> torch.nn.Parameter:
    if type(data) is not Tensor or hooks:
        raise NotPlain("a parameter of its own kind")
    parameter = torch.nn.Parameter(data, requires_grad)
    parameter._backward_hooks = hooks
    return parameter


_NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): StorageKind(dtype) for dtype, name in STORAGE_CLASSES.items()},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in STORAGE_CLASSES},
}

_PythonUnpickler: Any = getattr(pickle, "_Unpickler")  # noqa: B009 - of the standard library, but not declared
_OPERATIONS = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.BINPERSID, pickle.GLOBAL, pickle.REDUCE),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINUNICODE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
)


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch = {operation[0]: _PythonUnpickler.dispatch[operation[0]] for operation in _OPERATIONS}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise NotPlain(f"{module}.{name}") from None

    def load_build(self) -> None:
        """Attributes of an OrderedDict, as ``Module.state_dict`` gives them (``_metadata``)."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict or type(state) is not dict:
            raise NotPlain("attributes of an object")
        self.stack[-1].__dict__.update(state)

    dispatch[pickle.BUILD[0]] = load_build
