"""One rank of one contender in a training loop. The harness starts torchrun, which starts this:

    torchrun --nproc-per-node R -m benchmarks._loop SPEC_FILE

Each ``2 * segment`` steps end with a save. The ``segment`` steps from there on are the loop with saves, the ``segment``
steps after them the same loop without, so that drift of the machine affects both alike.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Stack(pl.LightningModule):
    """Residual linear layers: with Adam the state is three times the parameters.

    Args:
        mebibytes: size of parameters and Adam's state together, to within one layer.
        width: of each layer.
    """

    def __init__(self, *, mebibytes: int, width: int) -> None:
        super().__init__()
        count = max(1, round(mebibytes * 2**20 / (3 * 4 * width * (width + 1))))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(count)])
        self.state_bytes = sum(parameter.nbytes for parameter in self.parameters()) * 3

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.layers[0], FSDPModule):
            return  # DDP, or called once more
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for layer in self.layers:
            x = x + torch.relu(layer(x)) / len(self.layers)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-5)


class Clock(pl.Callback):
    """Records when each step begins."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.starts.append(time.perf_counter())


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Trains with the contender of the spec; returns the seconds of every step. Collective: yes."""
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(1)
    sharded = spec["strategy"] == "fsdp2"
    # of a sharded state each rank has its part
    model = Stack(mebibytes=spec["mebibytes"] * (spec["ranks"] if sharded else 1), width=spec["width"])
    every = 2 * spec["segment"]
    parts = getattr(importlib.import_module(spec["module"]), spec["attribute"])(Path(spec["folder"]), every)
    # the first save, the measured ones, and one at the very last step that only proves that saving still works
    steps = every * (spec["saves"] + 2)
    rows = torch.rand(spec["batch"] * spec["ranks"] * 4, spec["width"])
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=spec["ranks"],
        strategy=ModelParallelStrategy(spec["ranks"], 1, process_group_backend="gloo")
        if sharded
        else DDPStrategy(process_group_backend="gloo"),
        max_steps=steps,
        max_epochs=-1,
        callbacks=[clock, *parts.callbacks],
        plugins=parts.plugins or None,
        enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in parts.callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=spec["folder"],
    )
    trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=spec["batch"]))
    starts = clock.starts
    dist.barrier()  # rank 0 may still be writing in its teardown
    found = [path for path in Path(spec["folder"]).rglob("*") if path.is_file()]
    events = _events(found)
    if trainer.is_global_zero and parts.callbacks and not any(f"step={steps}" in str(path) for path in found):
        raise AssertionError(
            f"no file of step {steps} was found at the end; saved: {sorted({p.parent.name for p in found})[:5]}"
        )
    restore_s: list[float] = []
    if sharded and parts.restore is not None:
        state = {"model": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"]}
        restore_s = _restores(parts.restore(Path(spec["folder"], "restored"), state))
    return {
        "restore_s": restore_s,
        "disk_bytes": sum(path.stat().st_size for path in found),
        "logged": len(events),
        "missed": events.count("checkpoint_skipped") + events.count("checkpoint_failed"),
        "state_bytes": model.state_bytes,
        "every": every,
        "step_s": [after - before for before, after in zip(starts, starts[1:], strict=False)],
    }


def _restores(load: Callable[[], Any], times: int = 3) -> list[float]:
    """Seconds until all ranks have loaded. Collective: yes."""
    found = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        load()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return found


def _events(files: list[Path]) -> list[str]:
    """Kinds of all events in this library's logs: a skipped save costs little, so that it must be reported."""
    logs = [path.read_text() for path in files if path.suffix == ".jsonl"]
    return [json.loads(line)["event_type"] for log in logs for line in log.splitlines() if line.endswith("}")]


def main(spec_file: str) -> None:
    """Runs one rank; rank 0 writes the result file."""
    spec = json.loads(Path(spec_file).read_text())
    code = 0
    try:
        result = train(spec)
    except ImportError as error:
        traceback.print_exc()
        result = {"unavailable": f"does not import: {error}"}
    except Exception as error:  # boundary: the harness lists the reason, the log keeps the traceback
        traceback.print_exc()
        result, code = {"error": f"{type(error).__name__}: {error}"[:300]}, 1
    if os.environ["RANK"] == "0":
        target = Path(spec["result"])
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.replace(target)
    # exit although writer processes or threads of a contender still run; the harness kills them by their mark
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
