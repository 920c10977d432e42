"""Blocks cover a file once and without gaps, whoever asks."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.storage.blocks import Blocks, block_digest, new_digest

SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(st.integers(0, 1000), st.integers(1, 300))
def test_blocks_cover_every_byte_once_in_order(nbytes: int, block_bytes: int) -> None:
    blocks = Blocks(nbytes, block_bytes)
    bounds = [blocks.bounds(index) for index in range(blocks.count)]
    assert [byte for start, end in bounds for byte in range(start, end)] == list(range(nbytes))
    assert all(end - start == block_bytes for start, end in bounds[:-1])
    for index, (start, end) in enumerate(bounds):
        assert {blocks.index_at(byte) for byte in range(start, end)} == {index}


@SETTINGS
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_blocks_within_a_range_are_those_that_share_a_byte_with_it(start: int, end: int, block_bytes: int) -> None:
    blocks = Blocks(1000, block_bytes)
    shares = [i for i in range(blocks.count) if max(start, blocks.bounds(i)[0]) < min(end, blocks.bounds(i)[1])]
    assert list(blocks.within(start, end)) == shares


@pytest.mark.parametrize(("nbytes", "block_bytes"), [(-1, 8), (8, 0), (8, -8)])
def test_sizes_that_cannot_be_are_refused(nbytes: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="blocks of"):
        Blocks(nbytes, block_bytes)


def test_a_digest_made_in_pieces_is_that_of_the_whole() -> None:
    data = os.urandom(1000)
    digest = new_digest()
    for at in range(0, 1000, 333):
        digest.update(data[at : at + 333])
    assert digest.hexdigest() == block_digest(data) != block_digest(data[:-1])
