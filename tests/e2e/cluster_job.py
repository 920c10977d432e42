"""A training for clusters whose weights depend on every step of every rank, and that stands still where a test wants it:
``cluster_job.py FOLDER``. It ends when ``FOLDER/enough`` is there.

A rank stands still in the moment that ``FOLDER/hold`` names ("saving 1": rank 1, when a save has begun), says so in
``FOLDER/held``, and goes on when the first file is gone. Each rank writes its loss, bit by bit, and the samples that it has
seen in each step to ``FOLDER/records-RANK``.
"""

from __future__ import annotations

import faulthandler
import functools
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
from tests.launch.soak_job import SIZE, gradient

__all__ = ["BATCH", "checksum", "loss_of", "samples"]

SAVE_EVERY = 5
#: Samples of each rank in a step.
BATCH = 2
#: No rank stands still for longer: then the test has failed already.
HOLD_S = 60.0


def checksum(weights: torch.Tensor) -> int:
    """Of weights that are whole numbers; another one when two of them are swapped."""
    return int((weights * torch.arange(1, SIZE + 1, dtype=torch.float64)).sum().item())


@functools.lru_cache(maxsize=4)
def _order(times: int) -> list[int]:
    found: list[int] = torch.randperm(SIZE, generator=torch.Generator().manual_seed(times)).tolist()
    return found


def samples(seen: int, rank: int) -> list[int]:
    """Of one rank, after all ranks have seen so many."""
    first = seen + rank * BATCH
    return [_order(number // SIZE)[number % SIZE] for number in range(first, first + BATCH)]


def loss_of(weights: torch.Tensor, ids: list[int], step: int) -> str:
    """Of whole numbers one division, which is rounded in one way: equal losses are equal in all bits."""
    return float(weights[ids].sum().item() / (step + 3)).hex()


def append(path: Path, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


def hold(folder: Path, moment: str, rank: int) -> None:
    order = folder / "hold"
    if not order.exists():
        return
    deadline = time.monotonic() + HOLD_S
    try:
        if order.read_text() != f"{moment} {rank}":
            return
        draft = folder / f"held-{os.getpid()}"
        draft.write_text(f"{os.environ['RESILIENCY_ATTEMPT']} {moment} {rank}")
        draft.rename(folder / "held")
    except FileNotFoundError:
        return
    while order.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main(folder: Path) -> None:
    generation, rank = int(os.environ["RESILIENCY_ATTEMPT"]), int(os.environ["RANK"])
    append(folder / "starts", f"{generation} {rank} {os.environ['RESILIENCY_NODE']} {os.getpid()}")
    hold(folder, "start-up", rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    local = LocalTierOptions(directory=str(folder / "checkpoints"))
    ranks = dist.get_world_size()
    with Checkpointer(local, rank=rank, world_size=ranks) as checkpointer:
        hold(folder, "restoring", rank)
        restored = checkpointer.load()
        weights = restored.state["w"] if restored is not None else torch.arange(SIZE, dtype=torch.float64)
        step = restored.step if restored is not None else 0
        seen = int(restored.state["seen"]) if restored is not None else 0
        ends = False
        while not ends:
            beat()
            checkpointer.fence()
            total = torch.cat([gradient(weights, step, rank), torch.tensor([float((folder / "enough").exists())])])
            dist.all_reduce(total)
            ids = samples(seen, rank)
            loss = loss_of(weights, ids, step)
            weights, ends = (weights + total[:-1]).remainder(65521), bool(total[-1])
            step, seen = step + 1, seen + BATCH * ranks
            append(folder / f"records-{rank}", f"{generation} {step} {loss} {','.join(map(str, ids))}")
            time.sleep(0.02)
            if rank == 0:
                append(folder / "steps", f"{generation} {step} {checksum(weights)}")
            hold(folder, "training", rank)
            if step % SAVE_EVERY == 0:
                checkpointer.save(step, {"w": weights.clone(), "seen": torch.tensor(seen)})
                hold(folder, "saving", rank)
        checkpointer.fence()
    (folder / f"end-{rank}").write_text(f"{ranks} {step} {checksum(weights)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    restartable(main)(Path(sys.argv[1]))
