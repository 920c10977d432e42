"""Pickles the structure of a state as ``torch.save`` does, without the bytes of its storages, and reads it back.

:func:`dump` takes microseconds per tensor: the C pickler walks the tree, and writes only a marker for each plain
tensor. :meth:`Structure.data_pickle` replaces each marker by the tensor's description, later and on another thread.
Descriptions depend on shapes alone, so those of the previous save can be used again. The result means what torch's own
pickle means: tied tensors share a storage, strides are kept, classes are named, and torch's restricted unpickler
decides what may be loaded.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage, UntypedStorage

from resiliency.errors import ConfigError
from resiliency.state.describe import MEMO_BYTES, MEMO_FROM, STORAGE_CLASSES, LeafMark, Table, describe_all
from resiliency.storage.shard_file import LEAF_PREFIX

__all__ = ["Structure", "WithoutMemory", "dump", "without_refused"]

logger = logging.getLogger(__name__)

_rebuild_tensor: Any = torch._utils._rebuild_tensor_v2
_typed_storage: Any = TypedStorage  # torch does not annotate these
_untyped_storage: Any = UntypedStorage
_rebuild_parameter: Any = torch._utils._rebuild_parameter

_STORAGES = frozenset({TypedStorage, UntypedStorage})


class WithoutMemory(ConfigError):
    """A state holds a tensor or storage without memory: torch.save would write a file that torch.load refuses."""


@dataclass
class Structure:
    """A pickled state tree without the bytes of its storages.

    Attributes:
        extents: (tensor, address, bytes) of each storage. The tensor is a live one that uses these bytes, and has the
            version counter of the tensor in the state, so that in-place changes are noticed. If its elements are not
            there in C order, the bytes are its whole storage.
        leaves: the objects that ``is_leaf`` accepted; an empty tensor of storage ``leaf-<i>`` stands for leaf ``i``.
        leaf_uses: id of a leaf -> how often the tree refers to it.
        signature: equal for two structures with the same storages and the same tensors in them, whatever their values:
            a description of each tensor, and (bytes, location) of each storage.
        torch_described: numbers of the storages that torch itself describes.
    """

    extents: list[tuple[Tensor, int, int]]
    leaves: list[Any]
    leaf_uses: dict[int, int]
    signature: tuple[list[Any], list[tuple[int, str]]]
    torch_described: frozenset[int]
    _template: bytes
    _nonce: bytes
    _keys: Sequence[str] = ()
    _descriptions: list[bytes] = field(default_factory=list)

    def set_keys(self, order: Sequence[int]) -> list[str]:
        """Gives storage ``order[i]`` the key ``str(i)``, and returns the keys in this order.

        Storages that torch describes keep their own keys, and must come last in the order.
        """
        keys = [""] * len(self.extents)
        for position, index in enumerate(order):
            keys[index] = f"x{index}" if index in self.torch_described else str(position)
        self._keys = keys
        return [keys[index] for index in order]

    def first_uses(self) -> list[tuple[int, tuple[Any, ...]]]:
        """(storage number, (dtype, shape)) of the first plain tensor that uses each storage."""
        found: dict[int, tuple[Any, ...]] = {}
        for entry in self.signature[0]:
            if isinstance(entry, Table):
                _, first, dtypes, shapes, _ = entry
                found.update(enumerate(zip(dtypes, shapes, strict=True), first))
            else:
                found.setdefault(entry[0], tuple(entry[1:3]))
        return list(found.items())

    def reuse(self, previous: Structure | None) -> None:
        """Takes over, from a structure with the same signature, what follows from shapes alone; does nothing for
        another one."""
        if previous is not None and previous.signature == self.signature:
            self._keys, self._descriptions = previous._keys, previous._descriptions

    def key_of(self, storage: int) -> str:
        """Path in the tree of a tensor of this storage, for messages; "storage N" if it has none. Thread: any. Slow."""
        wanted = _untyped_storage(0)
        data = self.data_pickle()
        key = self._keys[storage] if self._keys else str(storage)
        tolerant = _TolerantUnpickler(io.BytesIO(data))
        tolerant.persistent_load = lambda reference: (  # type: ignore[method-assign]
            _typed_storage(
                wrap_storage=wanted if reference[2] == key else _untyped_storage(0), dtype=torch.uint8, _internal=True
            )
        )
        try:
            tree = tolerant.load()
        except Exception:  # Boundary: an object that cannot be unpickled must not hide the caller's message.
            logger.info("the place of storage %d in the state cannot be named", storage, exc_info=True)
            return f"storage {storage}"
        return _path_of(tree, wanted._cdata) or f"storage {storage}"

    def data_pickle(self) -> bytes:
        """The pickle as it is in a stock checkpoint. Thread: any, one at a time."""
        tensors, storages = self.signature
        if not self._descriptions and tensors:
            keys = self._keys or self.set_keys(range(len(self.extents)))
            # Extends the list in place, because later structures of this signature share it.
            self._descriptions += describe_all(tensors, storages, keys, memo={})
        described = self._descriptions
        if len(self._template) >= MEMO_FROM * MEMO_BYTES:
            keys = self._keys or self.set_keys(range(len(self.extents)))
            described = describe_all(tensors, storages, keys, memo=None)  # no memo: its numbers may collide
        # A marker is the only argument of a call, or the only key of a dict whose value is None.
        pattern = re.compile(rb"\x8a\x10(....)" + re.escape(self._nonce) + rb"(?:\x85|Ns)", re.DOTALL)
        return pattern.sub(lambda match: described[int.from_bytes(match[1], "little")], self._template)


class _Anything:
    """Replaces any class or function of a pickle, and the objects it makes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.storage: Any = None

    def __setstate__(self, _: Any) -> None:
        return None


class _Located:
    """Replaces a tensor; only its storage is known."""

    def __init__(self, storage: Any, *_: Any) -> None:
        self.cdata = storage._untyped_storage._cdata if isinstance(storage, TypedStorage) else 0


class _TolerantUnpickler(pickle.Unpickler):
    """Reads the containers of a pickle; imports and calls nothing that the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _Located if name.startswith("_rebuild_tensor") else _Anything


def _path_of(tree: Any, cdata: int, path: str = "") -> str:
    if isinstance(tree, _Located):
        return path if tree.cdata == cdata else ""
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    found = (_path_of(part, cdata, f"{path}/{key}" if path else str(key)) for key, part in parts)
    return next(filter(None, found), "")


def dump(tree: Any, *, is_leaf: Callable[[type], bool] | None = None) -> Structure:
    """Pickles the structure of a tree. Later changes of the tree do not change the result, except the bytes of
    storages.

    Thread: training. Takes about 2 microseconds per tensor; reads no bytes of tensors.

    Args:
        is_leaf: accepts classes whose objects are not pickled, but stored as leaves.

    Raises:
        ConfigError: an object cannot be pickled, or a storage has no memory; the error names its path.
    """
    try:
        return _dump(tree, is_leaf)
    except RecursionError:
        raise ConfigError("the state is nested too deeply, or contains itself; store a plain tree") from None
    except WithoutMemory as error:
        path, _, reason = _culprit(tree, is_leaf, error)
        raise WithoutMemory(f"the state cannot be stored: at {path or 'the root'} there is {reason}") from None
    except ConfigError:
        raise
    except Exception as error:  # Boundary: __reduce__ of a user's class may raise anything.
        if _failure(tree, is_leaf) is None:
            raise  # it can be pickled, so a signal's handler has raised this
        path, culprit, reason = _culprit(tree, is_leaf, error)
        raise ConfigError(
            f"the object at {path or 'the root'} is a {type(culprit).__module__}.{type(culprit).__qualname__}, which"
            f" cannot be stored ({reason}); remove it from the state (for hyper-parameters:"
            " save_hyperparameters(ignore=[...]))"
        ) from error


def without_refused(tree: Any, *, is_leaf: Callable[[type], bool] | None = None) -> Any:
    """The tree with None in place of each object that :func:`dump` refuses; containers that hold one are copied.

    For a rank whose Python objects are not stored. Slow: a refused object is pickled once for each level above it.
    """
    return _stripped(tree, is_leaf, set())


def _stripped(tree: Any, is_leaf: Callable[[type], bool] | None, within: set[int]) -> Any:
    if id(tree) in within:
        return None  # a container that contains itself
    try:
        _dump(tree, is_leaf)
    except Exception:  # Boundary: as in dump.
        logger.debug("a %s is left out, or something in it", type(tree).__qualname__, exc_info=True)
    else:
        return tree
    inner = within | {id(tree)}
    if isinstance(tree, dict):
        return {key: _stripped(value, is_leaf, inner) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_stripped(value, is_leaf, inner) for value in tree]
    return None


def _dump(tree: Any, is_leaf: Callable[[type], bool] | None) -> Structure:
    if is_leaf is not None and is_leaf(Tensor):
        return _pickled(_FullPickler, tree, is_leaf)  # _Pickler would not ask is_leaf about plain tensors
    try:
        return _pickled(_Pickler, tree, is_leaf)
    except _NeedsFullPickler:
        return _pickled(_FullPickler, tree, is_leaf)


def _pickled(kind: type[_Pickler], tree: Any, is_leaf: Callable[[type], bool] | None) -> Structure:
    file = io.BytesIO()
    pickler = kind(file, is_leaf)
    try:
        pickler.dump(pickler.with_tables(tree))
    except _NeedsMemo:
        del pickler.reducer_override  # a cycle, as below
        file = io.BytesIO()
        pickler = kind(file, is_leaf)
        pickler.dump(tree)
    del pickler.reducer_override  # a closure over the pickler: the cycle would keep every tensor until the next gc
    signature = (pickler.tensors, pickler.storages)
    described = frozenset(pickler.torch_described)
    return Structure(
        pickler.extents, pickler.leaves, pickler.leaf_uses, signature, described, file.getvalue(), pickler.nonce
    )


def _culprit(tree: Any, is_leaf: Any, error: Exception) -> tuple[str, Any, Exception]:
    """(path, object, reason) of the innermost part of a tree that cannot be pickled."""
    path: list[str] = []
    seen: set[int] = set()  # a tree may contain itself
    while id(tree) not in seen:
        seen.add(id(tree))
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
        for key, part in parts:
            failure = _failure(part, is_leaf)
            if failure is not None:
                tree, error = part, failure
                path.append(str(key))
                break
    return "/".join(path), tree, error


def _failure(tree: Any, is_leaf: Any) -> Exception | None:
    try:
        _dump(tree, is_leaf)
    except Exception as failure:  # Boundary: as in dump.
        return failure
    return None


class _NeedsMemo(Exception):
    """A container is inside itself, or the tree has a tensor of a table in another place, too: only the pickler's memo
    keeps the two references one object."""


class _NeedsFullPickler(Exception):
    """The tree holds something that only :class:`_FullPickler` can pickle."""


class _Pickler(pickle.Pickler):
    """The C pickler, with a marker in place of each plain tensor.

    A tensor in C order is stored as a storage of its own, even if it is part of a larger one, which torch would store
    whole. Tensors with the same bytes share one storage.
    """

    def __init__(self, file: io.BytesIO, is_leaf: Callable[[type], bool] | None) -> None:
        super().__init__(file, protocol=2)
        # The top byte is below 0x80, so that the number is positive and takes 16 bytes.
        self.nonce = os.urandom(11) + b"\x5a"
        self.base = int.from_bytes(self.nonce, "little") << 32
        self.extents: list[tuple[Tensor, int, int]] = []
        self.storages: list[tuple[int, str]] = []
        #: Description for each marker: (storage, dtype, shape, requires_grad), and, if not in C order, (offset,
        #: strides).
        self.tensors: list[Any] = []
        self.leaves: list[Any] = []
        self.leaf_uses: dict[int, int] = {}
        self.torch_described: set[int] = set()
        self.is_leaf = is_leaf
        #: (address, bytes, dtype) -> storage number. The size is in the key, so that a shorter view of the same memory
        #: does not replace an entry; the dtype, because torch loads all tensors of a storage as one dtype.
        self.indices: dict[tuple[int, int, torch.dtype], int] = {}
        self._substitutes: dict[int, Any] = {}
        self._looked_into = 0
        self._whole: dict[tuple[int, torch.dtype], int] = {}
        self.reducer_override: Any = _reducer(self, self._other_tensor)

    def with_tables(self, value: Any, depth: int = 0) -> Any:
        """The tree with a marker in place of the items of each dict of plain tensors, so that the pickler need not
        visit every tensor.

        The tree itself is not changed; containers that hold such a dict are copied.
        """
        class_ = type(value)
        if depth > _DEEPEST or class_ not in _CONTAINERS or not value or self._looked_into >= _MOST_CONTAINERS:
            return value
        self._looked_into += 1
        known = self._substitutes.get(id(value))
        if known is _UNFINISHED:
            raise _NeedsMemo
        if known is not None:
            return known
        self._substitutes[id(value)] = _UNFINISHED
        made: Any = value
        if class_ is list:
            if type(value[0]) in _CONTAINERS:
                found = [self.with_tables(item, depth + 1) for item in value]
                # Not copied for nothing, because something that is not looked into (a tuple) may hold this list, too.
                if any(map(is_not, found, value)):
                    made = found
        else:
            classes = set(map(type, value.values()))
            marker = self._add_table(value, classes)
            if marker is not None:
                made = class_({marker: None})
            elif not _CONTAINERS.isdisjoint(classes):
                items = {key: self.with_tables(item, depth + 1) for key, item in value.items()}
                if any(new is not old for new, old in zip(items.values(), value.values(), strict=True)):
                    made = class_(items)
            if class_ is OrderedDict and made is not value:
                made.__dict__.update(value.__dict__)  # torch keeps module versions in this attribute
        self._substitutes[id(value)] = made
        return made

    def _add_table(self, value: Mapping[Any, Any], classes: set[type]) -> int | None:
        """Registers a dict of plain tensors, or a dict of such dicts; returns the number for its marker, None for other
        dicts."""
        if classes == _ONLY_TENSORS:
            keys: Any = tuple(value)
            tensors = list(value.values())
        elif classes == _ONLY_DICTS:
            if any([set(map(type, item.values())) != _ONLY_TENSORS for item in value.values()]):
                return None
            keys = tuple([(key, tuple(item)) for key, item in value.items()])
            tensors = [tensor for item in value.values() for tensor in item.values()]
        else:
            return None
        names = keys if classes == _ONLY_TENSORS else [name for key, inner in keys for name in (key, *inner)]
        if not _NAMES.issuperset(map(type, names)):
            return None
        dtypes = list(map(_get_dtype, tensors))
        if not _PLAIN_DTYPES.issuperset(dtypes):
            return None
        try:
            if not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)) or any(map(_get_dict, tensors)):
                return None
            addresses, shapes = list(map(_data_ptr, tensors)), list(map(_get_shape, tensors))
            memory = list(map(_untyped_storage_of, tensors))
            begins, lengths = list(map(_storage_data_ptr, memory)), list(map(_storage_nbytes, memory))
        except RuntimeError:  # a sparse, nested or otherwise special tensor
            return None
        indices, first = self.indices, len(self.storages)
        sizes = list(map(_get_nbytes, tensors))
        # Nearly always each tensor is its whole storage, which two comparisons of lists show.
        whole = addresses == begins and lengths == sizes
        if not whole and not all(map(_is_within, addresses, sizes, begins, lengths)):
            return None
        places = zip(addresses, sizes, dtypes, strict=True)
        mine = dict(zip(places, range(first, first + len(tensors)), strict=True))
        if len(mine) != len(tensors) or 0 in addresses or not indices.keys().isdisjoint(mine):
            return None  # tied or empty tensors are pickled one by one
        indices.update(mine)
        self.extents += zip(tensors, addresses, sizes, strict=True)
        on_cpu = all(map(_get_is_cpu, tensors))
        locations = ["cpu"] * len(tensors) if on_cpu else [_location(tensor) for tensor in tensors]
        self.storages += zip(sizes, locations, strict=True)
        self.tensors.append(Table((keys, first, dtypes, shapes, list(map(_get_requires_grad, tensors)))))
        return self.base | len(self.tensors) - 1

    def _other_tensor(self, tensor: Tensor) -> Any:
        _check_memory(tensor)
        if (
            tensor.dtype not in STORAGE_CLASSES
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_meta
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.__dict__
        ):
            return self._by_torch()
        storage = tensor.untyped_storage()
        index = self._add_storage(storage, tensor.dtype, tensor)
        place = (tensor.storage_offset(), tensor.stride())
        self.tensors.append((index, tensor.dtype, tensor.shape, tensor.requires_grad, place))
        return _rebuild_tensor, (self.base | len(self.tensors) - 1,)

    def _by_torch(self) -> Any:
        raise _NeedsFullPickler

    def _add_storage(self, storage: UntypedStorage, dtype: torch.dtype, tensor: Tensor | None = None) -> int:
        """Registers a whole storage; returns its number.

        Raises:
            WithoutMemory: the storage has no memory.
        """
        index = self._whole.get((storage._cdata, dtype))
        if index is None:
            nbytes, address = storage.nbytes(), 0 if storage.device.type == "meta" else storage.data_ptr()
            if nbytes and not address:
                raise WithoutMemory(
                    f"a storage of {nbytes} bytes on {storage.device} that has no memory (of a fake or wrapped tensor);"
                    " store the tensors it stands for"
                )
            if tensor is None:
                tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            index = self._whole[storage._cdata, dtype] = len(self.storages)
            self.torch_described.add(index)
            self.extents.append((tensor, address, nbytes))
            self.storages.append((nbytes, "cpu" if tensor.is_cpu else _location(tensor)))
        return index


#: Marks a container whose copy is still being made.
_UNFINISHED = object()
#: Containers deeper than _DEEPEST, and those beyond the first _MOST_CONTAINERS, are left to the pickler: a state has
#: few containers with tensors, and a list of a million dicts would take seconds.
_DEEPEST, _MOST_CONTAINERS = 16, 2048
_CONTAINERS = frozenset({dict, OrderedDict, list})
_ONLY_TENSORS, _ONLY_DICTS, _NAMES = {Tensor}, {dict}, frozenset({str, int})
_get_dtype, _get_shape, _get_nbytes = attrgetter("dtype"), attrgetter("shape"), attrgetter("nbytes")
_get_dict, _get_is_cpu, _get_requires_grad = attrgetter("__dict__"), attrgetter("is_cpu"), attrgetter("requires_grad")
_is_contiguous: Any = Tensor.is_contiguous
_is_neg: Any = Tensor.is_neg
_data_ptr: Any = Tensor.data_ptr
_untyped_storage_of: Any = Tensor.untyped_storage
_storage_data_ptr: Any = UntypedStorage.data_ptr
_storage_nbytes: Any = UntypedStorage.nbytes


def _is_within(address: int, nbytes: int, begin: int, length: int) -> bool:
    """False for a tensor whose storage was made smaller or freed: its address is then meaningless, though not always
    0."""
    return begin <= address and address + nbytes <= begin + length


def _reducer(pickler: _Pickler, other_tensor: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """The function that a pickler calls for every object that is not of a builtin class.

    It is a closure over all that it needs, for speed: it runs for every tensor at every save, while the training thread
    waits.
    """
    tensors, extents, storages = pickler.tensors, pickler.extents, pickler.storages
    base, is_leaf = pickler.base, pickler.is_leaf
    plain, parameter, tensor_class, torch_storages = _PLAIN_DTYPES, Parameter, Tensor, _STORAGES
    rebuild_tensor, indices, get = _rebuild_tensor, pickler.indices, pickler.indices.get
    untyped_storage_of, is_within = _untyped_storage_of, _is_within

    def reduce(obj: Any) -> Any:
        class_ = type(obj)
        if class_ is tensor_class:
            dtype = obj.dtype
            if dtype in plain:
                try:
                    address, shape = (obj.data_ptr() if obj.is_contiguous() else 0), obj.shape
                except RuntimeError:  # a sparse, nested or otherwise special tensor
                    return other_tensor(obj)
                if address and not obj.is_neg() and not obj.__dict__:
                    nbytes, memory = obj.nbytes, untyped_storage_of(obj)
                    if not is_within(address, nbytes, memory.data_ptr(), memory.nbytes()):
                        return other_tensor(obj)
                    place = (address, nbytes, dtype)
                    index = get(place)
                    if index is None:
                        index = indices[place] = len(storages)
                        extents.append((obj, address, nbytes))
                        storages.append((nbytes, "cpu" if obj.is_cpu else _location(obj)))
                    elif extents[index][0] is obj:
                        raise _NeedsMemo
                    tensors.append((index, dtype, shape, obj.requires_grad))
                    return rebuild_tensor, (base | len(tensors) - 1,)
            return other_tensor(obj)
        if class_ is parameter and not obj.__dict__:
            # Pickled through an alias with the same version counter, so that in-place changes are noticed.
            return _rebuild_parameter, (obj.detach(), obj.requires_grad, OrderedDict())
        if class_ in torch_storages or (is_leaf is not None and is_leaf(class_)):
            raise _NeedsFullPickler
        return NotImplemented

    return reduce


class _FullPickler(_Pickler):
    """Also pickles tensors of all other kinds, as torch describes them, and stores leaves as stand-ins."""

    def __init__(self, file: io.BytesIO, is_leaf: Callable[[type], bool] | None) -> None:
        super().__init__(file, is_leaf)
        plain = self.reducer_override

        def reduce(obj: Any) -> Any:
            if is_leaf is not None and is_leaf(type(obj)):
                self.tensors.append(LeafMark(f"{LEAF_PREFIX}{len(self.leaves)}"))
                self.leaves.append(obj)
                self.leaf_uses[id(obj)] = 1
                return _rebuild_tensor, (self.base | len(self.tensors) - 1,)
            if type(obj) in _STORAGES:
                return NotImplemented
            if isinstance(obj, Tensor) and type(obj) not in (Tensor, Parameter):
                with torch._C.DisableTorchFunctionSubclass():
                    _check_memory(obj)
            return plain(obj)

        self.reducer_override = reduce

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _NEVER_PERSISTENT:  # for speed: it is called for every object
            return None
        if id(obj) in self.leaf_uses:  # a further reference; at the first one reduce has not registered the leaf yet
            self.leaf_uses[id(obj)] += 1
        if isinstance(obj, TypedStorage):
            typed: Any = obj
            index = self._add_storage(obj._untyped_storage, obj.dtype)
            kind = getattr(torch, typed._pickle_storage_type())
            return ("storage", kind, f"x{index}", self.storages[index][1], typed._size())
        if isinstance(obj, UntypedStorage):
            index = self._add_storage(obj, torch.uint8)
            return ("storage", torch.UntypedStorage, f"x{index}", self.storages[index][1], obj.nbytes())
        return None

    def with_tables(self, value: Any, depth: int = 0) -> Any:
        return value if self.is_leaf is not None else super().with_tables(value, depth)

    def _by_torch(self) -> Any:
        return NotImplemented  # torch then describes the tensor, by its storage


def _check_memory(tensor: Tensor) -> None:
    """Raises :class:`WithoutMemory` for a tensor that reaches beyond its storage, because that was freed or made
    smaller.

    Accepts tensors without any storage: torch describes those in its own way.
    """
    try:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or not tensor.numel():
            return
        nbytes = tensor.untyped_storage().nbytes()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
        packed = tensor.is_quantized  # several elements may be in one byte
        needed = 1 if packed else (last + 1) * tensor.itemsize
    except RuntimeError:
        return
    if nbytes < needed:
        raise WithoutMemory(
            f"a tensor of shape {tuple(tensor.shape)} that has no memory (its storage was freed or made smaller); store"
            " one that has"
        )


#: Dtypes of C-ordered tensors that are described here; not complex ones, which may be lazy conjugates.
_PLAIN_DTYPES = frozenset(dtype for dtype in STORAGE_CLASSES if not dtype.is_complex)


def _location(tensor: Tensor) -> str:
    return str(torch.serialization.location_tag(tensor.untyped_storage()))


_NEVER_PERSISTENT = frozenset({str, int, tuple, bool, float, dict})
