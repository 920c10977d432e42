"""Blocks cover a file once and without gaps, whoever asks."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.storage.blocks import Blocks, block_digest, new_digest

SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def divided(draw: st.DrawFn) -> Blocks:
    """A file with or without sections."""
    nbytes = draw(st.integers(0, 1000))
    sections = draw(st.sets(st.integers(1, max(1, nbytes - 1)), max_size=4)) if nbytes > 1 else set()
    return Blocks(nbytes, draw(st.integers(1, 300)), tuple(sorted(sections)))


@SETTINGS
@given(divided())
def test_blocks_cover_every_byte_once_in_order(blocks: Blocks) -> None:
    bounds = [blocks.bounds(index) for index in range(blocks.count)]
    assert [byte for start, end in bounds for byte in range(start, end)] == list(range(blocks.nbytes))
    assert all(0 < end - start <= blocks.block_bytes for start, end in bounds)
    for index, (start, end) in enumerate(bounds):
        assert {blocks.index_at(byte) for byte in range(start, end)} == {index}


@SETTINGS
@given(divided())
def test_no_block_crosses_the_end_of_a_section_and_only_the_last_of_a_section_is_short(blocks: Blocks) -> None:
    """So that two ranks, or a rank at two times, never write into one block."""
    bounds = [blocks.bounds(index) for index in range(blocks.count)]
    starts = {start for start, _ in bounds}
    assert set(blocks.sections) <= starts
    ends = {*blocks.sections, blocks.nbytes}
    assert all(end - start == blocks.block_bytes for start, end in bounds if end not in ends)


@SETTINGS
@given(divided(), st.integers(0, 1000))
def test_blocks_before_a_section_are_those_of_the_file_that_ends_there(blocks: Blocks, more: int) -> None:
    """A rank that knows only the first sections numbers the blocks as the one that adds the tail does."""
    if blocks.nbytes:
        longer = Blocks(blocks.nbytes + 1 + more, blocks.block_bytes, (*blocks.sections, blocks.nbytes))
        assert [longer.bounds(i) for i in range(blocks.count)] == [blocks.bounds(i) for i in range(blocks.count)]
        assert longer.bounds(blocks.count)[0] == blocks.nbytes


@SETTINGS
@given(divided(), st.integers(0, 1000), st.integers(0, 1000))
def test_blocks_within_a_range_are_those_that_share_a_byte_with_it(blocks: Blocks, start: int, end: int) -> None:
    start, end = min(start, blocks.nbytes), min(end, blocks.nbytes)
    shares = [i for i in range(blocks.count) if max(start, blocks.bounds(i)[0]) < min(end, blocks.bounds(i)[1])]
    assert list(blocks.within(start, end)) == shares


@pytest.mark.parametrize(("nbytes", "block_bytes"), [(-1, 8), (8, 0), (8, -8)])
def test_sizes_that_cannot_be_are_refused(nbytes: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="blocks of"):
        Blocks(nbytes, block_bytes)


@pytest.mark.parametrize("sections", [(0,), (8,), (9,), (-1,), (3, 3), (5, 3)])
def test_sections_that_do_not_divide_the_file_are_refused(sections: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not divide a file of 8 bytes"):
        Blocks(8, 4, sections)


def test_a_digest_made_in_pieces_is_that_of_the_whole() -> None:
    data = os.urandom(1000)
    digest = new_digest()
    for at in range(0, 1000, 333):
        digest.update(data[at : at + 333])
    assert digest.hexdigest() == block_digest(data) != block_digest(data[:-1])
