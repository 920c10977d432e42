"""Ranks as processes that talk by gloo, for tests with DTensors; forked, so that each has torch imported already."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tests.ports import free_port


def _rank(rank: int, world_size: int, port: int, work: Callable[..., None], arguments: Any, errors: Any) -> None:
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=40))
        try:
            work(rank, *arguments)
            torch.distributed.barrier()  # rank 0 holds the store; what happens when it leaves first is tested elsewhere
        finally:
            torch.distributed.destroy_process_group()
    except BaseException:  # Boundary: the parent reports it.
        errors.put(f"rank {rank}: {traceback.format_exc()}")


def run_gloo(world_size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs ``work(rank, *arguments)`` on each rank, and fails when one of them does or hangs."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, work, arguments, errors))
        for rank in range(world_size)
    ]
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
