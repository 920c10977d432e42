"""State tree <-> tensors by key, and a JSON skeleton for everything else.

A state tree is any nesting of dicts, lists and tuples with tensors (plain, DTensor) and Python objects in it, such as
what Lightning's ``dump_checkpoint`` returns. :func:`flatten` splits it; :func:`unflatten` puts it together again. A
tensor that occurs twice (tied weights) is stored once and shared again on load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resiliency.errors import ConfigError
from resiliency.storage.codec import decode, encode, join_path, table, table_keys

__all__ = ["FlatState", "dtype_from_name", "dtype_name", "flatten", "unflatten"]


@dataclass(frozen=True)
class FlatState:
    """A split state tree.

    Attributes:
        tensors: key -> live tensor (detached alias, not a copy).
        skeleton: JSON value with a placeholder where each tensor was.
    """

    tensors: dict[str, Tensor]
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


def _refuse(tensor: Tensor, key: str) -> ConfigError:
    if tensor.layout is not torch.strided:
        return ConfigError(
            f"tensor {key!r} has layout {tensor.layout}; only dense tensors can be stored: call .to_dense() first"
        )
    if tensor.is_quantized:
        return ConfigError(f"tensor {key!r} is quantized; store its int_repr() and scales instead")
    return ConfigError(f"tensor {key!r} is on the meta device and has no data; materialise the model before saving")


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors at one address that are the same bytes seen the same way."""
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


class _Walk:
    """Collects the tensors of one tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._seen: dict[int, tuple[str, ...]] = {}  # by address, which nearly always differs

    def leaf(self, value: Any, path: tuple[str, ...]) -> Any:
        if type(value) is dict:
            return self._table(value, path)
        if isinstance(value, Tensor):
            return {"!": "tensor", "k": self._keep((value,), (_key(path),))[0]}
        if isinstance(value, torch.Size):
            return {"!": "size", "v": list(value)}
        if isinstance(value, torch.dtype):
            return {"!": "dtype", "v": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"!": "device", "v": str(value)}
        return NotImplemented

    def _table(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        """A dict of tensors at once."""
        if not value:
            return NotImplemented
        for name, item in value.items():
            if not isinstance(item, Tensor) or type(name) is not str:
                return NotImplemented
        names = tuple(value)
        at, keys = _table_keys(path, names)
        kept = self._keep(value.values(), keys)
        same = kept == keys
        return table(
            at,
            names,
            {} if same else {name: is_ for name, is_, key in zip(names, kept, keys, strict=True) if is_ != key},
        )

    def _keep(self, values: Iterable[Tensor], keys: Sequence[str]) -> list[str]:
        """Adds tensors, except those whose bytes are there already; returns their keys."""
        # One loop without helpers: it runs for every tensor at every save, while the training thread waits.
        tensors, seen, kept, strided = self.tensors, self._seen, [], torch.strided
        for value, key in zip(values, keys, strict=True):
            tensor = value.detach()
            dense = tensor.layout is strided
            # 0: there is no first byte, or it cannot be told.
            address = tensor.data_ptr() if dense and type(tensor) is Tensor else 0
            if address in seen:
                identity = _identity(tensor)
                known = next((known for known in seen[address] if _identity(tensors[known]) == identity), None)
                if known is not None:
                    kept.append(known)
                    continue
            while key in tensors:
                key += "~"
            if not dense or tensor.is_quantized or tensor.is_meta:
                raise _refuse(tensor, key)
            tensors[key] = tensor
            if address:
                seen[address] = (*seen[address], key) if address in seen else (key,)
            kept.append(key)
        return kept


@functools.lru_cache(maxsize=1 << 12)
def _key(path: tuple[str, ...]) -> str:
    return join_path(path) or "value"


@functools.lru_cache(maxsize=1 << 12)
def _table_keys(path: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Key of a dict, and those of its tensors."""
    at = join_path(path)
    return at, table_keys(at, names)


def unflatten(
    skeleton: Any, tensors: Mapping[str, Tensor] | Callable[[str], Tensor], *, allow_pickle: bool = False
) -> Any:
    """Puts a tree together; ``tensors`` gives the tensor of each key."""
    get = tensors if callable(tensors) else tensors.__getitem__

    def leaf(item: dict[str, Any]) -> Any:
        tag = item["!"]
        if tag == "tensor":
            return get(item["k"])
        if tag == "size":
            return torch.Size(item["v"])
        if tag == "dtype":
            return dtype_from_name(item["v"])
        if tag == "device":
            return torch.device(item["v"])
        raise ConfigError(
            f"the checkpoint holds an object tagged {tag!r}, written by a newer version; upgrade resiliency"
        )

    return decode(skeleton, leaf=leaf, allow_pickle=allow_pickle)
