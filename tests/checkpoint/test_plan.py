"""Every element is written by exactly one rank and read back where it belongs; every rank comes to the same plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint.plan import describe, plan_writes
from resiliency.checkpoint.rank_messages import HeldBox, HeldBoxes
from resiliency.checkpoint.read_plan import plan_reads
from resiliency.errors import ConfigError
from resiliency.runtime.typed_json import decode, encode
from resiliency.storage.shard_file import Chunk

SETTINGS = settings(deadline=None, database=None, max_examples=60, suppress_health_check=list(HealthCheck))
# The last three DCP's planner does not know.
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
DTYPES += [torch.complex128, torch.bits8, torch.bits16, torch.uint4]


def meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def chunks_of(tensors: dict[str, torch.Tensor], world_size: int) -> list[tuple[Chunk, ...]]:
    """Of plain tensors beside sharded ones, which every rank offers."""
    mine = describe(tensors)
    plans = [plan_writes([mine] * world_size, rank=rank) for rank in range(world_size)]
    assert len({plan.digest for plan in plans}) == 1, "ranks have different plans"
    return [plan.chunks for plan in plans]


def covers_once(tensors: dict[str, torch.Tensor], ranks: list[tuple[Chunk, ...]]) -> None:
    seen = {key: np.zeros(tuple(tensor.shape), dtype=np.int8) for key, tensor in tensors.items()}
    for chunk in (chunk for chunks in ranks for chunk in chunks):
        assert chunk.shape == tuple(tensors[chunk.key].shape) and f"torch.{chunk.dtype}" == str(
            tensors[chunk.key].dtype
        )
        seen[chunk.key][tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    for key, counts in seen.items():
        assert (counts == 1).all(), f"{key} is not covered exactly once"
    assert {chunk.key for chunks in ranks for chunk in chunks} == set(tensors), (
        "a tensor without elements must be stored too"
    )


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
states = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
    st.tuples(shapes, st.sampled_from(DTYPES)),
    max_size=8,
)


@SETTINGS
@given(states, st.integers(1, 8))
def test_every_element_is_written_by_exactly_one_rank(
    state: dict[str, tuple[tuple[int, ...], torch.dtype]], world_size: int
) -> None:
    tensors = {key: meta(*what) for key, what in state.items()}
    covers_once(tensors, chunks_of(tensors, world_size))


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("kind", ["many", "skewed"])
def test_bytes_are_balanced_between_ranks(world_size: int, kind: str) -> None:
    chance = random.Random(world_size)
    sizes = {
        "many": [chance.randint(10, 2000) for _ in range(100)],
        "skewed": [500] + [9] * 100 * world_size,
    }[kind]
    tensors = {f"t{i}": meta((rows, 8)) for i, rows in enumerate(sizes)}
    ranks = chunks_of(tensors, world_size)
    covers_once(tensors, ranks)
    loads = [sum(chunk.nbytes for chunk in chunks) for chunks in ranks]
    assert max(loads) / (sum(loads) / world_size) <= 1.2, loads


def test_one_rank_writes_everything_whole() -> None:
    tensors = {"a": meta((1000, 9)), "b": meta(())}
    (chunks,) = chunks_of(tensors, 1)
    assert all(chunk.whole for chunk in chunks) and len(chunks) == 2


def test_the_plan_is_a_function_of_the_descriptions() -> None:
    tensors = {f"t{i}": meta((i * 37 % 400, 3)) for i in range(20)}
    mine = describe(tensors)
    first = plan_writes([mine] * 4, rank=2)
    sent = decode(HeldBoxes, encode(HeldBoxes(boxes=mine)), what="the plan of rank 1").boxes
    assert plan_writes([sent] * 4, rank=2) == first, "what was sent over the store gives another plan"
    assert plan_writes([describe(tensors)] * 4, rank=2) == first
    assert (
        plan_writes([mine] * 4, rank=1).digest == first.digest
        and plan_writes([mine] * 4, rank=1).chunks != first.chunks
    )


@pytest.mark.parametrize("other", [{"w": meta((11, 4))}, {"w": meta((10, 4), torch.bfloat16)}])
def test_ranks_that_disagree_are_refused(other: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="'w'.*per_rank"):
        plan_writes([describe({"w": meta((10, 4))}), describe(other)], rank=0)


def test_another_shape_gives_another_digest() -> None:
    """Without talk the difference must show in the records."""
    digests = set()
    for tensors in (
        {"w": meta((10, 4))},
        {"w": meta((11, 4))},
        {"v": meta((10, 4))},
        {"w": meta((10, 4), torch.int32)},
        {"w": meta((10, 4)), "v": meta((1,))},
    ):
        digests.add(plan_writes([describe(tensors)] * 2, rank=0).digest)
    assert len(digests) == 5


def boxes(key: str, pieces: list[tuple[int, int]], rows: int) -> tuple[HeldBox, ...]:
    return tuple(
        HeldBox(key=key, offsets=(a, 0), sizes=(b - a, 4), shape=(rows, 4), dtype="float32", replicated=False)
        for a, b in pieces
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [([(0, 4)], [(5, 10)]), ([(0, 6)], [(5, 10)]), ([(0, 5)], [(5, 9)]), ([(0, 5)], [(5, 12)])],
    ids=["hole", "overlap", "short", "beyond"],
)
def test_shards_that_do_not_make_a_whole_are_refused(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    with pytest.raises(ConfigError):
        plan_writes([boxes("w", first, 10), boxes("w", second, 10)], rank=0)


@SETTINGS
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 6), st.data())
def test_reads_fill_every_element(rows: int, columns: int, world_size: int, data: st.DataObject) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    stored = [chunk for chunks in chunks_of({"w": whole}, world_size) for chunk in chunks]
    data.draw(st.randoms(use_true_random=False)).shuffle(stored)
    target = torch.full_like(whole, -1.0)
    for read in plan_reads({"w": target}, stored):
        source = whole
        (chunk,) = [c for c in stored if c.offsets == read.chunk_offsets]
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            source = source.narrow(dim, offset, size)
        for dim, (offset, size) in enumerate(zip(read.box_offsets, read.lengths, strict=True)):
            source = source.narrow(dim, offset, size)
        read.destination.copy_(source)
    assert torch.equal(target, whole)


def test_reads_with_a_piece_missing_are_refused() -> None:
    """Otherwise the rest of the tensor would be whatever was in memory."""
    stored = [
        chunk
        for rank in (0, 1)
        for chunk in plan_writes([boxes("w", [(0, 15)], 40), boxes("w", [(15, 40)], 40)], rank=rank).chunks
    ]
    assert len(stored) == 2
    with pytest.raises(ConfigError, match="'w'"):
        plan_reads({"w": torch.zeros(40, 4)}, stored[:-1])


def test_reads_of_a_tensor_that_is_stored_whole_twice_are_refused() -> None:
    whole = Chunk("w", (0,), (3,), "float32", 4, (3,))
    with pytest.raises(ConfigError, match="6 of 3 elements"):
        plan_reads({"w": torch.zeros(3)}, [whole, whole])


@pytest.mark.parametrize(
    ("wanted", "word"),
    [({"v": torch.zeros(3)}, "'v' is not in the checkpoint"), ({"w": torch.zeros(4)}, r"\(4,\) here but \(3,\)")],
)
def test_reads_that_do_not_fit(wanted: dict[str, torch.Tensor], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan_reads(wanted, [Chunk("w", (0,), (3,), "float32", 4, (3,))])


def test_a_description_changes_with_the_structure_only() -> None:
    """It is what tells the planner that the boxes must be dealt out anew."""
    base = {"w": torch.zeros(3), "v": torch.zeros(2, 2)}
    mark = describe(base)
    assert describe({key: tensor + 1 for key, tensor in base.items()}) == mark
    for other in (
        {"w": torch.zeros(4), "v": base["v"]},
        {"w": base["w"]},
        {"w": base["w"].int(), "v": base["v"]},
        {"v": base["v"], "x": base["w"]},
    ):
        assert describe(other) != mark
