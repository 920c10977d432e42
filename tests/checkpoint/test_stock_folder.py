"""The folder of a sharded step is a stock distributed checkpoint: torch alone loads it, and we check every byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensor

from resiliency import faultpoints
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import RemoteTierOptions
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.errors import ConfigError
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import QUICK, RUN, differences, make_checkpointer, step_dirs
from tests.checkpoint.gloo_ranks import run_gloo

SOON = timedelta(seconds=30)
SHARDS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64", "float64")
SHAPES = {"even": (16, 8), "uneven": (5, 3), "one row": (1, 7), "vector": (6,), "nothing": (0, 4)}


def _values(shape: Sequence[int], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(dtype))
    return torch.randint(0, 100, tuple(shape), generator=generator).to(getattr(torch, dtype))


def whole(number: int = 0) -> dict[str, Any]:
    """The state as one process has it."""
    model = {f"{name} {dtype}": _values(shape, dtype) for dtype in SHARDS for name, shape in SHAPES.items()}
    tied = _values((4, 4), "float32") + number
    return {
        "model": {**model, "tied": tied, "tied.too": tied, "plain": torch.arange(5), "scalar": torch.tensor(2.5)},
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": _values((9, 2), "float32")}},
            "param_groups": [{"lr": 0.1 + number, "params": [0, 1]}, {"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "list": [torch.arange(3), {"deep": torch.ones(2)}, 7],
        "epoch": number,
        "text": "x" * (1 + number),
    }


def _cut(tensor: torch.Tensor, mesh: Any, *placements: Any) -> torch.Tensor:
    # Each rank cuts its own copy: gloo cannot send every dtype.
    return dtensor.distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _distributed(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh

    world_size = torch.distributed.get_world_size()
    rows, columns = dtensor.Shard(0), dtensor.Shard(tensor.dim() - 1)
    if layout in ("rows", "columns"):
        return _cut(tensor, init_device_mesh("cpu", (world_size,)), columns if layout == "columns" else rows)
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "inner"))
    if layout == "hybrid":
        return _cut(tensor, mesh, dtensor.Replicate(), rows)
    if layout == "grid":
        return _cut(tensor, mesh, rows, columns)
    # What FSDP2 makes of tensor parallelism: rows are first cut by the inner dimension, then by the outer one.
    cut = _cut(tensor, mesh["inner"], rows).to_local().chunk(2)
    mine = cut[mesh.get_coordinate()[0]].contiguous()
    placements = [dtensor.placement_types._StridedShard(0, split_factor=world_size // 2), rows]
    return dtensor.DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def sharded(state: dict[str, Any], layout: str) -> dict[str, Any]:
    """The state as each rank has it."""
    names = [
        name for name, value in state["model"].items() if value.dim() and name not in ("plain", "tied", "tied.too")
    ]
    if layout == "strided":
        names = [name for name in names if name.startswith("even")]
    model = {**state["model"], **{name: _distributed(state["model"][name], layout) for name in names}}
    model["tied"] = model["tied.too"] = _distributed(state["model"]["tied"], layout)
    slots = state["optim"]["state"][0]
    moments = slots["exp_avg"] if layout == "strided" else _distributed(slots["exp_avg"], layout)
    return {**state, "model": model, "optim": {**state["optim"], "state": {0: {**slots, "exp_avg": moments}}}}


def checkpointer_of(directory: str) -> Checkpointer:
    return Checkpointer(directory, run=RUN, options=QUICK)


def _save(rank: int, directory: str, layout: str) -> None:
    with checkpointer_of(directory) as checkpointer:
        for number in (0, 1):  # of the second one what follows from the structure is known already
            state = sharded(whole(number), layout)
            beside = {"meta.pt": {"epoch": number, "rank": rank, "loops": {"a": torch.ones(2)}}}
            ticket = checkpointer.save(number, state, names=[f"step={number}.ckpt"], beside=beside)
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)


READER = """
import pickle, sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

flat, *pairs = sys.argv[1:]

def alike(one, other):
    if isinstance(one, dict):
        return sorted(map(str, one)) == sorted(map(str, other)) and all(
            alike(one[key], other[key] if key in other else other[str(key)]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    return one == other

def emptied(value):
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

for folder, wanted_at in zip(pairs[::2], pairs[1::2]):
    wanted = torch.load(wanted_at, weights_only=True)
    found = emptied(wanted)
    found["optim"]["param_groups"] = wanted["optim"]["param_groups"]  # as an optimizer's state dict has them
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert alike(wanted, found), found
    dcp_to_torch_save(folder, flat)
    assert alike(wanted, torch.load(flat, weights_only=True))
    meta = torch.load(folder + "/meta.pt", weights_only=True)
    assert meta["epoch"] == wanted["epoch"] and meta["rank"] == 0 and meta["loops"]["a"].equal(torch.ones(2))
assert not any(name.startswith("resiliency") for name in sys.modules)
"""


def read_by_stock(tmp_path: Path, wanted: dict[Path, Any]) -> None:
    """Compares each folder with what it is to hold, in a process that never imports this library."""
    pairs = []
    for number, (folder, state) in enumerate(wanted.items()):
        torch.save(state, tmp_path / f"wanted-{number}.pt")
        pairs += [str(folder), str(tmp_path / f"wanted-{number}.pt")]
    command = [sys.executable, "-W", "ignore", "-c", READER, str(tmp_path / "flat.pt"), *pairs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(3, "rows"), (2, "columns"), (4, "hybrid"), (4, "grid"), (4, "strided")],
)
def test_torch_alone_loads_what_ranks_have_saved(tmp_path: Path, world_size: int, layout: str) -> None:
    run_gloo(world_size, _save, str(tmp_path / "c"), layout)
    for number in (0, 1):
        name = tmp_path / "c" / f"step={number}.ckpt"
        shards = [f"__{rank}_0.distcp" for rank in range(world_size)]
        assert sorted(os.listdir(name)) == sorted([".metadata", "manifest.json", "meta.pt", *shards])
        step = next(path for id, path in step_dirs(tmp_path / "c").items() if id.step == number)
        assert all(os.path.samefile(name / file, step / file) for file in os.listdir(name)), "bytes are stored twice"
    read_by_stock(tmp_path, {tmp_path / "c" / f"step={number}.ckpt": whole(number) for number in (0, 1)})
    with make_checkpointer(tmp_path / "c") as checkpointer:
        restored = checkpointer.load()
    assert restored is not None and differences(restored.state, whole(1)) == []


def test_each_box_is_stored_once(tmp_path: Path) -> None:
    run_gloo(4, _save, str(tmp_path / "c"), "hybrid")
    state = whole()
    tensors = [*state["model"].values(), *state["optim"]["state"][0].values(), torch.arange(3), torch.ones(2)]
    data = sum(tensor.nbytes for tensor in tensors) - state["model"]["tied"].nbytes
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "c" / "step=0.ckpt").read_metadata()
    boxes = [info for index, info in metadata.storage_data.items() if index.offset is not None]
    places = {(info.relative_path, info.offset): info.length for info in boxes}
    assert len(places) < len(boxes), "tied tensors have one place"
    overhead = (sum(places.values()) - data) / len(places)
    assert 0 < overhead < 1200, "a box is not stored once, or what describes it has grown"


def test_a_write_plan_is_loaded_by_the_paths_that_its_keys_are(tmp_path: Path) -> None:
    rows = torch.arange(12.0).view(4, 3)
    with make_checkpointer(tmp_path / "c") as checkpointer:
        chunks = [WriteChunk(key="a/b.c", tensor=rows[i : i + 2], offsets=(i, 0), shape=(4, 3)) for i in (0, 2)]
        plan = WritePlan(chunks=[*chunks, WriteChunk(key="d%2Fe", tensor=torch.ones(2))], objects={"n": {"m": 1}})
        checkpointer.save(1, plan, names=["x.ckpt"])
    found: dict[str, Any] = {"a": {"b.c": torch.zeros(4, 3)}, "d/e": torch.zeros(2), "n": {"m": None}}
    torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "c" / "x.ckpt", no_dist=True)
    assert torch.equal(found["a"]["b.c"], rows) and torch.equal(found["d/e"], torch.ones(2)) and found["n"] == {"m": 1}


def _plan(**objects: Any) -> WritePlan:
    return WritePlan(chunks=[WriteChunk(key="w", tensor=torch.arange(6.0))], objects=objects)


def test_a_step_that_is_not_committed_is_no_stock_checkpoint(tmp_path: Path) -> None:
    for number, point in enumerate(("agent.record.write", "agent.manifest.write")):
        directory = tmp_path / str(number)
        with make_checkpointer(directory) as checkpointer:
            faultpoints.arm(f"{point}:error")
            try:
                checkpointer.save(1, _plan(), names=["x.ckpt"])
                checkpointer.flush()
            finally:
                faultpoints.arm("")
            assert checkpointer.poll()
        assert not list(directory.rglob(".metadata"))


def test_what_an_agent_was_killed_before_is_done_by_the_next(tmp_path: Path) -> None:
    """The manifest was written, and nothing after it."""
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, _plan(), names=["x.ckpt"])
    (step,) = step_dirs(tmp_path).values()
    (step / ".metadata").unlink()
    (tmp_path / "x.ckpt" / ".metadata").unlink()
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.warm_up(nbytes=1)  # starts the agent
    found = {"w": torch.zeros(6)}
    torch.distributed.checkpoint.load(found, checkpoint_id=step, no_dist=True)
    assert torch.equal(found["w"], torch.arange(6.0))


def test_a_moved_name_is_a_stock_checkpoint_of_the_new_step_and_a_deleted_one_is_gone(tmp_path: Path) -> None:
    stock = {"w": torch.zeros(6), "old": torch.ones(3)}
    torch.distributed.checkpoint.save(stock, checkpoint_id=tmp_path / "last.ckpt", no_dist=True)
    with make_checkpointer(tmp_path) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, _plan(step=number), names=["last.ckpt"], supersedes=["x.ckpt"])
            found: dict[str, Any] = {"w": torch.zeros(6), "step": 0}
            checkpointer.flush()
            torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "last.ckpt", no_dist=True)
            assert found["step"] == number and torch.equal(found["w"], torch.arange(6.0))
        checkpointer.save(3, _plan(step=3), names=["x.ckpt"], supersedes=["last.ckpt"])
        checkpointer.flush(Stage.DURABLE)
    assert not (tmp_path / "last.ckpt").exists()
    assert [step.step for step in step_dirs(tmp_path)] == [3]


def test_a_state_that_torch_cannot_flatten_is_saved_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        for number in (1, 2):
            plan = WritePlan(chunks=[WriteChunk(key=key, tensor=torch.ones(2)) for key in ("a.b", "a/b")])
            checkpointer.save(number, plan)
            checkpointer.flush()
        restored = checkpointer.load()
    assert restored is not None and restored.step == 2
    assert not list(tmp_path.rglob(".metadata"))
    warned = [record for record in caplog.records if "torch.distributed.checkpoint cannot load" in record.getMessage()]
    assert [record.levelname for record in warned].count("WARNING") == 1


def test_only_files_of_the_callers_own_may_lie_beside_the_shards_of_a_sharded_state(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        for file in (".metadata", "manifest.json", "__0_0.distcp", "a/b"):
            with pytest.raises(ConfigError, match="beside="):
                checkpointer.save(1, _plan(), beside={file: {}})
        with pytest.raises(ConfigError, match="beside="):
            checkpointer.save(1, {"w": torch.ones(2)}, beside={"meta.pt": {}})


def test_on_a_remote_tier_it_is_one_too(tmp_path: Path) -> None:
    remotes = [RemoteTierOptions(address=str(tmp_path / "remote"), keep=1, keep_named=False)]
    with make_checkpointer(tmp_path / "local", remotes=remotes) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, _plan(), names=[f"{number}.ckpt"], beside={"meta.pt": {"step": number}})
            checkpointer.flush(Stage.DURABLE)
    (step,) = step_dirs(tmp_path / "remote").values()
    for folder in (step, tmp_path / "remote" / "2.ckpt"):
        found = {"w": torch.zeros(6)}
        torch.distributed.checkpoint.load(found, checkpoint_id=folder, no_dist=True)
        assert torch.equal(found["w"], torch.arange(6.0))
        assert torch.load(folder / "meta.pt", weights_only=True) == {"step": 2}
    assert not (tmp_path / "remote" / "1.ckpt").exists(), "files are left of a deleted step"
