"""Pages of files: filled whole, in aligned pieces, without a hole; and views of memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from resiliency.checkpoint import _pages
from resiliency.checkpoint._pages import fill, has_small_pages, page_faults, view

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (0, 5000), (0, 2 * MIB), (2 * MIB, 5 * MIB + 17), (4 * MIB, 4 * MIB), (0, 8 * MIB)]
)
@pytest.mark.parametrize("short", [False, True])
def test_exactly_the_range_is_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, end: int, short: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xaa" * (9 * MIB))
    real, wrote = os.pwrite, []

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        wrote.append((at, len(data)))
        return real(fd, data[: 700_000 if short else None], at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    fd = os.open(path, os.O_RDWR)
    try:
        fill(fd, start, end)
    finally:
        os.close(fd)
    data = path.read_bytes()
    assert data[start:end] == bytes(end - start)
    assert data[:start] == b"\xaa" * start and data[end:] == b"\xaa" * (9 * MIB - end)
    assert all(at // (2 * MIB) == (at + nbytes - 1) // (2 * MIB) for at, nbytes in wrote), (
        "a write across a huge page makes small ones"
    )


def test_a_disk_that_fails_is_said() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        fill(-1, 0, 10)


def test_a_view_is_the_memory_itself() -> None:
    data = ctypes.create_string_buffer(b"abcdef", 6)
    seen = view(ctypes.addressof(data) + 1, 3)
    assert bytes(seen) == b"bcd" and seen.itemsize == 1
    seen[0:1] = b"X"
    assert data.raw == b"aXcdef"


def test_faults_are_those_of_touching_pages() -> None:
    before = page_faults()
    data = bytearray(64 * MIB)
    for at in range(0, len(data), 4096):
        data[at] = 1
    assert page_faults() > before
    assert page_faults() - page_faults() == 0


@pytest.mark.parametrize(
    ("faults", "nbytes", "small"),
    [(0, 0, False), (0, MIB, False), (256, MIB, True), (1, 2 * MIB, False), (16, MIB, False), (17, MIB, True)],
)
def test_small_pages_are_told_by_the_faults_of_a_touch(faults: int, nbytes: int, small: bool) -> None:
    assert has_small_pages(faults, nbytes) is small
    assert _pages._SMALL == 65536
