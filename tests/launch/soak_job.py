"""A training whose weights depend on every step of every rank: ``soak_job.py FOLDER STEPS [--restartable]``.

With 0 steps it ends when ``FOLDER/enough`` is there, and each rank's last step is in ``FOLDER/end-RANK``.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.launch import beat, restartable

__all__ = ["gradient", "weights_after"]

SIZE = 4096


def gradient(weights: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Of one rank. Whole numbers below 2**20, so that sums are exact in every order."""
    return (weights * (rank + 3) + step * 7 + rank).remainder(1021)


def weights_after(steps: int, ranks: int) -> torch.Tensor:
    """Of a run in which nothing happened."""
    weights = torch.arange(SIZE, dtype=torch.float64)
    for step in range(steps):
        weights = (weights + sum(gradient(weights, step, rank) for rank in range(ranks))).remainder(65521)
    return weights


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"pid-{rank}-{attempt}~").write_text(str(os.getpid()))
    os.rename(folder / f"pid-{rank}-{attempt}~", folder / f"pid-{rank}-{attempt}")
    local = LocalTierOptions(directory=str(folder / "checkpoints"))
    with Checkpointer(local, rank=rank, world_size=dist.get_world_size()) as checkpointer:
        restored = checkpointer.load()
        weights = restored.state["w"] if restored is not None else torch.arange(SIZE, dtype=torch.float64)
        begin, step = restored.step if restored is not None else 0, 0
        for step in range(begin, steps) if steps else itertools.count(begin):
            beat()
            checkpointer.fence()
            ends = torch.tensor([float(not steps and (folder / "enough").exists())], dtype=torch.float64)
            total = torch.cat([gradient(weights, step, rank), ends])
            dist.all_reduce(total)
            weights = (weights + total[:-1]).remainder(65521)
            time.sleep(0.005)
            if rank == 0:
                with open(folder / "steps", "a") as file:
                    file.write(f"{attempt} {step + 1} {time.monotonic()}\n")
            if step % 3 == 2:
                checkpointer.save(step + 1, {"w": weights.clone()})
            if total[-1]:
                break
        checkpointer.fence()
    (folder / f"end-{rank}").write_text(str(step + 1))
    torch.save(weights, folder / f"weights-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    run = restartable(main) if "--restartable" in sys.argv else main
    run(Path(sys.argv[1]), int(sys.argv[2]))
