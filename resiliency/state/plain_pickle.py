"""Reads the structure of a plain state: one of dicts, lists, numbers, strings and tensors only.

Torch's restricted unpickler takes about 100 microseconds per tensor, half of it to check for fake tensors. This
unpickler takes a tenth of that, and leaves every other pickle to torch's. It is Python's own C unpickler, restricted to
the names in a short table: two containers, and functions that return descriptions of tensors. None of these has
attributes that a pickle could set. (A malicious pickle can still make it allocate much memory, as a large tensor
would.)
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from resiliency.errors import ResiliencyError
from resiliency.state.describe import STORAGE_CLASSES
from resiliency.state.tree import keyed_leaves, replace_leaves

__all__ = [
    "PLAIN_NAMES",
    "NotPlainPickle",
    "StoredTensor",
    "describe_plain",
    "describe_tensor",
    "is_described",
    "load_plain",
]


class NotPlainPickle(Exception):
    """The pickle holds something else than a plain state, or is damaged; torch's unpickler must read or refuse it."""


class StoredTensor(NamedTuple):
    """Describes a tensor of the pickle: which elements of which storage it has. Always within the storage.

    Attributes:
        storage: key of the storage.
        offset: of the first element in the storage, in elements.
        shape, strides: in elements.
        extent: number of elements from the first to the last, including those in between that are not the tensor's own.
        contiguous: its elements are in C order.
        requires_grad, parameter: of the tensor to make; ``parameter``: it is a :class:`torch.nn.Parameter`.
    """

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int
    contiguous: bool
    requires_grad: bool
    parameter: bool = False


def is_described(value: Any) -> bool:
    """True for a description of a tensor."""
    return type(value) is StoredTensor


def load_plain(data: bytes, storage: Callable[[str, int], UntypedStorage]) -> tuple[Any, Counter[str]]:
    """The value of a pickle, and how often each storage is used.

    Args:
        storage: returns the storage of a key, with at least the given number of bytes.

    Raises:
        NotPlainPickle: torch's unpickler must read or refuse this pickle.
        ResiliencyError: raised by ``storage``.
    """
    tree, leaves = describe_plain(data)
    made: dict[int, Tensor] = {}

    def tensor(described: StoredTensor) -> Tensor:
        if id(described) not in made:
            made[id(described)] = _tensor(described, storage)
        return made[id(described)]

    try:
        return replace_leaves(tree, tensor, is_described), _uses(leaves)
    except ResiliencyError:
        raise
    except Exception as error:  # Boundary: as in describe_plain.
        raise NotPlainPickle(str(error)) from error


def _uses(leaves: Mapping[str, StoredTensor]) -> Counter[str]:
    return Counter([leaf.storage for leaf in {id(leaf): leaf for leaf in leaves.values()}.values()])


def _tensor(described: StoredTensor, storage: Callable[[str, int], UntypedStorage]) -> Tensor:
    _, dtype, offset, shape, strides, extent, _, requires_grad, parameter = described
    untyped = storage(described.storage, (offset + extent if extent else 0) * dtype.itemsize)
    tensor = torch.empty((0,), dtype=dtype, device=untyped.device)
    tensor.set_(untyped, offset, shape, strides)
    if parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    tensor.requires_grad = requires_grad
    tensor._backward_hooks = OrderedDict()
    return tensor


def describe_plain(data: bytes) -> tuple[Any, dict[str, StoredTensor]]:
    """Like :func:`load_plain`, with a :class:`StoredTensor` in place of each tensor.

    Returns:
        The tree, and the descriptions in it by key, see :func:`~resiliency.state.tree.keyed_leaves`.

    Raises:
        NotPlainPickle: as in :func:`load_plain`.
    """
    if not data.startswith(b"\x80\x02"):
        raise NotPlainPickle("another protocol than torch's")
    if getattr(copyreg, "_extension_registry", None):
        raise NotPlainPickle("pickles may name what this process has registered by numbers")
    reader = _Reader(io.BytesIO(data))
    try:
        tree = reader.load()
        leaves = keyed_leaves(tree, _PlainTree(len(data)).is_described)
    except NotPlainPickle:
        raise
    except Exception as error:
        # Boundary: whatever is wrong with the pickle, torch's unpickler will report it.
        raise NotPlainPickle(str(error)) from error
    if _uses(leaves) != Counter(reader.used):
        raise NotPlainPickle("a tensor in a place where only objects have one")
    return tree, leaves


_KEYS = frozenset({str, int, float, bool, complex, type(None), torch.dtype})


class _PlainTree:
    """Tells descriptions from other values on a walk through a tree.

    Args:
        most: how many items its containers may have in all, each counted as often as a path leads to it. A pickle of
            containers that are in many places has more of them than bytes: ``k = [k, k]``, thirty times over, has a
            thousand million.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def is_described(self, value: Any) -> bool:
        """Like :func:`is_described`, but refuses values that could hide a description.

        Raises:
            NotPlainPickle: the value may hold a description in a place that :func:`keyed_leaves` does not look into, or
                the walk would take too long.
        """
        class_ = type(value)
        if class_ is StoredTensor:
            return True
        if class_ in _KEYS:
            return False
        if class_ is dict or class_ is OrderedDict:
            for key in value:
                if type(key) not in _KEYS and not (type(key) is tuple and _KEYS.issuperset(map(type, key))):
                    raise NotPlainPickle(f"a key of type {type(key).__name__}")
            if class_ is OrderedDict and keyed_leaves(vars(value), self.is_described):
                raise NotPlainPickle("a tensor that is an attribute")
        elif class_ is not list and class_ is not tuple and class_ is not torch.Size:
            if value is not OrderedDict and value is not torch.Size:
                raise NotPlainPickle(f"a {class_.__name__}")
            return False
        self._left -= len(value) + 1
        if self._left < 0:
            raise NotPlainPickle("containers that are in very many places")
        return False


def describe_tensor(tensor: Tensor, storage: str) -> StoredTensor:
    """The description of a strided tensor, whose storage has this key."""
    shape, strides, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    extent, contiguous = _extent(shape, strides)
    return StoredTensor(storage, tensor.dtype, offset, shape, strides, extent, contiguous, tensor.requires_grad)


@functools.lru_cache(4096)  # the layers of a model repeat their shapes
def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, bool]:
    """(number of elements from the first to the last, whether they are in C order)."""
    last, step, contiguous = 0, 1, True
    for size, stride in zip(shape[::-1], strides[::-1], strict=True):
        if size == 0:
            return 0, True
        if size != 1:
            if stride != step:
                contiguous = False
            step *= size
            last += (size - 1) * stride
    return last + 1, contiguous


class _StorageKind(NamedTuple):
    """Replaces one of torch's storage classes. Not callable, so that a pickle cannot make an object with it."""

    dtype: torch.dtype


class _StoredStorage(NamedTuple):
    key: str
    numel: int
    dtype: torch.dtype


_INTEGERS = {int}


class _Describe:
    """Replaces the torch function that makes a tensor. Has no attributes, because a pickle could change them."""

    __slots__ = ()

    def __call__(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        hooks: Any,
        metadata: Any = None,
    ) -> StoredTensor:
        if metadata or hooks or type(storage) is not _StoredStorage or type(requires_grad) is not bool:
            raise NotPlainPickle("a tensor with properties of its own")
        numbers = (offset, *shape, *strides)
        if set(map(type, numbers)) != _INTEGERS or min(numbers) < 0:
            raise NotPlainPickle("a tensor that is nowhere")
        shape, strides = tuple(shape), tuple(strides)
        extent, contiguous = _extent(shape, strides)
        key, numel, dtype = storage
        if extent and offset + extent > numel:
            raise NotPlainPickle("a tensor outside of its storage")
        return StoredTensor(key, dtype, offset, shape, strides, extent, contiguous, requires_grad)


class _DescribeParameter:
    __slots__ = ()

    def __call__(self, data: Any, requires_grad: Any, hooks: Any) -> StoredTensor:
        if type(data) is not StoredTensor or type(requires_grad) is not bool or hooks:
            raise NotPlainPickle("a parameter of its own kind")
        return data._replace(requires_grad=requires_grad, parameter=True)


#: Every class and function that a pickle may name, with its replacement.
_NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _Describe(),
    ("torch._utils", "_rebuild_parameter"): _DescribeParameter(),
    **{("torch", name): _StorageKind(dtype) for dtype, name in STORAGE_CLASSES.items()},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in STORAGE_CLASSES},
}
#: (module, name) of each of them: a pickle that names nothing else can always be loaded.
PLAIN_NAMES = frozenset(_NAMES)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        #: Key of each storage that the pickle named, as often as it did.
        self.used: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is None:
            raise NotPlainPickle(f"{module}.{name}")
        return found

    def persistent_load(self, reference: Any) -> _StoredStorage:
        name, kind, key, _, numel = reference
        if name != "storage" or type(kind) is not _StorageKind or type(key) is not str or type(numel) is not int:
            raise NotPlainPickle("no reference to a storage")
        self.used.append(key)
        return _StoredStorage(key, numel, kind.dtype)
