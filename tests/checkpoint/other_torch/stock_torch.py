"""Writes and reads a sharded checkpoint with torch alone, whichever version runs this file; nothing of the library is
imported.

``python stock_torch.py write FOLDER`` writes the state with ``dcp.save`` on two ranks, ``python stock_torch.py read
FOLDER [RANKS]`` loads it with ``dcp.load`` into other layouts and compares every value.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WHOLE = {
    "model.uneven": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "model.columns": torch.arange(24, dtype=torch.float64).reshape(4, 6),
    "model.bf16": torch.arange(18, dtype=torch.bfloat16).reshape(6, 3),
    "model.short": torch.tensor([1.5]),  # the second rank has none of it
    "model.buffer": torch.arange(3),
    "model.flag": torch.tensor(True),
}
PLACEMENTS: dict[str, Any] = {
    "model.uneven": Shard(0),
    "model.columns": Shard(1),
    "model.bf16": Shard(0),
    "model.short": Shard(0),
}
OTHER_PLACEMENTS: dict[str, Any] = {"model.uneven": Shard(1), "model.columns": Replicate(), "model.bf16": Shard(1)}
OBJECTS = {"optim.step": 12, "optim.name": "adam", "lr": 0.125, "betas": (0.5, 0.25)}


def _state(placements: dict[str, Any], *, blank: bool, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {}
    for key, value in WHOLE.items():
        value = torch.zeros_like(value) if blank else value.clone()
        state[key] = distribute_tensor(value, mesh, [placements[key]]) if key in placements else value
    return {**state, **(dict.fromkeys(OBJECTS) if blank else OBJECTS)}


def _run(rank: int, ranks: int, what: str, folder: str, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    if what == "write":
        dcp.save(_state(PLACEMENTS, blank=False, ranks=ranks), checkpoint_id=folder)
    else:
        state = _state(OTHER_PLACEMENTS, blank=True, ranks=ranks)
        dcp.load(state, checkpoint_id=folder)
        for key, value in WHOLE.items():
            found = state[key].full_tensor() if isinstance(state[key], DTensor) else state[key]
            assert torch.equal(found, value), (key, found)
        assert {key: state[key] for key in OBJECTS} == OBJECTS, state
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    what, folder = sys.argv[1:3]
    ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    rendezvous = f"{os.path.abspath(folder)}.rendezvous"
    mp.spawn(_run, (ranks, what, folder, rendezvous), nprocs=ranks)
    if os.path.exists(rendezvous):
        os.remove(rendezvous)
    print(f"torch {torch.__version__}: {what} done")
