"""Saved by N ranks, loaded by M: bit for bit the same, into given tensors or new ones; DTensors at other placements."""

from __future__ import annotations

import gc
import io
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensor
from torch.distributed.tensor.placement_types import _StridedShard

from resiliency.checkpoint import shard_plan
from resiliency.checkpoint.checkpointer import Restored
from resiliency.checkpoint.coordinator import Coordinator, SoloCoordinator
from resiliency.checkpoint.read_plan import Read
from resiliency.checkpoint.shard_plan import Agree, HostPart, ShardPlanner
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.inspection.by_path import locate
from resiliency.inspection.contents import read_contents
from resiliency.state.tree import dtype_from_name
from resiliency.storage.shard_file import Chunk
from resiliency.testing.checkpoints import QUICK, differences, make_checkpointer, make_state, run_ranks
from tests.checkpoint.gloo_ranks import run_gloo

SOON = timedelta(seconds=30)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """World size -> directory with step 7 of it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_plan, "_MIN_BLOCK", 1024)
        for world_size in (1, 2, 3, 4):
            directory = tmp_path_factory.mktemp(f"world{world_size}") / "c"

            def work(rank: int, coordinator: Coordinator, directory: Path = directory) -> None:
                with make_checkpointer(directory, coordinator) as checkpointer:
                    state = {**make_state(7), "odd": torch.arange(1013 * 3).view(1013, 3)}
                    ticket = checkpointer.save(7, state, per_rank={"rank": rank, "rng": torch.full((9,), rank)})
                    assert ticket is not None
                    ticket.wait(timeout=SOON)

            run_ranks(world_size, work)
            found[world_size] = directory
    return found


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("now", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_checkpoint_loads_in_any_world_size(saved: dict[int, Path], before: int, now: int, into: bool) -> None:
    def work(rank: int, coordinator: Coordinator) -> tuple[Restored | None, Any]:
        target = {**make_state(1), "odd": torch.zeros(1013, 3, dtype=torch.int64)} if into else None
        checkpointer = make_checkpointer(saved[before], coordinator)
        try:
            return checkpointer.load(into=target), target
        finally:
            checkpointer.close(flush=False)

    for rank, (restored, target) in enumerate(run_ranks(now, work)):
        assert restored is not None and restored.step == 7 and restored.world_size == before
        wanted = {**make_state(7), "odd": torch.arange(1013 * 3).view(1013, 3)}
        assert differences(restored.state, wanted) == []
        assert restored.state["model"]["weight"] is restored.state["model"]["tied"]
        if into:
            assert (
                restored.state["model"]["weight"] is target["model"]["weight"]
                or differences(target["model"], wanted["model"]) == []
            )
            assert restored.state["odd"].data_ptr() == target["odd"].data_ptr()
        if rank < before:
            assert differences(restored.per_rank, {"rank": rank, "rng": torch.full((9,), rank)}) == []
        else:
            assert restored.per_rank is None


@pytest.mark.parametrize("before", [2, 4])
def test_every_rank_wrote_its_share(saved: dict[int, Path], before: int) -> None:
    shares, first = [], {}
    for path in saved[before].glob(".resiliency/*/steps/*/shard-*.json"):
        record = json.loads(path.read_text())
        if record["rank"]:
            shares.append(len(record["share"]["digests"]))
        else:
            first = record
    # Of the blocks up to where the shared tensors end; the first rank writes the rest of the file alone.
    shared = -(-first["sections"][0] // first["block_bytes"])
    shares.append(shared - sum(shares))
    assert len(shares) == before and min(shares) > 0 and max(shares) <= min(shares) + 1


def test_into_tensors_with_other_strides(saved: dict[int, Path]) -> None:
    target = {**make_state(1), "odd": torch.zeros(3, 1013, dtype=torch.int64).t()}
    target["model"]["ids"] = torch.zeros(96, 8, dtype=torch.int64)[:, ::2]
    with make_checkpointer(saved[3]) as checkpointer:
        checkpointer.load(into=target)
    assert torch.equal(target["odd"], torch.arange(1013 * 3).view(1013, 3)) and torch.equal(
        target["model"]["ids"], make_state(7)["model"]["ids"]
    )


def test_only_the_keys_asked_for_are_read(saved: dict[int, Path]) -> None:
    with make_checkpointer(saved[2]) as checkpointer:
        restored = checkpointer.load(keys=lambda key: key.startswith("model/"))
    assert restored is not None
    assert differences(restored.state["model"], make_state(7)["model"]) == []
    assert restored.state["odd"].numel() == 0


# ---- DTensors: two processes over gloo


def _together(work: str, directory: Path, *, ranks: int = 2) -> None:
    run_gloo(ranks, globals()[work], str(directory))


WHOLE = {
    "even": torch.arange(64 * 8, dtype=torch.float32).view(64, 8),
    "uneven": torch.arange(7 * 5, dtype=torch.float64).view(7, 5),
    "one row": torch.arange(40.0).view(1, 40),
    "plain": torch.arange(3000),
}


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def _cut(whole: torch.Tensor, mesh: Any, dim: int = 0) -> Any:
    """This rank's part of a tensor, without talking: it may be another tensor on each rank."""
    return dtensor.distribute_tensor(whole.clone(), mesh, [dtensor.Shard(dim)], src_data_rank=None)


def _dtensors(placement: Any) -> dict[str, Any]:
    mesh = _mesh()
    return {
        key: tensor.clone() if key == "plain" else dtensor.distribute_tensor(tensor.clone(), mesh, [placement])
        for key, tensor in WHOLE.items()
    }


def _save_sharded(rank: int, directory: str) -> None:
    with make_checkpointer_of(directory) as checkpointer:
        for step in (1, 2):
            state = _dtensors(dtensor.Shard(0))
            if step == 2:
                state["even"].to_local().add_(1000)
            ticket = checkpointer.save(step, {"m": state}, per_rank={"rank": rank})
            assert ticket is not None
            ticket.wait(timeout=SOON)


def _load_elsewhere(rank: int, directory: str) -> None:
    with make_checkpointer_of(directory) as checkpointer:
        for placement in (dtensor.Shard(0), dtensor.Shard(1), dtensor.Replicate()):
            state = _dtensors(placement)
            for key, tensor in state.items():
                (tensor if key == "plain" else tensor.to_local()).fill_(-1)
            restored = checkpointer.load(into={"m": state})
            assert restored is not None and restored.per_rank == {"rank": rank}
            for key, tensor in state.items():
                got = tensor if key == "plain" else tensor.full_tensor()
                assert torch.equal(got, WHOLE[key] + (1000 if key == "even" else 0)), (key, placement)


def _save_dcp_plan(rank: int, directory: str) -> None:
    """torch DCP's planner says what is written; nothing of it is written by DCP."""
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    state = {"m": _dtensors(dtensor.Shard(0)), "note": {"a": [1, 2]}}
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    local: list[Any] = [None, None]
    torch.distributed.all_gather_object(local, planner.create_local_plan())
    items = planner.finish_plan(planner.create_global_plan(local)[0][rank]).items
    chunks = [
        WriteChunk(
            key=item.index.fqn,
            tensor=planner.resolve_data(item),
            offsets=tuple(item.tensor_data.chunk.offsets),
            shape=tuple(item.tensor_data.size),
        )
        for item in items
        if item.type is not WriteItemType.BYTE_IO
    ]
    objects = {
        item.index.fqn: planner.resolve_data(item).getvalue() for item in items if item.type is WriteItemType.BYTE_IO
    }
    assert bool(objects) is (rank == 0) and chunks
    with make_checkpointer_of(directory) as checkpointer:
        ticket = checkpointer.save(1, WritePlan(chunks=chunks, objects=objects), per_rank={"rank": rank})
        assert ticket is not None
        ticket.wait(timeout=SOON)


def _load_dcp_plan(rank: int, directory: str) -> None:
    """torch DCP's planner says what is read, at another placement."""
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    state = {"m": _dtensors(dtensor.Shard(1))}
    for key, tensor in state["m"].items():
        (tensor if key == "plain" else tensor.to_local()).fill_(-1)

    def reads(stored: Sequence[Chunk]) -> list[Read]:
        known: dict[str, Any] = {}
        for chunk in stored:
            properties = TensorProperties(dtype=dtype_from_name(chunk.dtype))
            entry = known.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(chunk.shape), []))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, Metadata(known), is_coordinator=rank == 0)
        return [
            Read(
                item.storage_index.fqn,
                tuple(item.storage_index.offset),
                tuple(item.storage_offsets),
                tuple(item.lengths),
                planner.resolve_tensor(item),
            )
            for item in planner.create_local_plan().items
        ]

    with make_checkpointer_of(directory) as checkpointer:
        restored = checkpointer.load(reads=reads)
    assert restored is not None and restored.per_rank == {"rank": rank}
    assert torch.load(io.BytesIO(restored.state["note.a"])) == [1, 2]
    for key, tensor in state["m"].items():
        assert torch.equal(tensor if key == "plain" else tensor.full_tensor(), WHOLE[key]), key


def _save_replicated(rank: int, directory: str) -> None:
    with make_checkpointer_of(directory) as checkpointer:
        ticket = checkpointer.save(1, {"m": _dtensors(dtensor.Replicate())})
        assert ticket is not None
        ticket.wait(timeout=SOON)


class _Holder:
    """An object of a class that torch's restricted unpickler does not know."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


def _hidden(tensor: torch.Tensor) -> dict[str, Any]:
    """The tensor, and places for it that no walk through containers finds."""
    attributes: OrderedDict[str, Any] = OrderedDict(a=tensor)
    attributes.__dict__["seen"] = [tensor]
    return {"value": tensor, "key": {tensor: 1}, "within": {(tensor, 1): 2}, "set": {tensor}, "attribute": attributes}


def _found(held: dict[str, Any]) -> list[torch.Tensor]:
    keys = [next(iter(held["key"])), next(iter(held["within"]))[0], *held["set"], held["attribute"].__dict__["seen"][0]]
    return [held["value"], *keys, held["attribute"]["a"], held["object"].held]


def _save_and_load_hidden(rank: int, directory: str) -> None:
    shard = dtensor.Shard(0)
    tensor, sharded = torch.arange(3000.0), _dtensors(shard)
    state = {"m": sharded, "held": {**_hidden(tensor), "object": _Holder(tensor)}}
    with make_checkpointer_of(directory) as checkpointer:
        ticket = checkpointer.save(1, state)
        assert ticket is not None
        ticket.wait(timeout=SOON)
        into = {"m": _dtensors(shard), "held": {"value": torch.zeros(3000), "attribute": {"a": torch.zeros(3000)}}}
        for way in ({"into": into}, {"keys": lambda _: True}):
            restored = checkpointer.load(allow_pickle=True, **way)
            assert restored is not None
            held = restored.state["held"]
            assert all(torch.equal(found, tensor) for found in _found(held))
            assert held["key"][held["value"]] == 1, "the key is another object"
        assert torch.equal(into["held"]["value"], tensor) and torch.equal(into["held"]["attribute"]["a"], tensor)
        # A sharded one cannot be put there: said when it is saved.
        with pytest.raises(ConfigError, match="DTensor 'm/even' is also a key"):
            checkpointer.save(2, {"m": sharded, "key": {sharded["even"]: 1}})


def _save_tied_load_untied(rank: int, directory: str) -> None:
    shard = dtensor.Shard(0)
    state = _dtensors(shard)
    state["tied"], state["tied plain"] = state["even"], [state["plain"]] * 2
    with make_checkpointer_of(directory) as checkpointer:
        ticket = checkpointer.save(1, {"m": state})
        assert ticket is not None
        ticket.wait(timeout=SOON)
        tied, untied = _dtensors(shard), _dtensors(shard)
        tied["tied"], tied["tied plain"] = tied["even"], [tied["plain"]] * 2
        untied["tied"], untied["tied plain"] = _dtensors(shard)["even"], [torch.zeros(3000), torch.zeros(3000)]
        for into in (tied, untied):
            for tensor in (into["even"], into["tied"]):
                tensor.to_local().fill_(-1)
            checkpointer.load(into={"m": into})
            assert torch.equal(into["even"].full_tensor(), WHOLE["even"])
            assert torch.equal(into["tied"].full_tensor(), WHOLE["even"])
            assert all(torch.equal(part, WHOLE["plain"]) for part in (into["plain"], *into["tied plain"]))
        only = checkpointer.load(keys=lambda key: key == "m/tied")
        assert only is not None and torch.equal(only.state["m"]["tied"], WHOLE["even"])


def _save_different(rank: int, directory: str) -> None:
    """Rank 1 changes its state alone, in several ways; no rank waits for another one, and what all save is saved."""
    mesh, even = _mesh(), WHOLE["even"]
    wrong: list[dict[str, Any]] = [
        {"plain": torch.zeros(3000 + rank)},
        {"even": _cut(even, mesh, rank)},
        {"even": _cut(even.to(torch.float64 if rank else torch.float32), mesh)},
        {"more": _cut(even, mesh)} if rank else {},
    ]
    with make_checkpointer_of(directory) as checkpointer:
        good = _dtensors(dtensor.Shard(0))
        for step, odd in enumerate(wrong):
            for number, state in ((2 * step, good), (2 * step + 1, {**good, **odd})):
                ticket = checkpointer.save(number, {"m": state})
                assert ticket is not None
                if state is good:
                    ticket.wait(timeout=SOON)
                    continue
                with pytest.raises(ResiliencyError, match=r"rank 1 others than rank 0"):
                    ticket.wait(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and restored.step == 6 and sorted(restored.state["m"]) == sorted(WHOLE)


def _save_after_changes(rank: int, directory: str) -> None:
    """On all ranks alike; each structure is planned anew, and a former one, too."""
    mesh, even = _mesh(), WHOLE["even"]
    changed = {
        "grown": {"even": _cut(even.repeat(2, 1), mesh)},
        "more": {"more": _cut(even + 5, mesh)},
        "dtype": {"even": _cut(even.to(torch.bfloat16), mesh)},
        "placed": {"even": _cut(even, mesh, 1)},
        "plain": {"plain": torch.arange(7)},
        "as before": {},
    }
    with make_checkpointer_of(directory) as checkpointer:
        for step, (name, new) in enumerate(changed.items()):
            state = {**_dtensors(dtensor.Shard(0)), **new, "name": name}
            ticket = checkpointer.save(step, {"m": state})
            assert ticket is not None
            ticket.wait(timeout=SOON)
            restored = checkpointer.load()
            assert restored is not None and restored.step == step
            wanted = {key: getattr(tensor, "full_tensor", lambda t=tensor: t)() for key, tensor in state.items()}
            assert differences(restored.state["m"], wanted) == [], name


def _save_buffers(rank: int, directory: str) -> None:
    state: dict[str, Any] = {"w": _cut(torch.ones(4, 4), _mesh())}
    state |= {f"buffer{i}": torch.full((1000 * i + 1,), float(rank)) for i in range(6)}
    with make_checkpointer_of(directory) as checkpointer:
        for step, replicated in enumerate([None, lambda tensor: False, lambda tensor: True]):
            ticket = checkpointer.save(step, state, replicated=replicated)
            assert ticket is not None
            ticket.wait(timeout=SOON)
            restored = checkpointer.load()
            assert restored is not None and restored.step == step
            assert [float(value.max()) for key, value in restored.state.items() if key != "w"] == [0.0] * 6


def _save_partial(rank: int, directory: str) -> None:
    state = _dtensors(dtensor.Shard(0))
    partial = dtensor.DTensor.from_local(torch.ones(8, 8), _mesh(), [dtensor.Partial()])
    with make_checkpointer_of(directory) as checkpointer:
        for number in (1, 2):  # as the first structure, and after another one
            with pytest.raises(ConfigError, match=r"'m/sum' is a DTensor with placement P.*redistribute"):
                checkpointer.save(10 * number, {"m": {**state, "sum": partial}})
            ticket = checkpointer.save(10 * number + 1, {"m": state})
            assert ticket is not None
            ticket.wait(timeout=SOON)
        with pytest.raises(ConfigError, match="'m/sum'"):
            checkpointer.load(into={"m": {**state, "sum": partial}})


def _save_on_submeshes(rank: int, directory: str) -> None:
    """Tensor parallel within each pair of ranks, and data parallel over the pairs: every pair has a mesh of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        str(number): dtensor.distribute_tensor(torch.full((6, 4), float(number)), mesh["tp"], [dtensor.Shard(0)])
        for number in range(4)
    }
    with make_checkpointer_of(directory) as checkpointer:
        ticket = checkpointer.save(1, state)
        assert ticket is not None
        ticket.wait(timeout=SOON)
        restored = checkpointer.load()
    assert restored is not None
    assert all(torch.equal(restored.state[str(number)], torch.full((6, 4), float(number))) for number in range(4))


def _plan_often(rank: int, directory: str) -> None:
    """A later save of a structure takes a fraction of the first one's time, and not many times that of plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    agree = Agree(coordinator=SoloCoordinator(), topic="", timeout=SOON)
    mesh = init_device_mesh("cpu", (1,))

    def seconds(planner: ShardPlanner, state: Any) -> float:
        began = time.process_time()
        planner.plan(state, None, host=HostPart(), agree=agree, lazy=True)
        return time.process_time() - began

    sharded = {"m": {f"layer.{i}": _cut(torch.ones(8, 8), mesh) for i in range(600)}, "step": 1}
    plain = {"m": {f"layer.{i}": torch.ones(8, 8) for i in range(600)}, "step": 1}
    gc.disable()  # of one process, which ends
    first = min(seconds(ShardPlanner(rank=0, world_size=1, small_nbytes=0), sharded) for _ in range(5))
    planners = [ShardPlanner(rank=0, world_size=1, small_nbytes=0) for _ in range(2)]
    later = [
        min(seconds(planner, state) for _ in range(20))
        for planner, state in zip(planners, (sharded, plain), strict=True)
    ]
    assert later[0] < first / 3, (first, later)
    assert later[0] < 30 * later[1], (first, later)


# ---- every layout into every other one


ODD = {
    "f32": torch.randn(16, 8),
    "uneven": torch.randn(5, 3),
    "one row": torch.randn(1, 7),
    "vector": torch.randn(5),
    "bf16": torch.randn(6, 10).to(torch.bfloat16),
    "fp8": torch.randn(9, 4).to(torch.float8_e4m3fn),
    "int64": torch.arange(33).view(11, 3),
    "uint8": torch.arange(14, dtype=torch.uint8).view(7, 2),
    "bool": torch.arange(12).view(3, 4) % 3 == 0,
    "step": torch.tensor(3.0),
    "large": torch.randn(300, 100),
    "empty": torch.zeros(0, 4),
}
#: Shape of the mesh, and placements of a tensor with so many dimensions.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[int], list[Any]]]] = {
    "1 dp": ((1,), lambda ndim: [dtensor.Shard(0)]),
    "2 dp": ((2,), lambda ndim: [dtensor.Shard(0)]),
    "2 tp": ((2,), lambda ndim: [dtensor.Shard(ndim - 1)]),
    "4 dp": ((4,), lambda ndim: [dtensor.Shard(0)]),
    "4 strided": ((2, 2), lambda ndim: [_StridedShard(0, split_factor=2), dtensor.Shard(0)]),
    "4 two dimensions": ((2, 2), lambda ndim: [dtensor.Shard(0), dtensor.Shard(ndim - 1)]),
    "4 hsdp": ((2, 2), lambda ndim: [dtensor.Replicate(), dtensor.Shard(0)]),
}


def _place(layout: str, *, value: bool = True) -> dict[str, Any]:
    """The tensors in a layout, "replicated" and "step" whole on every rank."""
    from torch.distributed.device_mesh import init_device_mesh

    shape, placements_of = LAYOUTS[layout]
    mesh, placed = init_device_mesh("cpu", shape), {}
    for key, whole in {**ODD, "replicated": ODD["f32"]}.items():
        placements = placements_of(whole.ndim)
        if not whole.ndim or key == "replicated":
            placements = [dtensor.Replicate()] * len(shape)
        local = whole
        for size, placement, index in zip(shape, placements, mesh.get_coordinate(), strict=True):
            if not placement.is_replicate():
                local = placement._split_tensor(local, size, with_padding=False)[0][index]
        local = local.clone() if value else torch.zeros_like(local)
        placed[key] = dtensor.DTensor.from_local(
            local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return placed


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def _save_layouts(rank: int, directory: str) -> None:
    ranks = torch.distributed.get_world_size()
    for layout in (name for name in LAYOUTS if name.startswith(str(ranks))):
        with make_checkpointer_of(f"{directory}/{layout}") as checkpointer:
            ticket = checkpointer.save(1, {"m": _place(layout)})
            assert ticket is not None
            ticket.wait(timeout=SOON)


def _load_layouts(rank: int, directory: str) -> None:
    ranks = torch.distributed.get_world_size()
    for saved in sorted(os.listdir(directory)):
        with make_checkpointer_of(f"{directory}/{saved}") as checkpointer:
            for layout in (name for name in LAYOUTS if name.startswith(str(ranks))):
                into = _place(layout, value=False)
                checkpointer.load(into={"m": into})
                for key, wanted in _place(layout).items():
                    assert _bits(into[key].to_local()) == _bits(wanted.to_local()), (saved, layout, key)
            restored = checkpointer.load()
            assert restored is not None
            for key, whole in ODD.items():
                assert _bits(restored.state["m"][key]) == _bits(whole), (saved, "plain", key)


def make_checkpointer_of(directory: str) -> Any:
    from resiliency.checkpoint.checkpointer import Checkpointer
    from resiliency.testing.checkpoints import RUN

    return Checkpointer(directory, run=RUN, options=QUICK)


def _alone(directory: Path) -> Restored:
    with make_checkpointer(directory) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None
    return restored


def test_sharded_tensors_at_other_placements_and_in_one_process(tmp_path: Path) -> None:
    _together("_save_sharded", tmp_path)
    restored = _alone(tmp_path)
    assert restored.step == 2
    assert differences(restored.state["m"], {**WHOLE, "even": WHOLE["even"] + 1000}) == []
    _together("_load_elsewhere", tmp_path)


def test_replicated_dtensors_are_restored_whole(tmp_path: Path) -> None:
    _together("_save_replicated", tmp_path)
    assert differences(_alone(tmp_path).state["m"], WHOLE) == []


def test_of_a_sharded_state_a_tensor_that_is_also_a_key_or_in_an_object_comes_back_there_too(tmp_path: Path) -> None:
    _together("_save_and_load_hidden", tmp_path)


def test_of_a_sharded_state_tied_tensors_are_loaded_into_tied_and_untied_ones(tmp_path: Path) -> None:
    _together("_save_tied_load_untied", tmp_path)


def test_sharded_structures_that_differ_are_refused_on_every_rank(tmp_path: Path) -> None:
    _together("_save_different", tmp_path)


def test_a_sharded_structure_that_changes_on_all_ranks_is_saved_whole(tmp_path: Path) -> None:
    _together("_save_after_changes", tmp_path)


def test_plain_tensors_of_a_sharded_state_are_those_of_rank_0(tmp_path: Path) -> None:
    _together("_save_buffers", tmp_path)


def test_partial_sums_are_refused_on_every_rank(tmp_path: Path) -> None:
    _together("_save_partial", tmp_path)


def test_a_sharded_structure_is_laid_out_once(tmp_path: Path) -> None:
    _together("_plan_often", tmp_path, ranks=1)


def test_tensors_on_submeshes_are_written_once(tmp_path: Path) -> None:
    _together("_save_on_submeshes", tmp_path, ranks=4)
    located = locate(str(tmp_path))
    assert located is not None and located.listing.manifest is not None
    written = [
        [
            (placed.chunk.key, placed.chunk.offsets[0])
            for placed in read_contents(located.tier, located.run, record).chunks
        ]
        for record in located.listing.manifest.shards
    ]
    assert sorted(box for boxes in written for box in boxes) == [(str(n), row) for n in range(4) for row in (0, 3)]
    assert [len(boxes) for boxes in written] == [2, 2, 2, 2], "replicas do not share the writing"


def test_plans_of_torch_dcp_are_written_and_read(tmp_path: Path) -> None:
    _together("_save_dcp_plan", tmp_path)
    restored = _alone(tmp_path)
    assert differences({key: restored.state[f"m.{key}"] for key in WHOLE}, WHOLE) == []
    assert all(isinstance(value, bytes) for key, value in restored.state.items() if not key.startswith("m."))
    _together("_load_dcp_plan", tmp_path)


@pytest.mark.long
def test_each_layout_is_loaded_into_each_other_bit_for_bit(tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        _together("_save_layouts", tmp_path, ranks=ranks)
    assert len(list(tmp_path.iterdir())) == len(LAYOUTS)
    for ranks in (1, 2, 4):
        _together("_load_layouts", tmp_path, ranks=ranks)
