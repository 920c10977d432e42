"""Of the boxes that write plans offer, each is written by one rank; boxes that do not make whole tensors are refused."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint.offered_boxes import share_out
from resiliency.errors import ConfigError
from resiliency.storage.shard_file import Chunk

SETTINGS = settings(deadline=None, database=None, max_examples=60, suppress_health_check=list(HealthCheck))


def box(key: str, first: int, end: int, rows: int = 10, *, columns: tuple[int, int] = (0, 4)) -> Chunk:
    sizes = (end - first, columns[1] - columns[0])
    return Chunk(key, (first, columns[0]), sizes, "float32", 4, (rows, 4))


@SETTINGS
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 6), st.data())
def test_each_box_is_written_by_one_of_the_ranks_that_offer_it(
    rows: list[int], ranks: int, data: st.DataObject
) -> None:
    boxes = [box(f"t{i}", 0, count, count) for i, count in enumerate(rows)]
    holders = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes]
    offers = [[one for one, held in zip(boxes, holders, strict=True) if rank in held] for rank in range(ranks)]
    decided = share_out(offers)
    written = [offers[rank][number] for rank, mine in enumerate(decided.shares) for number in mine]
    assert sorted(one.key for one in written) == sorted(one.key for one in boxes) == sorted(decided.keys)
    assert share_out(offers) == decided


def test_ranks_that_offer_the_same_share_it_by_bytes() -> None:
    boxes = [box(f"t{i}", 0, rows, rows) for i, rows in enumerate([500, *[9] * 200])]
    decided = share_out([boxes] * 4)
    loads = [sum(boxes[number].sizes[0] for number in mine) for mine in decided.shares]
    assert max(loads) <= 1.2 * sum(loads) / 4


@pytest.mark.parametrize(
    "offers",
    [
        [[box("w", 0, 4)], [box("w", 5, 10)]],
        [[box("w", 0, 6)], [box("w", 5, 10)]],
        [[box("w", 0, 5)], [box("w", 5, 9)]],
        [[box("w", 0, 6), box("w", 0, 2, columns=(0, 2))], [box("w", 7, 10)]],
        [[box("w", 0, 10, columns=(0, 2)), box("w", 0, 5, columns=(1, 3))], [box("w", 5, 10, columns=(2, 4))]],
        [[box("w", 1, 1)], []],
    ],
    ids=["hole", "overlap", "short", "overlap as large as the hole", "columns", "only an empty box"],
)
def test_boxes_that_do_not_make_a_whole_are_refused(offers: list[list[Chunk]]) -> None:
    with pytest.raises(ConfigError, match="'w' do not make a whole tensor"):
        share_out(offers)


@pytest.mark.parametrize("other", [box("w", 5, 11, 11), Chunk("w", (5, 0), (5, 4), "int32", 4, (10, 4))])
def test_ranks_that_disagree_are_refused(other: Chunk) -> None:
    with pytest.raises(ConfigError, match="rank 1 has tensor 'w'.*per_rank"):
        share_out([[box("w", 0, 5)], [other]])
