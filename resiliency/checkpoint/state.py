"""Splits a state tree into leaves by key and a JSON skeleton of everything else, and joins them again.

A state tree is any nesting of dicts, lists and tuples with leaves (tensors of the kinds known to
:mod:`resiliency.checkpoint.leaf_kinds`) and Python objects in it, such as what Lightning's ``dump_checkpoint`` returns.
:func:`flatten` splits it; :func:`unflatten` puts it together again. A plain tensor that occurs twice (tied weights) is
stored once and shared again on load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from resiliency.checkpoint.leaf_kinds import kind_of, kind_of_class, refusal
from resiliency.errors import ConfigError
from resiliency.storage.codec import decode, encode
from resiliency.storage.tensor_table import TENSOR, TENSOR_TABLE, TensorTable, join_path

__all__ = ["FlatState", "dtype_from_name", "dtype_name", "flatten", "flatten_by_key", "unflatten"]


@dataclass(frozen=True)
class FlatState:
    """A split state tree.

    Attributes:
        tensors: key -> live leaf (detached alias, not a copy). ``Tensor`` or what another registered kind takes.
        skeleton: JSON value with a placeholder where each leaf was.
    """

    tensors: dict[str, Any]
    skeleton: Any


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


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


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors at one address that are views of the same bytes with the same layout."""
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def flatten(tree: Any) -> FlatState:
    """Splits a state tree. No tensor data is read; about 1.5 microseconds a tensor, which is most of what a lazy save
    costs.

    Raises:
        ConfigError: a tensor or object that cannot be stored; names where it is.
    """
    walk = _Walk()
    skeleton = encode(tree, leaf=walk.leaf)
    return FlatState(walk.tensors, skeleton)


def flatten_by_key(keys: Iterable[str], objects: Mapping[str, Any]) -> Any:
    """The skeleton of a flat dict: a tensor under each of ``keys``, and ``objects`` beside them.

    Raises:
        ConfigError: an object that cannot be stored, is a tensor, or has the key of one.
    """
    split = {key: flatten(value) for key, value in objects.items()}
    tensors = dict.fromkeys(keys)
    for key, flat in split.items():
        if flat.tensors or key in tensors:
            what = "holds a tensor, which belongs into a chunk" if flat.tensors else "has the key of a tensor"
            raise ConfigError(f"the object {key!r} {what}")
    items = {key: {"!": TENSOR, "key": key} for key in tensors} | {key: flat.skeleton for key, flat in split.items()}
    return items if "!" not in items else {"!": "dict", "value": [[key, item] for key, item in items.items()]}


class _Walk:
    """Collects the leaves of one tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._seen: dict[int, tuple[str, ...]] = {}  # by address, which nearly always differs

    def leaf(self, value: Any, path: tuple[str, ...]) -> Any:
        if type(value) is dict:
            return self._table(value, path)
        if kind_of_class(type(value)) is not None:
            return {"!": TENSOR, "key": self._add((value,), (_key(path),))[0]}
        if isinstance(value, torch.Size):
            return {"!": "size", "value": list(value)}
        if isinstance(value, torch.dtype):
            return {"!": "dtype", "value": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"!": "device", "value": str(value)}
        return NotImplemented

    def _table(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        """A dict of leaves at once."""
        if not value:
            return NotImplemented
        for name, item in value.items():
            if type(name) is not str or not (isinstance(item, Tensor) or kind_of_class(type(item)) is not None):
                return NotImplemented
        table = _table_of(path, tuple(value))
        keys = table.keys
        stored_keys = self._add(value.values(), keys)
        return (table if stored_keys == keys else table.with_keys(stored_keys)).to_json()

    def _add(self, values: Iterable[Any], keys: Sequence[str]) -> list[str]:
        """Adds leaves, except plain tensors that are already there (tied weights); returns the keys of all."""
        # One loop without helpers: it runs for every tensor at every save, while the training thread waits.
        tensors, seen, stored_keys, strided = self.tensors, self._seen, [], torch.strided
        for value, key in zip(values, keys, strict=True):
            class_ = type(value)
            if class_ is Tensor or class_ is Parameter:
                tensor = value.detach()
            else:
                tensor = kind_of(value).detach(value, key)
            if type(tensor) is Tensor:
                if tensor.layout is not strided or tensor.is_quantized or tensor.is_meta:
                    raise refusal(tensor, key)
                address = tensor.data_ptr()  # 0: it has no elements
            else:
                address = 0
            others = seen.get(address)
            if others is not None:
                identity = _identity(tensor)
                known = next((known for known in others if _identity(tensors[known]) == identity), None)
                if known is not None:
                    stored_keys.append(known)
                    continue
            while key in tensors:
                key += "~"
            tensors[key] = tensor
            if address:
                seen[address] = (key,) if others is None else (*others, key)
            stored_keys.append(key)
        return stored_keys


@functools.lru_cache(maxsize=1 << 12)
def _key(path: tuple[str, ...]) -> str:
    return join_path(path) or "value"


@functools.lru_cache(maxsize=1 << 12)
def _table_of(path: tuple[str, ...], names: tuple[str, ...]) -> TensorTable:
    """The table of a dict without tied leaves; cached, because it is the same at every save."""
    return TensorTable(join_path(path), names)


def unflatten(skeleton: Any, tensors: Mapping[str, Any] | Callable[[str], Any], *, allow_pickle: bool = False) -> Any:
    """Joins a skeleton and its leaves; ``tensors`` returns the leaf of each key.

    Raises:
        ConfigError: the skeleton was written by another version.
    """
    get = tensors if callable(tensors) else tensors.__getitem__

    def leaf(item: dict[str, Any]) -> Any:
        tag, value = item["!"], item.get("value")
        if tag == TENSOR_TABLE:
            return {name: get(key) for name, key in TensorTable.from_json(item).items()}
        if tag == TENSOR and "key" in item:
            return get(item["key"])
        if tag == "size" and value is not None:
            return torch.Size(value)
        if tag == "dtype" and value is not None:
            return dtype_from_name(value)
        if tag == "device" and value is not None:
            return torch.device(value)
        raise ConfigError(
            f"the checkpoint holds an object tagged {tag!r} that this version cannot read; it was written by another"
            " version of resiliency: upgrade, or load it with that version"
        )

    return decode(skeleton, leaf=leaf, allow_pickle=allow_pickle)
