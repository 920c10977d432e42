"""What a layout says a rank holds is what torch puts there, and all ranks of a copy together hold every element once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from resiliency.errors import ConfigError
from resiliency.state.layouts import MeshLayout, Split
from resiliency.state.leaf_kinds import box_of
from resiliency.state.meshes import mesh_layout, splits_of

SETTINGS = settings(deadline=None, database=None, max_examples=300, suppress_health_check=list(HealthCheck))

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def placements_of(data: st.DataObject, shape: Sequence[int], mesh: Sequence[int]) -> tuple[Any, ...]:
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 3))
    one = st.one_of(st.just(Replicate()), dims.map(Shard), strided)
    return tuple(data.draw(one) for _ in mesh)


def held_by_torch(
    whole: torch.Tensor, mesh: Sequence[int], placements: Sequence[Any], at: Sequence[int]
) -> torch.Tensor:
    """What torch leaves of a tensor at one coordinate of a mesh."""
    for size, placement, index in zip(mesh, placements, at, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, size, with_padding=False)[0][index]
    return whole


@SETTINGS
@given(shapes, meshes, st.data())
def test_a_rank_holds_what_torch_gives_it(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    placements = placements_of(data, shape, mesh)
    ranks = tuple(data.draw(st.permutations(range(math.prod(mesh)))))
    layout = MeshLayout(mesh, ranks, splits_of(placements, len(shape)))
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank, at in zip(ranks, itertools.product(*map(range, mesh)), strict=True):
        local = held_by_torch(whole, mesh, placements, at)
        pieces = layout.pieces(shape, rank)
        assert [piece.box for piece in pieces] == list(layout.boxes(shape, rank))
        assert sum(math.prod(piece.box.sizes) for piece in pieces) == local.numel()
        for box, place in pieces if local.numel() else ():
            assert torch.equal(box_of(whole, *box), box_of(local, place, box.sizes))


@SETTINGS
@given(shapes, meshes, st.data())
def test_the_ranks_of_a_copy_hold_every_element_once(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    layout = MeshLayout(mesh, tuple(range(math.prod(mesh))), splits_of(placements_of(data, shape, mesh), len(shape)))
    for copy in range(layout.copies):
        counts, boxes = torch.zeros(shape, dtype=torch.int), 0
        for rank in layout.ranks:
            if layout.copy_of(rank) == copy:
                held = layout.boxes(shape, rank)
                boxes += len(held)
                for box in held:
                    box_of(counts, *box).add_(1)
        assert bool((counts == 1).all())
        assert boxes >= 1, "nobody would store a tensor without elements"


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    layout = MeshLayout((2,), (4, 6), (Split(0),))
    assert layout.copy_of(5) is None and layout.boxes((8,), 5) == ()
    assert layout.boxes((8,), 6) == (((4,), (4,)),)


def test_layouts_of_different_meshes_or_placements_have_different_digests() -> None:
    layouts = [
        MeshLayout((4,), (0, 1, 2, 3), (Split(0),)),
        MeshLayout((4,), (0, 2, 1, 3), (Split(0),)),
        MeshLayout((4,), (0, 1, 2, 3), (Split(1),)),
        MeshLayout((4,), (0, 1, 2, 3), (Split(0, 2),)),
        MeshLayout((2, 2), (0, 1, 2, 3), (Split(0), Split(0))),
        MeshLayout((2, 2), (0, 1, 2, 3), (None, Split(0))),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert MeshLayout((4,), (0, 1, 2, 3), (Split(0),)).digest == layouts[0].digest


class Mesh:
    """As torch's DeviceMesh; ``root`` is what it was sliced from."""

    def __init__(self, ranks: Any, root: Any = None) -> None:
        self.mesh = torch.tensor(ranks)
        self._root = self if root is None else Mesh(root)

    def _get_root_mesh(self) -> Mesh:
        return self._root


def test_a_tensor_on_a_submesh_is_replicated_over_the_rest_of_the_mesh() -> None:
    """Every rank sees another submesh; the layouts are equal nevertheless."""
    root = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    seen = [mesh_layout(Mesh(tp, root), (Shard(0),), 2) for plane in root for tp in plane]
    assert len({layout.digest for layout in seen}) == 1
    assert seen[0].copies == 6 and [seen[0].copy_of(rank) for rank in (0, 1, 2, 11)] == [0, 0, 1, 5]
    assert seen[0].boxes((4, 4), 11) == (((2, 0), (2, 4)),)
    columns = [
        mesh_layout(Mesh([plane[i][k] for i in range(3)], root), (Shard(0),), 1) for plane in root for k in (0, 1)
    ]
    assert len({layout.digest for layout in columns}) == 1 and columns[0].copies == 4
    flat = [mesh_layout(Mesh([rank for pair in plane for rank in pair], root), (Shard(0),), 1) for plane in root]
    assert len({layout.digest for layout in flat}) == 1 and flat[1].boxes((6,), 10) == (((4,), (1,)),)


def test_a_placement_that_is_not_known_is_refused() -> None:
    class Ragged:
        def is_replicate(self) -> bool:
            return False

    with pytest.raises(ConfigError, match="cannot be stored"):
        splits_of((Ragged(),), 1)
