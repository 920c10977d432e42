"""A shard is a valid safetensors file; what is parsed is what was made; anything else is refused as corrupt."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from resiliency.checkpoint.state import dtype_from_name
from resiliency.errors import CorruptShard
from resiliency.storage.layout import (
    OBJECTS,
    SAFETENSORS_DTYPES,
    Chunk,
    header_length,
    make_layout,
    objects_reserve,
    parse_header,
    stamp,
)
from resiliency.storage.step_id import StepId
from resiliency.testing.checkpoints import bytes_of

SETTINGS = settings(deadline=None, database=None, max_examples=150, suppress_health_check=list(HealthCheck))
OTHERS = [
    name
    for name in ("complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]


def chunk_of(key: str, sizes: tuple[int, ...], dtype: str, **further: Any) -> Chunk:
    size = torch.empty((), dtype=dtype_from_name(dtype), device="meta").element_size()
    return Chunk(
        key, further.pop("offsets", (0,) * len(sizes)), sizes, dtype, size, further.pop("shape", sizes), **further
    )


@pytest.mark.parametrize("dtype", [*SAFETENSORS_DTYPES, *OTHERS])
@pytest.mark.parametrize("sizes", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_safetensors_reads_every_dtype(tmp_path: Path, dtype: str, sizes: tuple[int, ...]) -> None:
    chunk = chunk_of("w", sizes, dtype)
    layout = make_layout([chunk, chunk_of("other", (3,), "uint8")], objects_nbytes=64, meta={"run": "r"})
    data = bytearray(layout.header.ljust(layout.nbytes, b"\0"))
    raw = bytes(range(1, 1 + chunk.nbytes))
    for placed in layout.placed:
        if placed.chunk is chunk:
            data[placed.start : placed.end] = raw if dtype != "bool" else bytes(len(raw) * [1])
            raw = bytes(data[placed.start : placed.end])
    data[slice(*layout.objects)] = b'{"a":1}'.ljust(64)
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == {"w", "other", OBJECTS}
        got = file.get_tensor("w")
        assert bytes_of(got) == raw
        if dtype in SAFETENSORS_DTYPES:
            assert got.dtype == dtype_from_name(dtype) and tuple(got.shape) == sizes
        assert bytes_of(file.get_tensor(OBJECTS)) == b'{"a":1}'.ljust(64)
    (placed,) = [p for p in parse_header(bytes(data), where="x").placed if p.chunk.key == "w"]
    assert placed.chunk == chunk


names = st.one_of(
    st.sampled_from(["w", "a/b", "!rank/w", "w@0", "ü", '"', "\\", "x" * 99]),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
)


@st.composite
def chunks(draw: st.DrawFn) -> list[Chunk]:
    found: dict[str, Chunk] = {}
    for _ in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
        if sizes == shape:
            offsets = (0,) * len(shape)
        chunk = chunk_of(
            draw(names),
            sizes,
            draw(st.sampled_from([*SAFETENSORS_DTYPES, *OTHERS])),
            offsets=offsets,
            shape=shape,
            per_rank=draw(st.booleans()),
        )
        if not chunk.name.startswith(("!objects", "__metadata__")):
            found.setdefault(chunk.name, chunk)
    return list(found.values())


@SETTINGS
@given(
    chunks(),
    st.integers(1, 5000),
    st.integers(0, 10**18),
    st.integers(1, 10**9),
    st.integers(0, 10**9),
)
def test_parse_is_the_inverse_of_make(wanted: list[Chunk], reserve: int, step: int, attempt: int, serial: int) -> None:
    layout = make_layout(wanted, objects_nbytes=reserve, meta={"run": "r", "rank": 1})
    head = bytearray(layout.header)
    stamped = StepId(step, attempt, "0a0b0c", serial)
    mark = stamp(stamped)
    head[layout.stamp_at : layout.stamp_at + len(mark)] = mark
    header = parse_header(bytes(head), where="x")
    assert header.id == stamped
    assert header.meta == {"run": "r", "rank": 1}
    assert header.placed == layout.placed and header.objects == layout.objects
    assert header_length(bytes(head[:8]), where="x") == len(head)
    # Nothing overlaps, everything is aligned, nothing lies outside.
    position = len(head)
    for placed in layout.placed:
        assert placed.start == position and placed.end - placed.start == placed.chunk.nbytes
        if placed.chunk.itemsize in (1, 2, 4, 8):
            assert placed.start % placed.chunk.itemsize == 0
        position = placed.end
    assert layout.objects == (position, position + reserve) and layout.nbytes == position + reserve
    assert sorted(p.chunk.name for p in layout.placed) == sorted(c.name for c in wanted)


@pytest.mark.parametrize(
    "clash",
    [
        [chunk_of(OBJECTS, (3,), "uint8")],
        [chunk_of("__metadata__", (3,), "uint8")],
        [chunk_of("w@0", (3,), "uint8"), chunk_of("w", (2,), "uint8", shape=(4,))],
        [chunk_of("!rank/w", (3,), "uint8"), chunk_of("w", (2,), "uint8", per_rank=True)],
    ],
    ids=["objects", "metadata", "offsets", "rank"],
)
def test_keys_that_look_like_our_own_names_lose_nothing(clash: list[Chunk]) -> None:
    layout = make_layout(clash, objects_nbytes=10, meta={})
    header = parse_header(layout.header, where="x")
    assert sorted(p.chunk.key for p in header.placed) == sorted(c.key for c in clash)
    assert set(header.placed) == set(layout.placed)


def good() -> bytes:
    return make_layout(
        [chunk_of("w", (3, 2), "float32"), chunk_of("z", (2,), "complex64")], objects_nbytes=100, meta={"run": "r"}
    ).header


@settings(SETTINGS, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=6))
def test_bits_flipped_in_a_header_are_refused_or_harmless(flips: list[tuple[int, int]]) -> None:
    head = bytearray(good())
    for at, value in flips:
        head[at % len(head)] = value
    try:
        parse_header(bytes(head), where="somewhere")
    except CorruptShard as error:
        assert "somewhere" in str(error)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["F32", "0.0.0", "{}", "[]", '{"chunks":{}}', '{"chunks":3}']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "stamp", "resiliency", "chunks"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(SETTINGS, max_examples=300)
@given(st.dictionaries(st.sampled_from(["__metadata__", OBJECTS, "w", "z"]), values, max_size=4) | values)
def test_any_json_in_a_header(data: Any) -> None:
    text = json.dumps(data).encode()
    with pytest.raises(CorruptShard):
        parse_header(struct.pack("<Q", len(text)) + text, where="x")


@SETTINGS
@given(
    st.dictionaries(st.sampled_from(["w", "z", OBJECTS]), values, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["stamp", "resiliency"]), values, max_size=2),
)
def test_any_json_in_parts_of_a_good_header(entries: dict[str, Any], metadata: dict[str, Any]) -> None:
    head = good()
    data = json.loads(head[8:])
    data.update(entries)
    data["__metadata__"].update(metadata)
    text = json.dumps(data).encode()
    try:
        header = parse_header(struct.pack("<Q", len(text)) + text, where="x")
    except CorruptShard:
        return
    for placed in header.placed:
        assert 0 <= placed.start <= placed.end and isinstance(placed.start, int) and isinstance(placed.end, int)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptShard):
        parse_header(data, where="x")


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 0), struct.pack("<Q", 1 << 60)])
def test_what_is_no_header_length_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptShard):
        header_length(data, where="x")


@given(st.integers(0, 10**9))
def test_reserve_has_room_to_grow(nbytes: int) -> None:
    assert objects_reserve(nbytes) >= nbytes * 5 // 4 and objects_reserve(nbytes) % 4096 == 0
