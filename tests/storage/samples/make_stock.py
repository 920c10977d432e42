"""Writes a folder as the installed torch writes it: ``python -m tests.storage.samples.make_stock DIR``.

Two ranks, as Lightning's ModelParallelStrategy: sharded and plain tensors, objects, ``meta.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.gloo_ranks import run_gloo


def state() -> dict[str, Any]:
    """What is saved, with whole tensors."""
    weight = torch.arange(24.0).view(6, 4)
    moments = {"net.weight": {"exp_avg": weight * 2, "step": torch.tensor(2.0)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["net.weight", "net.bias"]}]
    model = {"net.weight": weight, "net.bias": torch.ones(3, dtype=torch.bfloat16)}
    return {"state_dict": model, "optimizer_0": {"state": moments, "param_groups": groups}}


def meta() -> dict[str, Any]:
    """What is in the file of Lightning."""
    return {"pytorch-lightning_version": "2.6.6", "global_step": 2, "epoch": 1, "lr_schedulers": [{"last_epoch": 2}]}


def _save(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, tree = init_device_mesh("cpu", (2,)), state()
    moments = tree["optimizer_0"]["state"]["net.weight"]
    tree["state_dict"]["net.weight"] = distribute_tensor(tree["state_dict"]["net.weight"], mesh, [Shard(0)])
    moments["exp_avg"] = distribute_tensor(moments["exp_avg"], mesh, [Shard(1)])
    dcp.save(tree, checkpoint_id=folder)
    if rank == 0:
        torch.save(meta(), Path(folder) / "meta.pt")


if __name__ == "__main__":
    run_gloo(2, _save, sys.argv[1])
