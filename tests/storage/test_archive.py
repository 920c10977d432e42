"""What is written is a zip archive that others read, and what is read back was written here, or is refused."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from resiliency.errors import CorruptShard
from resiliency.storage import archive
from resiliency.storage.archive import (
    ALIGNMENT,
    PREFIX,
    ArchiveEntry,
    data_start,
    directory,
    entry_at,
    local_header,
    read_directory,
)

SETTINGS = settings(deadline=None, database=None, max_examples=200, suppress_health_check=list(HealthCheck))
GIB = 1 << 30

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)
contents = st.dictionaries(names, st.binary(max_size=300), max_size=8)


def lay_out(sizes: dict[str, int], at: int = 0) -> list[ArchiveEntry]:
    entries = []
    for name, nbytes in sizes.items():
        entries.append(entry_at(name, at, nbytes))
        at = entries[-1].end
    return entries


def build(wanted: dict[str, bytes]) -> bytes:
    entries = lay_out({name: len(data) for name, data in wanted.items()})
    body = b"".join(local_header(entry) + wanted[entry.name] for entry in entries)
    return body + directory(entries, len(body))


def parse(data: bytes) -> dict[str, ArchiveEntry]:
    return read_directory(lambda start, end: data[start:end], len(data), where="the file")


# -- round trip -------------------------------------------------------------------------------------------------------


@SETTINGS
@given(contents)
@example({})
@example({"x" * 65_000: b"a long name"})
@example({"a": b"", "b": b"", "c": b""})
def test_any_entries_come_back_in_order_and_every_data_begins_at_a_multiple_of_64(wanted: dict[str, bytes]) -> None:
    data = build(wanted)
    found = parse(data)
    assert {name: data[entry.start : entry.end] for name, entry in found.items()} == wanted
    assert list(found) == list(wanted)
    assert all(entry.start % ALIGNMENT == 0 for entry in found.values())


@SETTINGS
@given(names, st.integers(0, 1 << 63), st.integers(0, 1 << 62))
@example("n", 0xFFFFFFFE, 0xFFFFFFFE)
@example("n", 0xFFFFFFFF, 0xFFFFFFFF)
def test_a_header_fills_the_bytes_up_to_its_data_and_the_data_follow_from_name_size_and_place(
    name: str, nbytes: int, at: int
) -> None:
    entry = entry_at(name, at, nbytes)
    header = local_header(entry)
    assert len(header) == entry.start - at < 200 + 4 * len(name.encode()) and entry.start % ALIGNMENT == 0
    # As readers that know nothing of ours find the data: by the lengths in the header.
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    assert at + 30 + name_length + extra_length == entry.start == data_start(name, nbytes, at)


# -- other readers ----------------------------------------------------------------------------------------------------


def readable(name: str) -> bool:
    """Names without bytes that stand for themselves in our archives and not in Python's zipfile: it takes a name that
    is not flagged as UTF-8 for code page 437, and cuts it at a NUL."""
    return name.isascii() and "\0" not in name


@SETTINGS
@given(contents)
def test_pythons_zipfile_reads_every_entry(wanted: dict[str, bytes]) -> None:
    wanted = {name: data for name, data in wanted.items() if readable(name)}
    with zipfile.ZipFile(io.BytesIO(build(wanted))) as file:
        assert file.namelist() == [PREFIX + name for name in wanted]
        for info, data in zip(file.infolist(), wanted.values(), strict=True):
            assert (info.compress_type, info.file_size, info.compress_size) == (
                zipfile.ZIP_STORED,
                len(data),
                len(data),
            )
            del info.CRC  # zipfile would insist on it; it is 0, as in archives that torch writes without check sums
            assert file.read(info) == data


def test_torch_load_reads_an_archive_with_entries_of_our_own(tmp_path: Path) -> None:
    """The pickle is torch's; the archive around it, and the order of its entries, are ours."""
    state: dict[str, Any] = {
        "weight": torch.arange(1000, dtype=torch.float32),
        "odd": [1, ("a", None)],
        "empty": torch.empty(0, 3),
    }
    stock = io.BytesIO()
    torch.save(state, stock)
    with zipfile.ZipFile(stock) as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    ours = dict(sorted(entries.items(), key=lambda item: not item[0].startswith("data/")))
    path = tmp_path / "ours.ckpt"
    path.write_bytes(build({"resiliency/shard.json": b"{}", **ours}))
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(loaded["weight"], state["weight"]) and loaded["odd"] == state["odd"]
        assert loaded["empty"].shape == (0, 3)


# -- large archives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"small": 5, "large": 0xFFFFFFFF, "behind": 7},
        {"just below": 0xFFFFFFFE, "behind": 7},
        {"a": 3 * GIB, "b": 3 * GIB, "c": 11},
        {"a": 5 * GIB, "b": 0, "c": 6 * GIB, "d": 1},
    ],
    ids=["4 GiB - 1", "4 GiB - 2", "directory behind 4 GiB", "several"],
)
def test_sizes_and_offsets_above_4_gib_stand_in_a_sparse_file(tmp_path: Path, sizes: dict[str, int]) -> None:
    entries = lay_out(sizes)
    end = entries[-1].end
    path = tmp_path / "large"
    with path.open("w+b", buffering=0) as file:
        for number, entry in enumerate(entries):
            os.pwrite(file.fileno(), local_header(entry), entry.at)
            mark = b"%d" % number
            os.pwrite(file.fileno(), mark[: entry.nbytes], entry.start)
        tail = directory(entries, end)
        os.pwrite(file.fileno(), tail, end)
        size = end + len(tail)
        found = read_directory(lambda start, stop: os.pread(file.fileno(), stop - start, start), size, where="x")
        assert list(found.values()) == entries
        with zipfile.ZipFile(file) as others:
            for number, (entry, info) in enumerate(zip(entries, others.infolist(), strict=True)):
                assert (info.filename, info.file_size, info.header_offset) == (
                    PREFIX + entry.name,
                    entry.nbytes,
                    entry.at,
                )
                del info.CRC
                with others.open(info) as stream:  # zipfile checks the local header here
                    assert stream.read(1) == (b"%d" % number)[: entry.nbytes]


def test_torch_reads_a_checkpoint_whose_parts_lie_behind_4_gib(tmp_path: Path) -> None:
    """A storage of 4 GiB and one behind it; mapped, so that the holes of the file stay holes."""
    sizes = {"0": (1 << 32) + 64, "1": 4}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            if isinstance(obj, torch.UntypedStorage):
                key = "0" if obj.nbytes() > 4 else "1"
                return ("storage", torch.ByteStorage, key, "cpu", obj.nbytes())
            return None

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                storage = obj.untyped_storage()
                hooks: Any = collections.OrderedDict()
                return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(obj.shape), (1,), False, hooks)
            return NotImplemented

    stream = io.BytesIO()
    holes: Any = torch.UntypedStorage.from_file(str(_holes(tmp_path / "holes", sizes["0"])), False, sizes["0"])
    large = torch.empty(0, dtype=torch.uint8).set_(holes)
    Pickler(stream, protocol=2).dump({"large": large, "small": torch.zeros(4, dtype=torch.uint8)})
    small = {"data.pkl": stream.getvalue(), "byteorder": b"little", "version": b"3\n"}
    entries = lay_out({**{f"data/{key}": n for key, n in sizes.items()}, **{k: len(v) for k, v in small.items()}})
    path = tmp_path / "large.ckpt"
    with path.open("wb", buffering=0) as file:
        for entry in entries:
            os.pwrite(file.fileno(), local_header(entry), entry.at)
            os.pwrite(file.fileno(), small.get(entry.name, b"\1\2\3\4"), entry.start)
        end = entries[-1].end
        os.pwrite(file.fileno(), directory(entries, end), end)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["small"].tolist() == [1, 2, 3, 4]
    assert loaded["large"].numel() == sizes["0"] and loaded["large"][:5].tolist() == [1, 2, 3, 4, 0]
    assert loaded["large"][-1] == 0


def _holes(path: Path, nbytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


def test_more_entries_than_a_short_directory_can_count() -> None:
    wanted = {f"data/{number}": b"" for number in range(0xFFFF + 1)}
    data = build(wanted)
    assert list(parse(data)) == list(wanted)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert len(file.namelist()) == len(wanted)


# -- damage -----------------------------------------------------------------------------------------------------------

GOOD = build({"data/0": bytes(200), "data.pkl": b"pickle", "version": b"3\n"})
GOOD_ENTRIES = parse(GOOD)
AT = max(entry.end for entry in GOOD_ENTRIES.values())


def refused_or_inside(data: bytes) -> None:
    """Whatever is read lies within the file; nothing but CorruptShard is raised, with the path."""
    try:
        found = parse(data)
    except CorruptShard as error:
        assert "the file" in str(error) and error.path == "the file"
        return
    for name, entry in found.items():
        assert entry.name == name and 0 <= entry.at <= entry.start <= entry.end <= len(data)


@settings(SETTINGS, max_examples=500)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - AT - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_bytes_changed_in_the_directory_are_refused_or_name_places_in_the_file(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[AT + at] = value
    refused_or_inside(bytes(data))


@SETTINGS
@given(st.integers(0, len(GOOD) - 1))
def test_a_file_that_was_cut_is_refused(nbytes: int) -> None:
    with pytest.raises(CorruptShard, match="the file: not a checkpoint archive"):
        parse(GOOD[:nbytes])


@SETTINGS
@given(st.binary(min_size=1, max_size=200))
def test_a_file_with_something_behind_its_end_is_refused(more: bytes) -> None:
    with pytest.raises(CorruptShard):
        parse(GOOD + more)


@SETTINGS
@given(st.binary(max_size=300))
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptShard):
        parse(data)


def end64(*, count: int, size: int, at: int, end_at: int) -> bytes:
    return b"".join(
        (
            archive._END64_RECORD.pack(archive._END64, 44, 45, 45, 0, 0, count, count, size, at),
            archive._LOCATOR_RECORD.pack(archive._LOCATOR, 0, end_at, 1),
            archive._END_RECORD.pack(archive._END, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0),
        )
    )


@pytest.mark.parametrize(
    "tail",
    [
        end64(count=1, size=1 << 62, at=0, end_at=0),
        end64(count=1 << 63, size=0, at=0, end_at=0),
        end64(count=1, size=10, at=1 << 63, end_at=0),
        end64(count=0, size=0, at=0, end_at=1 << 63),
        end64(count=0, size=0, at=0, end_at=5),
    ],
    ids=["huge directory", "huge count", "directory outside", "end outside", "end elsewhere"],
)
def test_numbers_of_64_bits_that_cannot_be_cost_neither_memory_nor_time(tail: bytes) -> None:
    def read(start: int, end: int) -> bytes:
        assert end - start < 1000, "more is asked for than the file has"
        return tail[start:end]

    with pytest.raises(CorruptShard):
        read_directory(read, len(tail), where="x")


def relisted(entries: list[ArchiveEntry], at: int) -> bytes:
    return GOOD[:at] + directory(entries, at)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry_at("data/0", 0, 200), entry_at("data/0", 0, 200)], "listed twice"),
        ([entry_at("data/0", 0, 200_000)], "ends behind the directory"),
        ([entry_at("data/0", AT, 1)], "ends behind the directory"),
        ([entry_at("data/0", 1 << 40, 8)], "ends behind the directory"),
    ],
)
def test_entries_that_cannot_be_are_refused(entries: list[ArchiveEntry], problem: str) -> None:
    with pytest.raises(CorruptShard, match=problem):
        parse(relisted(entries, AT))


def test_an_archive_of_somebody_else_is_not_taken_for_ours() -> None:
    """Its data are not where ours would be."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("other/data.pkl", b"x")
    with pytest.raises(CorruptShard, match="not one of ours"):
        parse(stream.getvalue())
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{PREFIX}data.pkl", b"x" * 100)
    with pytest.raises(CorruptShard, match="damaged"):
        parse(stream.getvalue())
