"""Reads the structure of a plain state: dicts, lists, numbers, strings and tensors, and nothing else.

Torch's restricted unpickler takes about 100 microseconds a tensor, half of it to ask whether the tensor is a fake one.
This one takes a sixth, and leaves every other pickle to it. Nothing outside a short table can be named here, and of a
pickle's operations only those that make plain values are known.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resiliency.errors import ResiliencyError
from resiliency.state.describe import STORAGE_CLASSES

__all__ = ["NotPlain", "StorageKind", "StoredTensor", "describe_plain", "describe_tensor", "load_plain"]


class NotPlain(Exception):
    """The pickle holds something else, or is no pickle."""


@dataclass(frozen=True, slots=True)
class StorageKind:
    """Stands for one of torch's storage classes. Cannot be called, so that a pickle makes nothing of it."""

    _dtype: torch.dtype


class _StoredStorage(NamedTuple):
    key: str
    numel: int
    dtype: torch.dtype


class StoredTensor(NamedTuple):
    """Stands for a tensor of the pickle: which elements of which storage it has. Inside of the storage.

    Attributes:
        storage: key of the storage.
        offset: of its first element, in elements.
        shape, strides: in elements.
        extent: elements from the first to the last, with those between that are not its own.
        contiguous: it lies in C order.
    """

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int
    contiguous: bool

    def __hash__(self) -> int:
        raise TypeError("as a key of a dict it could not be replaced by the tensor it stands for")


def load_plain(data: bytes, persistent_load: Callable[[Any], Any]) -> Any:
    """The value of a pickle.

    Args:
        persistent_load: returns the typed storage of ``("storage", StorageKind, key, location, number of elements)``.

    Raises:
        NotPlain: it is for torch's unpickler, to read or to refuse.
        ResiliencyError: of ``persistent_load``.
    """
    return _checked(data, persistent_load, _NAMES)


def describe_plain(data: bytes) -> tuple[Any, Counter[str]]:
    """As :func:`load_plain`, with a :class:`StoredTensor` in the place of each tensor; takes half its time.

    Returns:
        The tree, and how often each storage is named.

    Raises:
        NotPlain: as above.
    """
    uses: Counter[str] = Counter()

    def persistent_load(reference: Any) -> _StoredStorage:
        name, kind, key, _, numel = reference
        if name != "storage" or type(kind) is not StorageKind or type(key) is not str or type(numel) is not int:
            raise NotPlain("no reference to a storage")
        uses[key] += 1
        return _StoredStorage(key, numel, kind._dtype)

    def tensor(
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        hooks: Any,
        metadata: Any = None,
    ) -> StoredTensor:
        numbers = (offset, *shape, *strides)
        if metadata or hooks or type(storage) is not _StoredStorage or not _INTS.issuperset(map(type, numbers)):
            raise NotPlain("a tensor with properties of its own")
        extent, contiguous = _extent(shape, strides)
        if min(numbers) < 0 or (extent and offset + extent > storage.numel):
            raise NotPlain("a tensor outside of its storage")
        return StoredTensor(storage.key, storage.dtype, offset, tuple(shape), tuple(strides), extent, contiguous)

    def parameter(data: Any, requires_grad: Any, hooks: Any) -> StoredTensor:
        if type(data) is not StoredTensor or hooks:
            raise NotPlain("a parameter of its own kind")
        return data

    names = {**_NAMES, _REBUILD_TENSOR: tensor, _REBUILD_PARAMETER: parameter}
    return _checked(data, persistent_load, names), uses


def describe_tensor(tensor: Tensor, storage: str) -> StoredTensor:
    """Where a strided tensor is in its storage, which has this key."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return StoredTensor(storage, tensor.dtype, int(tensor.storage_offset()), shape, strides, *_extent(shape, strides))


_INTS = frozenset({int})


def _extent(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, bool]:
    """(elements from the first to the last, C order) of a tensor."""
    last, step, contiguous = 0, 1, True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return 0, True
        if size != 1:
            contiguous = contiguous and stride == step
            step *= size
            last += (size - 1) * stride
    return last + 1, contiguous


def _checked(data: bytes, persistent_load: Callable[[Any], Any], names: Mapping[tuple[str, str], Any]) -> Any:
    if not data.startswith(b"\x80\x02"):
        raise NotPlain("another protocol than torch's")
    try:
        return _load(data, persistent_load, names)
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


_REBUILD_TENSOR, _REBUILD_PARAMETER = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")
_NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    _REBUILD_TENSOR: _rebuild_tensor,
    _REBUILD_PARAMETER: _rebuild_parameter,
    **{("torch", name): StorageKind(dtype) for dtype, name in STORAGE_CLASSES.items()},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in STORAGE_CLASSES},
}

(_PUT, _LONG_PUT, _GET, _LONG_GET) = pickle.BINPUT[0], pickle.LONG_BINPUT[0], pickle.BINGET[0], pickle.LONG_BINGET[0]
(_INT1, _INT2, _INT4, _LONG) = pickle.BININT1[0], pickle.BININT2[0], pickle.BININT[0], pickle.LONG1[0]
(_TUPLE, _TUPLE0, _TUPLE1) = pickle.TUPLE[0], pickle.EMPTY_TUPLE[0], pickle.TUPLE1[0]
(_TUPLE2, _TUPLE3, _MARK) = pickle.TUPLE2[0], pickle.TUPLE3[0], pickle.MARK[0]
(_TEXT, _FLOAT, _TRUE, _FALSE) = pickle.BINUNICODE[0], pickle.BINFLOAT[0], pickle.NEWTRUE[0], pickle.NEWFALSE[0]
(_NONE, _LIST, _APPEND, _APPENDS) = pickle.NONE[0], pickle.EMPTY_LIST[0], pickle.APPEND[0], pickle.APPENDS[0]
(_DICT, _SETITEM, _SETITEMS, _STOP) = pickle.EMPTY_DICT[0], pickle.SETITEM[0], pickle.SETITEMS[0], pickle.STOP[0]
(_REDUCE, _PERSID, _GLOBAL, _BUILD) = pickle.REDUCE[0], pickle.BINPERSID[0], pickle.GLOBAL[0], pickle.BUILD[0]
_FLOAT_BYTES = struct.Struct(">d")


def _has_stored(value: Any) -> bool:
    """True when it holds a :class:`StoredTensor`, which nobody would replace among attributes."""
    if type(value) in (dict, OrderedDict):
        return any(map(_has_stored, value.values()))
    return type(value) is StoredTensor or (type(value) in (list, tuple) and any(map(_has_stored, value)))


def _load(data: bytes, persistent_load: Callable[[Any], Any], names: Mapping[tuple[str, str], Any]) -> Any:
    """Runs a pickle's operations, the most frequent of a described tensor first.

    The file object and the dispatch of :mod:`pickle`'s own loop in Python take three times as long. A read behind the
    end of the data gives less than it should; the next operation then fails, because there is none.

    Raises:
        NotPlain: an operation or a name that is not plain.
        Exception: whatever a malformed pickle leads to.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under the open marks
    memo: dict[int, Any] = {}
    at = 2  # behind the protocol
    while True:
        operation = data[at]
        at += 1
        if operation == _MARK:
            below.append(stack)
            stack = []
        elif operation == _INT4:
            stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
            at += 4
        elif operation == _TEXT:
            start = at + 4
            at = start + int.from_bytes(data[at:start], "little")
            stack.append(str(data[start:at], "utf-8", "surrogatepass"))
        elif operation == _TUPLE:
            items = tuple(stack)
            stack = below.pop()
            stack.append(items)
        elif operation == _LONG_GET:
            stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif operation == _REDUCE:
            arguments = stack.pop()
            stack[-1] = stack[-1](*arguments)
        elif operation == _TUPLE0:
            stack.append(())
        elif operation == _FALSE:
            stack.append(False)
        elif operation == _PERSID:
            stack[-1] = persistent_load(stack[-1])
        elif operation == _PUT:
            memo[data[at]] = stack[-1]
            at += 1
        elif operation == _LONG_PUT:
            memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
            at += 4
        elif operation == _GET:
            stack.append(memo[data[at]])
            at += 1
        elif operation == _INT1:
            stack.append(data[at])
            at += 1
        elif operation == _TUPLE1:
            stack[-1] = (stack[-1],)
        elif operation == _TUPLE2:
            stack[-2:] = [(stack[-2], stack[-1])]
        elif operation == _INT2:
            stack.append(int.from_bytes(data[at : at + 2], "little"))
            at += 2
        elif operation == _FLOAT:
            stack.append(_FLOAT_BYTES.unpack_from(data, at)[0])
            at += 8
        elif operation == _TUPLE3:
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif operation == _NONE:
            stack.append(None)
        elif operation == _TRUE:
            stack.append(True)
        elif operation == _LONG:
            start = at + 1
            at = start + data[at]
            stack.append(int.from_bytes(data[start:at], "little", signed=True))
        elif operation == _DICT:
            stack.append({})
        elif operation == _LIST:
            stack.append([])
        elif operation == _SETITEM or operation == _SETITEMS:
            if operation == _SETITEM:
                pairs = [stack.pop(-2), stack.pop()]
            else:
                pairs, stack = stack, below.pop()
            if type(stack[-1]) not in (dict, OrderedDict):
                raise NotPlain("items of an object")
            stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        elif operation == _APPEND or operation == _APPENDS:
            if operation == _APPEND:
                more = [stack.pop()]
            else:
                more, stack = stack, below.pop()
            if type(stack[-1]) is not list:
                raise NotPlain("items of an object")
            stack[-1].extend(more)
        elif operation == _GLOBAL:
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            name = (data[at:middle].decode(), data[middle + 1 : end].decode())
            if name not in names:
                raise NotPlain(".".join(name))
            stack.append(names[name])
            at = end + 1
        elif operation == _BUILD:
            # Attributes of an OrderedDict, as ``Module.state_dict`` gives them (``_metadata``).
            attributes = stack.pop()
            if type(stack[-1]) is not OrderedDict or type(attributes) is not dict or _has_stored(attributes):
                raise NotPlain("attributes of an object")
            stack[-1].__dict__.update(attributes)
        elif operation == _STOP:
            return stack.pop()
        else:
            raise NotPlain(f"operation {operation:#x}")
