"""Pages of files, and views of memory."""

from __future__ import annotations

import ctypes

import pytest

from resiliency.checkpoint import _pages
from resiliency.checkpoint._pages import has_small_pages, page_faults, view

MIB = 1024 * 1024


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
