"""Times a save of a sharded state beside a bare copy of its bytes and beside dcp.save.

``python -m benchmarks.stock_folder``. Each rank holds its part of 300 DTensors. One process a rank, gloo, CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dtensor
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from resiliency import Checkpointer, Stage

_TENSORS = 300


def _timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together."""
    torch.distributed.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _bare_copies(mapped: mmap.mmap, tensors: Sequence[torch.Tensor], times: int) -> list[float]:
    target = torch.frombuffer(mapped, dtype=torch.float32)

    def copy() -> None:
        for part, tensor in zip(target.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
            part.copy_(tensor.view(-1))

    return [_timed(copy) for _ in range(times + 1)][1:]  # the first one makes the pages


def _rank(rank: int, world_size: int, mib: int, saves: int, folder: str, port: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (world_size,))
    rows = mib * 1024 * 1024 // 4 // 1024 // _TENSORS
    state = {
        f"layer.{number}": dtensor.DTensor.from_local(torch.randn(rows, 1024), mesh, [dtensor.Shard(0)])
        for number in range(_TENSORS)
    }
    local = [tensor.to_local() for tensor in state.values()]
    with tempfile.TemporaryFile(dir=folder) as file:
        os.ftruncate(file.fileno(), sum(tensor.nbytes for tensor in local))
        mapped = mmap.mmap(file.fileno(), 0)
        times = {"bare copy": _bare_copies(mapped, local, saves)}
        gc.collect()  # the tensors over the mapping
        mapped.close()
    copied, committed = [], []
    with Checkpointer(f"{folder}/ours") as checkpointer:
        checkpointer.warm_up(state)
        for step in range(saves + 2):
            torch.distributed.barrier()
            began = time.perf_counter()
            ticket = checkpointer.save(step, state, names=["last.ckpt"])
            assert ticket is not None
            copied.append(time.perf_counter() - began)
            ticket.wait(Stage.COMMITTED)
            committed.append(time.perf_counter() - began)
            checkpointer.flush()
    times["save returns"], times["save is committed"] = copied[2:], committed[2:]

    def stock() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/stock", sync_files=False))

    times["dcp.save, without fsync"] = [_timed(stock) for _ in range(saves + 1)][1:]
    every: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(every, times)
    if rank == 0:
        slowest = {name: [max(values) for values in zip(*(of[name] for of in every), strict=True)] for name in times}
        result = {name: round(1000 * statistics.median(values)) for name, values in slowest.items()}
        Path(folder, "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="of each rank")
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--folder", default="/dev/shm", help="where to save")
    parser.add_argument("--port", type=int, default=29655)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        arguments = (options.ranks, options.mib, options.saves, folder, options.port)
        multiprocessing.spawn(_rank, args=arguments, nprocs=options.ranks)
        print(
            f"{options.ranks} ranks x {options.mib} MiB in {_TENSORS} tensors, median of {options.saves}, slowest rank"
        )
        for name, ms in json.loads(Path(folder, "result.json").read_text()).items():
            print(f"{name:<24} {ms:>6} ms")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
