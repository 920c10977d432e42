"""Describes tensors as the pickle operations with which ``torch.save`` would have written them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["MEMO_BYTES", "MEMO_FROM", "STORAGE_CLASSES", "LeafMark", "Table", "describe_all"]

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
