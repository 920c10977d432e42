"""Describes tensors as the pickle operations with which ``torch.save`` would have written them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "MEMO_BYTES",
    "MEMO_FROM",
    "STORAGE_CLASSES",
    "LeafMark",
    "Table",
    "describe_all",
    "tensor_pickle",
    "tensors_pickle",
]

#: torch's storage class for each dtype; tensors of other dtypes are described by torch itself.
STORAGE_CLASSES: Mapping[torch.dtype, str] = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}


class Table(tuple[Any, ...]):
    """A dict of tensors, as (keys, number of the first storage, dtypes, shapes, requires_grad). For a dict of such
    dicts each key is (key, keys of the inner dict)."""


class LeafMark(str):
    """The key of the storage of the empty tensor that stands for a leaf."""


#: Numbers in the pickle's memo from MEMO_FROM on are used for names in tables. The pickle's own numbers stay below
#: that, because each of its memo entries takes at least MEMO_BYTES bytes of the pickle.
MEMO_FROM, MEMO_BYTES = 1 << 16, 4
_Memo = dict[bytes, int]


def describe_all(
    entries: Sequence[Any], storages: Sequence[tuple[int, str]], keys: Sequence[str], *, memo: _Memo | None
) -> list[bytes]:
    """For each marker, the pickle operations that replace it.

    Args:
        memo: of names used by tables; the tables must be in the order of their markers in the pickle. None: no memo.
    """
    return [
        _describe_table(entry, storages, keys, memo)
        if isinstance(entry, Table)
        else _describe((0, torch.uint8, (0,), False), (0, "cpu"), entry, None)
        if isinstance(entry, LeafMark)
        else _describe(entry, storages[entry[0]], keys[entry[0]], None)
        for entry in entries
    ]


def tensor_pickle(dtype: torch.dtype, shape: Sequence[int], key: str) -> bytes:
    """The pickle of one tensor in C order, of any dtype, whose storage has this key and nothing else."""
    return b"\x80\x02" + _describe_plain(dtype, shape, key) + b"."


def tensors_pickle(tensors: Sequence[tuple[str, torch.dtype, Sequence[int], str]]) -> bytes:
    """The pickle of a dict of such tensors, given as (name, dtype, shape, storage key)."""
    items = [_text(name) + _describe_plain(dtype, shape, key) for name, dtype, shape, key in tensors]
    return b"".join((b"\x80\x02}(", *items, b"u."))


def _describe_plain(dtype: torch.dtype, shape: Sequence[int], key: str) -> bytes:
    """Pickle operations that push one tensor in C order, whose storage has this key."""
    nbytes = math.prod(shape) * dtype.itemsize
    if dtype in STORAGE_CLASSES:
        described = _describe((0, dtype, shape, False), (nbytes, "cpu"), key, None)
        return _global(b"torch._utils", b"_rebuild_tensor_v2", None) + described + b"R"
    # Torch gives dtypes that are younger than its storage classes an untyped storage, and names them behind the rest.
    parts = [_global(b"torch._utils", b"_rebuild_tensor_v3", None), b"((", _text("storage")]
    parts += [_global(b"torch.storage", b"UntypedStorage", None), _text(key), _text("cpu"), _number(nbytes), b"tQ"]
    parts.append(_number(0))
    for numbers in (shape, _strides(shape)):
        parts += [b"(", *map(_number, numbers), b"t"]
    parts += [b"\x89", _global(b"collections", b"OrderedDict", None), b")R"]
    return b"".join((*parts, _global(b"torch", str(dtype).removeprefix("torch.").encode(), None), b"tR"))


def _describe(tensor: Any, storage: tuple[int, str], key: str, memo: _Memo | None) -> bytes:
    """The arguments of the torch function that rebuilds a tensor, as pickle operations that push one tuple."""
    _, dtype, shape, requires_grad, *place = tensor
    nbytes, location = storage
    offset, strides = place[0] if place else (0, _strides(shape))
    parts = [b"((", _text("storage"), _global(b"torch", STORAGE_CLASSES[dtype].encode(), memo), _text(key)]
    parts += [_text(location), _number(nbytes // dtype.itemsize), b"tQ", _number(offset)]
    for numbers in (shape, strides):
        parts += [b"(", *map(_number, numbers), b"t"]
    parts += [b"\x88" if requires_grad else b"\x89", _global(b"collections", b"OrderedDict", memo), b")Rt"]
    return b"".join(parts)


def _describe_table(
    table: Table, storages: Sequence[tuple[int, str]], keys: Sequence[str], memo: _Memo | None
) -> bytes:
    """Pickle operations that put the items of a dict of tensors, or of dicts of them, into the dict on the stack."""
    names, first, dtypes, shapes, flags = table
    tensors = iter(
        [
            _global(b"torch._utils", b"_rebuild_tensor_v2", memo)
            + _describe((index, dtype, shape, flag), storages[index], keys[index], memo)
            + b"R"
            for index, (dtype, shape, flag) in enumerate(zip(dtypes, shapes, flags, strict=True), first)
        ]
    )
    parts = [b"("]
    for name in names:
        if type(name) is tuple:
            inner = [_name(key) + next(tensors) for key in name[1]]
            parts += [_name(name[0]), b"}(", *inner, b"u"]
        else:
            parts += [_name(name), next(tensors)]
    return b"".join((*parts, b"u"))


def _global(module: bytes, name: bytes, memo: _Memo | None) -> bytes:
    """Pickle operations that push a class or function: by name, or, with a memo, from the second time on by its memo
    number, which unpicklers read faster."""
    named = b"c%s\n%s\n" % (module, name)
    if memo is None:
        return named
    if named in memo:
        return b"j" + memo[named].to_bytes(4, "little")
    memo[named] = MEMO_FROM + len(memo)
    return named + b"r" + memo[named].to_bytes(4, "little")


def _name(value: str | int) -> bytes:
    return _text(value) if isinstance(value, str) else _number(value)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor in C order, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")  # as pickle does
    return b"X" + len(data).to_bytes(4, "little") + data


def _number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        return b"\x8b" + len(data).to_bytes(4, "little") + data
    return b"\x8a" + bytes([len(data)]) + data
