"""Reads a pickled structure without making any of the objects it names, and without importing anything. No torch.

``data.pkl`` of a checkpoint is a pickle, and a pickle can name any class. Here every class and function is replaced by
a stand-in that records its name and arguments (:class:`Made`), so that a listing can show the contents even where the
classes cannot be imported or must not be trusted. Tensors are recognised by the names of the torch functions that
rebuild them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Made", "StorageRef", "TensorView", "as_tensor", "children", "read_pickle"]

#: Storage class named in a pickle -> torch dtype name.
_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
#: Functions that rebuild a tensor from a storage, an offset, sizes and strides.
_BY_STORAGE = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
#: Functions that wrap a tensor, which is their first argument.
_AROUND = ("_rebuild_parameter", "_rebuild_parameter_with_state")


class Made:
    """Stands in for an object that a pickle makes by calling a class or function; each of these gets its own subclass.

    Attributes:
        name: full name of the class or function.
        args: arguments of the call.
        state: state that the object was given afterwards; None: none.
        items, pairs: items added to it as to a list, and as to a dict.
    """

    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **_: Any) -> Made:
        made = object.__new__(cls)
        made.args, made.state, made.items, made.pairs = args, None, [], []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def add(self, item: Any) -> None:
        self.items.append(item)


@dataclass(frozen=True)
class StorageRef:
    """A storage that a pickle refers to: its key, and the dtype of its elements ("" when unknown)."""

    key: str
    dtype: str


@dataclass(frozen=True)
class TensorView:
    """A tensor as a pickle describes it.

    Attributes:
        kind: "Tensor", "Parameter", or the class of the tensor.
        dtype: torch's name for it; "" when unknown.
        storage: key of its storage; None when the pickle describes it without one (sparse, of a user's class).
        shape, offset, strides: in elements; strides None: unknown.
    """

    kind: str
    dtype: str
    storage: str | None
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._made: dict[str, type[Made]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._made:
            self._made[full] = type(name.rpartition(".")[2] or "object", (Made,), {"name": full})
        return self._made[full]

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) != 5:
            return StorageRef("", "")
        kind = pid[1].__name__ if isinstance(pid[1], type) else ""
        return StorageRef(str(pid[2]), _DTYPES.get(kind, ""))


def read_pickle(data: bytes) -> Any:
    """The tree that a pickle describes: builtin containers and values, :class:`Made` and :class:`StorageRef`.

    Raises:
        ValueError: the data is not a pickle, or a damaged one.
    """
    try:
        return _Unpickler(data).load()
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"the pickle is nested too deeply or damaged ({type(error).__name__})") from None
    except Exception as error:  # Boundary: damaged bytes make the unpickler raise almost anything.
        raise ValueError(f"the pickle cannot be read ({type(error).__name__}: {error})") from error


def as_tensor(item: Any) -> TensorView | None:
    """The tensor that ``item`` stands for; None when it stands for something else."""
    return _as_tensor(item, 8)


def _as_tensor(item: Any, depth: int) -> TensorView | None:
    if not isinstance(item, Made) or not item.name.startswith("torch.") or not depth:
        return None
    function, args = item.name.rpartition(".")[2], item.args
    try:
        if function in _BY_STORAGE and isinstance(args[0], StorageRef):
            dtype = args[0].dtype
            if function == "_rebuild_tensor_v3":  # for dtypes without a storage class
                dtype = args[6].name.removeprefix("torch.")
            offset, shape, strides = int(args[1]), _numbers(args[2]), _numbers(args[3])
            kind = "quantized" if function == "_rebuild_qtensor" else "Tensor"
            return TensorView(kind, dtype, args[0].key, shape, offset, strides)
        if function in _AROUND:
            inner = _as_tensor(args[0], depth - 1)
            return None if inner is None else _as_kind(inner, "Parameter")
        if function == "_rebuild_from_type_v2":
            rebuild, class_, inner_args = args[0], args[1], args[2]
            inner = _as_tensor(rebuild(*inner_args), depth - 1)
            return None if inner is None else _as_kind(inner, class_.__name__)
        if function == "_rebuild_sparse_tensor":
            return TensorView("sparse", "", None, _numbers(args[1][2]))
        if function == "_rebuild_wrapper_subclass":
            return TensorView(args[0].__name__, args[1].name.removeprefix("torch."), None, _numbers(args[2]))
        if function == "_rebuild_meta_tensor_no_storage":
            return TensorView("meta", args[0].name.removeprefix("torch."), None, _numbers(args[1]))
    except (IndexError, TypeError, ValueError, AttributeError):
        return None  # another torch version with other arguments: shown as an object
    return None


def _as_kind(tensor: TensorView, kind: str) -> TensorView:
    return TensorView(kind, tensor.dtype, tensor.storage, tensor.shape, tensor.offset, tensor.strides)


def _numbers(values: Any) -> tuple[int, ...]:
    if isinstance(values, Made):  # torch.Size
        values = values.args[0]
    return tuple(int(value) for value in values)


def children(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, part) for the parts of a container, with the names users know; nothing for anything else."""
    if isinstance(item, dict):
        yield from ((_key(key), value) for key, value in item.items())
    elif isinstance(item, list | tuple):
        yield from ((str(at), value) for at, value in enumerate(item))
    elif isinstance(item, Made) and as_tensor(item) is None and item.name not in _VALUES:
        yield from ((_key(key), value) for key, value in item.pairs)
        yield from ((str(at), value) for at, value in enumerate(item.items))
        if item.name == "collections.OrderedDict":
            return  # its state is an attribute where torch keeps module versions, not an entry
        if isinstance(item.state, dict):
            yield from children(item.state)
        elif item.name in _OF_ONE and item.args and isinstance(item.args[0], list | tuple):
            yield from children(item.args[0])


#: Classes whose objects are shown as one value.
_VALUES = ("torch.Size", "torch.device", "builtins.complex", "__builtin__.complex", "builtins.slice")
#: Containers that get all their items in the constructor.
_OF_ONE = tuple(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")) + (
    "collections.deque",
)


def _key(key: Any) -> str:
    return key.name if isinstance(key, Made) else str(key)
