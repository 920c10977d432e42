"""Every element of a sharded state is written by exactly one rank, as each rank works out alone, and read back where it
belongs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint.plan import PlannedLeaf, ShardedPlan
from resiliency.checkpoint.read_plan import plan_reads
from resiliency.errors import ConfigError
from resiliency.state.layouts import MeshLayout, Split
from resiliency.storage.shard_file import Chunk

SETTINGS = settings(deadline=None, database=None, max_examples=60, suppress_health_check=list(HealthCheck))


def leaf(key: str, shape: tuple[int, ...], layout: MeshLayout | None, itemsize: int = 4) -> PlannedLeaf:
    return PlannedLeaf(key, shape, {4: "float32", 8: "int64"}[itemsize], itemsize, layout)


def rows(ranks: int, *, copies: int = 1) -> MeshLayout:
    """A tensor cut by rows over all ranks; with copies as HSDP does."""
    return MeshLayout((copies, ranks // copies), tuple(range(ranks)), (None, Split(0)))


def covers_once(leaves: list[PlannedLeaf], ranks: list[tuple[Chunk, ...]]) -> None:
    by_key = {leaf.key: leaf for leaf in leaves}
    seen = {leaf.key: np.zeros(leaf.shape, dtype=np.int8) for leaf in leaves}
    for chunk in (chunk for chunks in ranks for chunk in chunks):
        known = by_key[chunk.key]
        assert (chunk.shape, chunk.dtype, chunk.itemsize) == (known.shape, known.dtype, known.itemsize)
        seen[chunk.key][tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    for key, counts in seen.items():
        assert (counts == 1).all(), f"{key} is not covered exactly once"
    assert {chunk.key for chunks in ranks for chunk in chunks} == set(by_key), (
        "a tensor without elements must be stored too"
    )


shapes = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)
meshes = st.sampled_from([(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2)])


@SETTINGS
@given(meshes, st.data())
def test_every_element_is_written_by_exactly_one_rank(mesh: tuple[int, ...], data: st.DataObject) -> None:
    world_size, leaves = math.prod(mesh), []
    for number in range(data.draw(st.integers(1, 8))):
        shape = data.draw(shapes)
        split = st.none() | st.builds(Split, st.integers(0, len(shape) - 1), st.integers(1, 3))
        layout = MeshLayout(mesh, tuple(range(world_size)), tuple(data.draw(split) for _ in mesh))
        leaves.append(
            leaf(f"t{number}", shape, data.draw(st.sampled_from([None, layout])), data.draw(st.sampled_from([4, 8])))
        )
    plan = ShardedPlan.of(leaves)
    covers_once(leaves, [plan.boxes_of_rank(rank) for rank in range(world_size)])


def test_what_the_most_ranks_will_read_comes_first_in_a_file() -> None:
    """Else a rank that wants all the small tensors of a file would have to read the large ones between them."""
    leaves = []
    for number in range(3):
        leaves.append(leaf(f"{number}.large", (8, 4), rows(4)))
        leaves.append(leaf(f"{number}.norm", (8,), rows(4, copies=2)))
        leaves.append(leaf(f"{number}.step", (1,), None))
    kinds = [chunk.key.partition(".")[2] for chunk in ShardedPlan.of(leaves).boxes_of_rank(0)]
    assert kinds == sorted(kinds, key=["step", "norm", "large"].index) and set(kinds) == {"step", "norm", "large"}


def test_a_rank_may_hold_a_dict_in_another_order() -> None:
    leaves = [leaf(f"t{i}", (i * 37 % 40, 3), rows(8, copies=2)) for i in range(20)]
    plan = ShardedPlan.of(leaves)
    for seed in range(3):
        shuffled = leaves[:]
        random.Random(seed).shuffle(shuffled)
        other = ShardedPlan.of(shuffled)
        assert other.digest == plan.digest
        assert all(other.boxes_of_rank(rank) == plan.boxes_of_rank(rank) for rank in range(8))


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("kind", ["many", "skewed", "two kinds"])
def test_replicas_share_the_writing_by_bytes(copies: int, kind: str) -> None:
    chance = random.Random(copies)
    sizes = {"many": [chance.randint(10, 2000) for _ in range(100)], "skewed": [500, *[9] * 800]}.get(kind, [64] * 100)
    leaves = [leaf(f"t{i}", (8 * rows_, 8), rows(8, copies=copies)) for i, rows_ in enumerate(sizes)]
    if kind == "two kinds":  # of one mesh, divided along different dimensions: their replicas are the same ranks
        leaves = [
            leaf(f"{dim}-{i}", (64 * size, 64), MeshLayout((copies, 8 // copies), tuple(range(8)), (None, Split(dim))))
            for dim, count, size in ((0, 1, 64), (1, 64 * (copies - 1), 1))
            for i in range(count)
        ]
    plan = ShardedPlan.of(leaves)
    loads = [sum(chunk.nbytes for chunk in plan.boxes_of_rank(rank)) for rank in range(8)]
    assert max(loads) / (sum(loads) / 8) <= 1.2, loads


def test_plain_tensors_are_written_whole_by_rank_0() -> None:
    plan = ShardedPlan.of([leaf("a", (1000, 9), None), leaf("b", (), None), leaf("w", (8, 2), rows(4))])
    assert [(chunk.key, chunk.whole) for chunk in plan.boxes_of_rank(0)] == [("a", True), ("b", True), ("w", False)]
    assert all([chunk.key for chunk in plan.boxes_of_rank(rank)] == ["w"] for rank in (1, 2, 3))


def test_the_digest_tells_structures_apart() -> None:
    base = [leaf("w", (10, 4), rows(4)), leaf("v", (1,), None)]
    others = [
        [leaf("w", (11, 4), rows(4)), base[1]],
        [leaf("x", (10, 4), rows(4)), base[1]],
        [leaf("w", (10, 4), rows(4), itemsize=8), base[1]],
        [leaf("w", (10, 4), rows(4, copies=2)), base[1]],
        [leaf("w", (10, 4), None), base[1]],
        [leaf("w", (10, 4), MeshLayout((1, 4), (0, 1, 3, 2), (None, Split(0)))), base[1]],
        [base[0]],
        [*base, leaf("u", (1,), None)],
    ]
    digests = [ShardedPlan.of(leaves).digest for leaves in (base, *others)]
    assert len(set(digests)) == len(digests) and digests[0] == ShardedPlan.of(base[::-1]).digest


@SETTINGS
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 6), st.data())
def test_reads_fill_every_element(count: int, columns: int, world_size: int, data: st.DataObject) -> None:
    whole = torch.arange(count * columns, dtype=torch.float32).view(count, columns)
    plan = ShardedPlan.of([leaf("w", (count, columns), rows(world_size))])
    stored = [chunk for rank in range(world_size) for chunk in plan.boxes_of_rank(rank)]
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
    plan = ShardedPlan.of([leaf("w", (40, 4), rows(2))])
    stored = [*plan.boxes_of_rank(0), *plan.boxes_of_rank(1)]
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
