"""A shard file says what it is, has the same places on every rank, and is a stock torch checkpoint all the same."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.errors import CorruptShard, UnsupportedFormat
from resiliency.storage.archive import ArchiveEntry, entry_at, read_directory
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.shard_file import (
    DATA_PICKLE,
    IDENTITY,
    IDENTITY_BYTES,
    Chunk,
    Identity,
    archive_tail,
    chunks_from_json,
    chunks_to_json,
    lay_out_storages,
    read_identity,
    storage_name,
)
from resiliency.storage.step_id import StepId

SETTINGS = settings(deadline=None, database=None, max_examples=200, suppress_health_check=list(HealthCheck))
IDENTITY_OF_STEP_7 = Identity(id=StepId(7, 1, "0a0b0c"), run="r", rank=3, world_size=8, replicated=True)

identities = st.builds(
    Identity,
    id=st.builds(
        StepId,
        st.integers(0, 10**15),
        st.integers(1, 10**6),
        st.text("0123456789abcdef", min_size=6, max_size=6),
        st.integers(0, 10**6),
    ),
    run=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60),
    rank=st.integers(0, 10**6),
    world_size=st.integers(1, 10**6),
    replicated=st.booleans(),
)


def changed(identity: Identity, **values: Any) -> bytes:
    """The beginning of a file whose identity has other values; the header in front of it stays."""
    good = identity.to_bytes()
    at = good.index(b"{")
    fields = {**json.loads(good[at:]), **values}
    return good[:at] + json.dumps(fields).encode().ljust(IDENTITY_BYTES - at)


# -- identity ---------------------------------------------------------------------------------------------------------


@SETTINGS
@given(identities, st.binary(max_size=40))
def test_the_first_bytes_say_which_shard_of_which_step_it_is(identity: Identity, rest: bytes) -> None:
    head = identity.to_bytes()
    assert len(head) == IDENTITY_BYTES
    assert read_identity(head + rest, where="x") == identity


def test_a_run_with_a_name_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    replace(IDENTITY_OF_STEP_7, run="x" * 600).to_bytes()
    with pytest.raises(ValueError, match=r"name of run 'x{40}'... is too long: leave out \d+ bytes"):
        replace(IDENTITY_OF_STEP_7, run="x" * 2000).to_bytes()


@SETTINGS
@given(st.binary(max_size=2 * IDENTITY_BYTES))
def test_other_files_have_no_identity(data: bytes) -> None:
    assert read_identity(data, where="x") is None


def test_a_stock_checkpoint_has_no_identity(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "stock.ckpt")
    assert read_identity((tmp_path / "stock.ckpt").read_bytes(), where="x") is None


@pytest.mark.parametrize("nbytes", [0, 1, 30, 200, IDENTITY_BYTES - 1])
def test_a_file_that_ends_within_its_identity_has_none(nbytes: int) -> None:
    head = IDENTITY_OF_STEP_7.to_bytes()[:nbytes]
    # Cut in the padding behind the JSON nothing is lost; the size in the record tells that it was cut.
    assert read_identity(head, where="x") in (None, IDENTITY_OF_STEP_7)
    assert nbytes > 200 or read_identity(head, where="x") is None


@settings(SETTINGS, max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 330), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_changed_in_an_identity_give_none_another_or_a_sentence_and_no_other_error(
    changes: list[tuple[int, int]],
) -> None:
    head = bytearray(IDENTITY_OF_STEP_7.to_bytes())
    for at, value in changes:
        head[at] = value
    try:
        found = read_identity(bytes(head), where="x")
    except UnsupportedFormat as error:
        assert "checkpoint format" in str(error)
        return
    assert found is None or isinstance(found, Identity)


@pytest.mark.parametrize(
    "values",
    [
        {"format": "another"},
        {"step": "7"},
        {"step": -1},
        {"token": "../../"},
        {"serial": True},
        {"rank": "x"},
        {"world_size": None},
        {"run": {}, "rank": []},
        {"rank": float("inf")},
        {"world_size": float("nan")},
    ],
    ids=str,
)
def test_an_identity_that_cannot_be_is_none(values: dict[str, Any]) -> None:
    assert read_identity(changed(IDENTITY_OF_STEP_7, **values), where="x") is None


@pytest.mark.parametrize(
    ("version", "advice"),
    [(FORMAT_VERSION + 1, "upgrade resiliency"), (2, "export it with the version")],
)
def test_another_version_is_refused_with_what_to_do(version: int, advice: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"the file has checkpoint format {version}, .*{advice}"):
        read_identity(changed(IDENTITY_OF_STEP_7, version=version), where="the file")


# -- layout -----------------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(0, 1 << 40), max_size=12)


def keyed(sizes: Sequence[int]) -> list[tuple[str, int]]:
    return [(str(number), nbytes) for number, nbytes in enumerate(sizes)]


@SETTINGS
@given(sizes, st.booleans())
def test_storages_follow_one_another_without_overlap_and_aligned(sizes: list[int], identity: bool) -> None:
    layout = lay_out_storages(keyed(sizes), identity=identity)
    at = IDENTITY_BYTES if identity else 0
    for entry, header, (key, nbytes) in zip(layout.storages, layout.headers, keyed(sizes), strict=True):
        assert (entry.name, entry.nbytes, entry.at) == (storage_name(key), nbytes, at)
        assert at + len(header) == entry.start and entry.start % 64 == 0
        at = entry.end
    assert layout.end == at
    assert [entry.name for entry in layout.entries] == [
        *([IDENTITY] if identity else []),
        *(entry.name for entry in layout.storages),
    ]


@SETTINGS
@given(sizes, sizes, sizes)
def test_ranks_that_share_storages_place_them_alike_whatever_follows(
    shared: list[int], mine: list[int], others: list[int]
) -> None:
    """What only one rank has follows the shared storages, so that the others need not know of it."""
    here = lay_out_storages(keyed([*shared, *mine])).storages[: len(shared)]
    there = lay_out_storages(keyed([*shared, *others])).storages[: len(shared)]
    assert here == there == lay_out_storages(keyed(shared)).storages


def written(identity: Identity, storages: dict[str, bytes], entries: Sequence[tuple[str, bytes]]) -> bytes:
    """A whole file."""
    layout = lay_out_storages([(key, len(data)) for key, data in storages.items()])
    pieces = [identity.to_bytes()]
    for header, data in zip(layout.headers, storages.values(), strict=True):
        pieces += [header, data]
    return b"".join((*pieces, archive_tail(layout, entries)))


def entries_of(data: bytes) -> dict[str, ArchiveEntry]:
    return read_directory(lambda start, end: data[start:end], len(data), where="x")


@SETTINGS
@given(st.dictionaries(st.text("0123456789x", min_size=1), st.binary(max_size=200), max_size=5), st.binary(max_size=90))
def test_a_file_lists_its_identity_first_then_its_storages_then_the_rest(
    storages: dict[str, bytes], pickled: bytes
) -> None:
    data = written(IDENTITY_OF_STEP_7, storages, [(DATA_PICKLE, pickled), ("resiliency/rank.pt", b"own")])
    found = entries_of(data)
    assert list(found)[: 1 + len(storages)] == [IDENTITY, *map(storage_name, storages)]
    for key, value in storages.items():
        entry = found[storage_name(key)]
        assert data[entry.start : entry.end] == value
    own = found["resiliency/rank.pt"]
    assert data[own.start : own.end] == b"own"
    assert found[IDENTITY].start + found[IDENTITY].nbytes == IDENTITY_BYTES
    assert read_identity(data, where="x") == IDENTITY_OF_STEP_7


def test_torch_load_reads_it_and_ignores_entries_of_our_own(tmp_path: Path) -> None:
    """The pickle of a dict with one tensor of storage "0"."""
    stock = io.BytesIO()
    tensor = torch.arange(6, dtype=torch.int16)
    torch.save({"t": tensor}, stock)
    reader = torch._C.PyTorchFileReader(io.BytesIO(stock.getvalue()))
    pickled = reader.get_record("data.pkl")
    path = tmp_path / "x.ckpt"
    own = [(DATA_PICKLE, pickled), ("resiliency/rank.pt", b"not for torch"), ("resiliency/chunks.json", b"[]")]
    path.write_bytes(written(IDENTITY_OF_STEP_7, {"0": tensor.numpy().tobytes()}, own))
    for mmap in (False, True):
        assert torch.equal(torch.load(path, weights_only=True, mmap=mmap)["t"], tensor)


# -- chunks -----------------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Chunk]:
    found = {}
    for number in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        box = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
        dtype, itemsize = draw(st.sampled_from([("float32", 4), ("bfloat16", 2), ("complex128", 16), ("bool", 1)]))
        key = draw(st.text(st.characters(codec="utf-8"), max_size=8))
        found[str(number)] = Chunk(key, offsets, box, dtype, itemsize, shape)
    return found


@SETTINGS
@given(tables())
def test_a_table_of_chunks_comes_back_with_its_places(table: dict[str, Chunk]) -> None:
    layout = lay_out_storages([(key, chunk.nbytes) for key, chunk in table.items()])
    entries = {entry.name: entry for entry in layout.storages}
    placed = chunks_from_json(chunks_to_json(table), entries, where="x")
    assert [item.chunk for item in placed] == list(table.values())
    assert [(item.start, item.end) for item in placed] == [(entry.start, entry.end) for entry in layout.storages]


CHUNK = Chunk("w", (0, 2), (3, 2), "float32", 4, (3, 4))
ENTRIES = {"data/0": entry_at("data/0", 1024, CHUNK.nbytes)}
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["0", "w"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["storage", "key", "offsets", "sizes", "shape", "itemsize"]), inner)
    ),
    max_leaves=8,
)


@settings(SETTINGS, max_examples=400)
@given(st.dictionaries(st.sampled_from(["storage", "key", "offsets", "sizes", "dtype", "itemsize", "shape"]), junk))
def test_any_value_in_a_table_of_chunks_is_refused_or_fits_its_storage(values: dict[str, Any]) -> None:
    table = json.loads(chunks_to_json({"0": CHUNK}))
    table[0].update(values)
    try:
        placed = chunks_from_json(json.dumps(table).encode(), ENTRIES, where="the file")
    except CorruptShard as error:
        assert "the file" in str(error) and error.path == "the file"
        return
    for item in placed:
        assert item.end - item.start == item.chunk.nbytes == CHUNK.nbytes
        chunk = item.chunk
        assert all(0 <= a <= a + n <= size for a, n, size in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        {"offsets": [float("inf"), 0]},
        {"itemsize": float("nan")},
        {"sizes": [-3, -2]},
        {"offsets": [0, 3]},
        {"offsets": [-1, 2]},
        {"offsets": [0]},
        {"shape": [3, 4, 1]},
        {"storage": "1"},
        {"storage": None},
    ],
    ids=str,
)
def test_a_chunk_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    table = json.loads(chunks_to_json({"0": CHUNK}))
    table[0].update(values)
    with pytest.raises(CorruptShard, match="its table of chunks is damaged"):
        chunks_from_json(json.dumps(table).encode(), ENTRIES, where="x")


@SETTINGS
@given(st.binary(max_size=80) | junk.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
def test_what_is_no_table_of_chunks_is_refused(data: bytes) -> None:
    try:
        assert chunks_from_json(data, ENTRIES, where="x") == []
    except CorruptShard:
        return
    assert json.loads(data) in ([], {}, "")


def test_a_chunk_of_another_size_than_its_storage_is_refused() -> None:
    table = chunks_to_json({"0": CHUNK._replace(sizes=(3, 1))})
    with pytest.raises(CorruptShard, match="tensor 'w' has 24 bytes instead of 12"):
        chunks_from_json(table, ENTRIES, where="x")
