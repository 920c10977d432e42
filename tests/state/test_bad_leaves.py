"""Tensors and plans that cannot be stored are refused before anything is copied from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.read_plan import Read
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.errors import ConfigError
from resiliency.state.layouts import Box, MeshLayout
from resiliency.state.leaf_kinds import LeafDescription, register_leaf_kind
from resiliency.storage.shard_file import Chunk
from resiliency.testing.checkpoints import make_checkpointer, run_ranks
from tests.odd_tensors import Wrapper

FULL = torch.arange(24.0).reshape(6, 4)


def committed(checkpointer: Checkpointer, step: int, state: Any) -> None:
    ticket = checkpointer.save(step, state)
    assert ticket is not None
    ticket.wait()


def test_a_tensor_without_memory_of_its_own_is_stored_as_torch_stores_it(tmp_path: Path) -> None:
    """Copied from address 0 it would end the process; what it wraps is an attribute, which torch stores."""
    inner = torch.arange(float(1 << 16))
    wrapped = {"layer": {"weight": Wrapper(inner)}}
    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, wrapped, per_rank=wrapped, names=["wrapped.ckpt"])
        assert ticket is not None
        ticket.wait()
        restored = checkpointer.load(allow_pickle=True)
        assert restored is not None
        stock = torch.load(tmp_path / "wrapped.ckpt", weights_only=False)
        for tree in (restored.state, restored.per_rank, stock):
            assert type(tree["layer"]["weight"]) is Wrapper and torch.equal(tree["layer"]["weight"].inner, inner)
        committed(checkpointer, 2, {"a": FULL})


def test_a_chunk_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="without memory of its own"):
        WriteChunk(key="x", tensor=Wrapper(torch.zeros(4)))
    with pytest.raises(TypeError, match="key as a str"):
        WriteChunk(key=3, tensor=FULL)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tensor as a torch tensor"):
        WriteChunk(key="x", tensor=[1.0])  # type: ignore[arg-type]


def test_a_plan_with_a_hole_is_refused_by_one_rank_too(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        committed(checkpointer, 1, {"good": FULL})
        with pytest.raises(ConfigError, match="'x' do not make a whole tensor.*12 elements too few"):
            checkpointer.save(2, WritePlan(chunks=[WriteChunk(key="x", tensor=FULL[:3], shape=(6, 4))]))
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1


def test_chunks_may_come_from_an_iterator(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        committed(checkpointer, 1, WritePlan(chunks=(WriteChunk(key=key, tensor=FULL) for key in "ab")))  # type: ignore[arg-type]
        restored = checkpointer.load()
        assert restored is not None and sorted(restored.state) == ["a", "b"]
    with pytest.raises(TypeError, match=r"chunks=\[WriteChunk"):
        WritePlan(chunks=["x"])  # type: ignore[list-item]


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_box_beside_a_full_one_changes_nothing(tmp_path: Path, empty: int) -> None:
    def work(rank: int, coordinator: Coordinator) -> Any:
        rows = FULL[:0] if rank == empty else FULL
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            committed(checkpointer, 1, WritePlan(chunks=[WriteChunk(key="x", tensor=rows, shape=(6, 4))]))
            restored = checkpointer.load()
            assert restored is not None
            return restored.state["x"]

    assert all(torch.equal(found, FULL) for found in run_ranks(2, work))


class Ragged:
    """A leaf of a made-up framework."""

    def __init__(self, tensor: Tensor, given: Tensor) -> None:
        self.tensor, self.given = tensor, given


class WrongKind:
    """Describes one tensor and hands out another."""

    name = "wrong"
    replicated = False

    def takes(self, class_: type) -> bool:
        return class_ is Ragged

    def detach(self, leaf: Any, key: str) -> Any:
        return leaf

    def describe(self, leaf: Any) -> LeafDescription:
        box = Box((0, 0), tuple(leaf.tensor.shape))
        layout = MeshLayout((1,), (0,), (None,))
        return LeafDescription(shape=tuple(leaf.tensor.shape), dtype=leaf.tensor.dtype, boxes=(box,), layout=layout)

    def structure(self, leaf: Any) -> Any:
        return tuple(leaf.tensor.shape)

    def local(self, leaf: Any, box: Box) -> Tensor:
        found: Tensor = leaf.given
        return found


@pytest.mark.parametrize("given", [FULL[:1], FULL.double(), FULL.reshape(4, 6)], ids=["smaller", "dtype", "shape"])
def test_a_leaf_kind_that_hands_out_another_box_is_refused(tmp_path: Path, given: Tensor) -> None:
    """What lies behind it in memory would be stored with a valid digest."""
    remove = register_leaf_kind(WrongKind())
    try:
        with make_checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="leaf kind 'wrong' gave"):
            checkpointer.save(1, {"x": Ragged(FULL, given)})
    finally:
        remove()


@pytest.mark.parametrize("how", ["list offsets", "no destination", "expanded", "meta", "no read"])
def test_reads_that_fail_in_any_way_are_refused_and_no_rank_waits(tmp_path: Path, how: str) -> None:
    def bad(stored: Any) -> Any:
        chunk: Chunk = stored[0]
        target: Any = torch.zeros(6, 4)
        if how == "no read":
            return [3]
        if how == "no destination":
            target = None
        elif how == "expanded":
            target = torch.zeros(1, 1).expand(6, 4)
        elif how == "meta":
            target = torch.zeros(6, 4, device="meta")
        offsets: Any = [0, 0] if how == "list offsets" else chunk.offsets
        return [Read(chunk.key, offsets, (0, 0), (6, 4), target)]

    def work(rank: int, coordinator: Coordinator) -> str:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            committed(checkpointer, 1, {"x": FULL})
            if rank == 1:
                with pytest.raises(ConfigError) as caught:
                    checkpointer.load(reads=bad)
            else:
                checkpointer.load()
            restored = checkpointer.load()  # the ranks are still in step
            assert restored is not None and torch.equal(restored.state["x"], FULL)
            return str(caught.value) if rank == 1 else ""

    assert run_ranks(2, work)[1]
