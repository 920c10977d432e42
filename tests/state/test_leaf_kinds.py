"""A framework's own tensors are saved and filled once one class says what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.errors import ConfigError
from resiliency.state.layouts import Box, MeshLayout, Split
from resiliency.state.leaf_kinds import LeafDescription, box_of, kind_of, register_leaf_kind
from resiliency.state.tree import keyed_leaves
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import differences, make_checkpointer, run_ranks


@dataclass
class Piece:
    """As Megatron's ShardedTensor: no tensor itself; local data, and where it lies in the whole."""

    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    layout: MeshLayout


class PieceKind:
    name = "piece"
    replicated = False

    def takes(self, class_: type) -> bool:
        return class_ is Piece

    def detach(self, leaf: Any, key: str) -> Any:
        return Piece(leaf.data.detach(), leaf.shape, leaf.offset, leaf.layout)

    def describe(self, leaf: Any) -> LeafDescription:
        box = Box(leaf.offset, tuple(leaf.data.shape))
        return LeafDescription(shape=leaf.shape, dtype=leaf.data.dtype, boxes=(box,), layout=leaf.layout)

    def structure(self, leaf: Any) -> Any:
        return leaf.shape, leaf.offset, leaf.data.shape, leaf.data.dtype, leaf.data.device

    def local(self, leaf: Any, box: Box) -> torch.Tensor:
        return box_of(leaf.data, [a - b for a, b in zip(box.offsets, leaf.offset, strict=True)], box.sizes)


@pytest.fixture
def piece_kind() -> Iterator[None]:
    remove = register_leaf_kind(PieceKind())
    yield
    remove()


WHOLE = torch.arange(120 * 7, dtype=torch.float32).view(120, 7)


def cut(rank: int, ranks: int, *, dim: int = 0, fill: float | None = None) -> Piece:
    part = torch.tensor_split(WHOLE, ranks, dim)[rank]
    first = sum(piece.shape[dim] for piece in torch.tensor_split(WHOLE, ranks, dim)[:rank])
    data = part.clone().contiguous() if fill is None else torch.full_like(part, fill).contiguous()
    layout = MeshLayout((ranks,), tuple(range(ranks)), (Split(dim),))
    return Piece(data, tuple(WHOLE.shape), (first, 0) if dim == 0 else (0, first), layout)


@pytest.mark.usefixtures("piece_kind")
def test_pieces_are_written_by_the_ranks_that_hold_them_and_filled_at_any_other_cut(tmp_path: Path) -> None:
    plain = torch.arange(5000)

    def save(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            for step in (1, 2):
                piece = cut(rank, 2)
                piece.data += step
                ticket = checkpointer.save(step, {"m": {"w": piece, "plain": plain}, "epoch": 3}, lazy=True)
                assert ticket is not None
                checkpointer.fence()
                piece.data.fill_(-9)
                ticket.wait(Stage.DURABLE)

    run_ranks(2, save)
    for ranks, dim in ((1, 0), (3, 0), (2, 1)):

        def load(rank: int, coordinator: Coordinator, ranks: int = ranks, dim: int = dim) -> None:
            into = {"m": {"w": cut(rank, ranks, dim=dim, fill=-1), "plain": torch.zeros(5000, dtype=torch.int64)}}
            with make_checkpointer(tmp_path, coordinator) as checkpointer:
                restored = checkpointer.load(into=into)
            assert restored is not None and restored.state["epoch"] == 3
            assert torch.equal(into["m"]["w"].data, cut(rank, ranks, dim=dim).data + 2)
            assert torch.equal(into["m"]["plain"], plain)

        run_ranks(ranks, load)
    with make_checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None
    assert differences(restored.state["m"], {"w": WHOLE + 2, "plain": plain}) == []


@pytest.mark.usefixtures("piece_kind")
def test_a_part_of_a_tensor_is_no_per_rank_tensor(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="per_rank holds tensor 'w'"):
        checkpointer.save(1, {}, per_rank={"w": cut(0, 2)})


@pytest.mark.usefixtures("piece_kind")
def test_a_kind_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="'piece' is registered already"):
        register_leaf_kind(PieceKind())
    assert kind_of(cut(0, 1)).name == "piece"


def test_a_kind_that_is_removed_is_gone() -> None:
    register_leaf_kind(PieceKind())()
    with pytest.raises(ConfigError, match="Piece is no tensor of a registered kind"):
        kind_of(cut(0, 1))


def test_a_newer_kind_is_asked_first() -> None:
    class Mine(PieceKind):
        name = "mine"

    undo = [register_leaf_kind(PieceKind()), register_leaf_kind(Mine())]
    try:
        assert kind_of(cut(0, 1)).name == "mine" and kind_of(torch.zeros(1)).name == "tensor"
    finally:
        for remove in undo:
            remove()


class Weight(torch.nn.Parameter):
    pass


class Labelled(torch.Tensor):
    pass


def test_subclasses_of_tensors_are_plain() -> None:
    weight, labelled = Weight(torch.ones(3)), torch.ones(2).as_subclass(Labelled)
    found = keyed_leaves({"a": weight, "b": {"c": weight}, "d": [labelled, labelled]})
    assert list(found) == ["a", "b/c", "d/0", "d/1"]
    assert all(kind_of(leaf).name == "tensor" for leaf in found.values())
