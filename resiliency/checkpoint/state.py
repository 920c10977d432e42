"""State tree <-> tensors by key, and a JSON skeleton for everything else.

A state tree is any nesting of dicts, lists and tuples with tensors (plain, DTensor) and Python objects in it, such as
what Lightning's ``dump_checkpoint`` returns. :func:`flatten` splits it; :func:`unflatten` puts it together again. A
tensor that occurs twice (tied weights) is stored once and shared again on load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resiliency.checkpoint.codec import decode, encode
from resiliency.errors import ConfigError

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
        raise ConfigError(f"the checkpoint holds tensors of dtype {name!r}, which torch {torch.__version__} does not know")
    return dtype


def _check(tensor: Tensor, key: str) -> None:
    if tensor.layout is not torch.strided:
        raise ConfigError(f"tensor {key!r} has layout {tensor.layout}; only dense tensors can be stored: call .to_dense() first")
    if tensor.is_quantized:
        raise ConfigError(f"tensor {key!r} is quantized; store its int_repr() and scales instead")
    if tensor.device.type == "meta":
        raise ConfigError(f"tensor {key!r} is on the meta device and has no data; materialise the model before saving")


def _address(tensor: Tensor) -> int:
    """Where the first byte is; 0 when there is none or it cannot be told."""
    return tensor.data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided else 0


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors at one address that are the same bytes seen the same way."""
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def flatten(tree: Any) -> FlatState:
    """Splits a state tree. Cheap: no tensor data is read.

    Raises:
        ConfigError: a tensor or object that cannot be stored; names where it is.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[int, list[str]] = {}  # by address, which nearly always differs

    def leaf(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            tensor = value.detach()
            address = _address(tensor)
            there = seen.get(address, ()) if address else ()
            key = next((key for key in there if _identity(tensors[key]) == _identity(tensor)), None)
            if key is None:
                key = "/".join(part.replace("%", "%25").replace("/", "%2F") for part in path) or "value"
                while key in tensors:
                    key += "~"
                _check(tensor, key)
                tensors[key] = tensor
                if address:
                    seen.setdefault(address, []).append(key)
            return {"!": "tensor", "k": key}
        if isinstance(value, torch.Size):
            return {"!": "size", "v": list(value)}
        if isinstance(value, torch.dtype):
            return {"!": "dtype", "v": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"!": "device", "v": str(value)}
        return NotImplemented

    return FlatState(tensors, encode(tree, leaf=leaf))


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor] | Callable[[str], Tensor], *, allow_pickle: bool = False) -> Any:
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
        raise ConfigError(f"the checkpoint holds an object tagged {tag!r}, written by a newer version; upgrade resiliency")

    return decode(skeleton, leaf=leaf, allow_pickle=allow_pickle)
