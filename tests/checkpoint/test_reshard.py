"""Saved by N ranks, loaded by M: bit for bit the same, into given tensors or new ones; DTensors at other placements."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensor

from resiliency.checkpoint import shard_plan
from resiliency.checkpoint.checkpointer import Restored
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.read_plan import Read
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.state.tree import dtype_from_name
from resiliency.storage.shard_file import Chunk
from resiliency.testing.checkpoints import QUICK, differences, make_checkpointer, make_state, run_ranks
from tests.ports import free_port

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


def _rank(rank: int, port: int, directory: str, work: str, errors: Any) -> None:
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=40))
        try:
            globals()[work](rank, directory)
            torch.distributed.barrier()  # rank 0 holds the store; what happens when it leaves first is tested elsewhere
        finally:
            torch.distributed.destroy_process_group()
    except BaseException:  # Boundary: the parent reports it.
        errors.put(f"rank {rank}: {traceback.format_exc()}")


def _two(work: str, directory: Path) -> None:
    port = free_port()
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, str(directory), work, errors)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(60)
        late = [process.pid for process in ranks if process.is_alive()]
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
            process.close()
    problems = []
    while not errors.empty():
        problems.append(errors.get())
    errors.close()
    assert not problems, "\n".join(problems)
    assert not late, "a rank did not end within a minute"


WHOLE = {
    "even": torch.arange(64 * 8, dtype=torch.float32).view(64, 8),
    "uneven": torch.arange(7 * 5, dtype=torch.float64).view(7, 5),
    "one row": torch.arange(40.0).view(1, 40),
    "plain": torch.arange(3000),
}


def _dtensors(placement: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
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
    from resiliency.errors import ConfigError

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
    from resiliency.errors import ConfigError

    state = _dtensors(dtensor.Shard(0))
    state["plain"] = torch.zeros(3000 + rank)
    with make_checkpointer_of(directory) as checkpointer:
        with pytest.raises(ConfigError, match="m/plain"):
            checkpointer.save(1, {"m": state})
        # Nobody is left waiting in a half-done talk: the next save works.
        ticket = checkpointer.save(2, {"m": {**state, "plain": torch.zeros(3000)}})
        assert ticket is not None
        ticket.wait(timeout=SOON)


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
    _two("_save_sharded", tmp_path)
    restored = _alone(tmp_path)
    assert restored.step == 2
    assert differences(restored.state["m"], {**WHOLE, "even": WHOLE["even"] + 1000}) == []
    _two("_load_elsewhere", tmp_path)


def test_replicated_dtensors_are_restored_whole(tmp_path: Path) -> None:
    _two("_save_replicated", tmp_path)
    assert differences(_alone(tmp_path).state["m"], WHOLE) == []


def test_of_a_sharded_state_a_tensor_that_is_also_a_key_or_in_an_object_comes_back_there_too(tmp_path: Path) -> None:
    _two("_save_and_load_hidden", tmp_path)


def test_of_a_sharded_state_tied_tensors_are_loaded_into_tied_and_untied_ones(tmp_path: Path) -> None:
    _two("_save_tied_load_untied", tmp_path)


def test_sharded_structures_that_differ_are_refused_on_every_rank(tmp_path: Path) -> None:
    _two("_save_different", tmp_path)


def test_plans_of_torch_dcp_are_written_and_read(tmp_path: Path) -> None:
    _two("_save_dcp_plan", tmp_path)
    restored = _alone(tmp_path)
    assert differences({key: restored.state[f"m.{key}"] for key in WHOLE}, WHOLE) == []
    assert all(isinstance(value, bytes) for key, value in restored.state.items() if not key.startswith("m."))
    _two("_load_dcp_plan", tmp_path)
