"""How many bytes a host reads for each byte that its ranks want of a sharded step; for :mod:`benchmarks.scale`.

Every rank is a process and a host with a folder of its own; a folder in common stands in for the store. Saved and
loaded with the library's own save and load: parameters and AdamW's moments, sharded by rows, and a plain ``step`` of
each parameter, which rank 0 writes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from resiliency import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.shard_assembler import ShardAssembler
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier

__all__ = ["RestoreFigures", "measure_restores", "restore_table"]

COLUMNS, MIB = 1024, 1024 * 1024
DEADLINE = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class RestoreFigures:
    """One row of the table; of the host with the largest ratio.

    Attributes:
        what: ranks that saved and that load.
        wanted_nbytes: bytes of the tensors that the host's rank fills.
        read_nbytes: bytes that it reads for that, the ends of all shards included.
        store_nbytes: bytes of these that come from the store.
        open_files: of the process, while it reads.
        seconds: of the slowest rank's load.
    """

    what: str
    wanted_nbytes: int
    read_nbytes: int
    store_nbytes: int
    open_files: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.read_nbytes / self.wanted_nbytes


def _state(nbytes: int) -> dict[str, Any]:
    """Of ``nbytes`` bytes on all ranks together."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    layers = 16
    whole = max(1, nbytes // (3 * layers * 4 * COLUMNS * 4)) * 4  # divides among 2 and 4 ranks
    rows = whole // ranks
    state: dict[str, Any] = {}
    for layer in range(layers):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            local = torch.ones(rows, COLUMNS)
            state[f"{layer}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        state[f"{layer}.step"] = torch.tensor(1.0)
    return state


def _rank(rank: int, ranks: int, folder: str, nbytes: int, saves: bool) -> None:
    os.environ.update(RESILIENCY_NODE=f"host{rank}", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group-{saves}-{ranks}", rank=rank, world_size=ranks, timeout=DEADLINE
    )
    state = _state(nbytes)
    checkpointer = Checkpointer(
        LocalTierOptions(directory=f"{folder}/host{rank}"),
        run="scale",
        options=CheckpointerOptions(agent="embedded", agree_timeout=DEADLINE),
        remotes=[RemoteTierOptions(address=f"{folder}/store")],
    )
    try:
        if saves:
            checkpointer.save(1, state).wait(timeout=DEADLINE)
            checkpointer.flush(Stage.DURABLE, timeout=DEADLINE)
        else:
            Path(folder, f"figures-{rank}").write_text(json.dumps(_load(checkpointer, state, folder)))
    finally:
        checkpointer.close(flush=saves)
        torch.distributed.destroy_process_group()


def _load(checkpointer: Checkpointer, state: dict[str, Any], folder: str) -> dict[str, Any]:
    store: list[int] = []
    files: list[int] = []
    read_range, read = LocalTier.read_range, ShardAssembler.read

    def counted(tier: LocalTier, key: str, start: int, end: int) -> bytes:
        store.append(end - start)
        return read_range(tier, key, start, end)

    def watched(assembler: ShardAssembler, *, threads: int) -> Any:
        files.append(len(os.listdir("/proc/self/fd")))
        return read(assembler, threads=threads)

    LocalTier.read_range, ShardAssembler.read = counted, watched  # type: ignore[method-assign]
    began = time.monotonic()
    restored = checkpointer.load(into=state)
    assert restored is not None
    held = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state.values()]
    return {
        "wanted_nbytes": sum(tensor.nbytes for tensor in held),
        "read_nbytes": restored.nbytes,
        "store_nbytes": sum(store),
        "open_files": max(files),
        "seconds": time.monotonic() - began,
    }


def _run(ranks: int, folder: str, nbytes: int, *, saves: bool) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, ranks, folder, nbytes, saves)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE.total_seconds())
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    if failed:
        raise RuntimeError(f"ranks {failed} failed or hung, see above")


def measure_restores(worlds: Sequence[tuple[int, int]], *, rank_mib: int) -> list[RestoreFigures]:
    """The rows of the table.

    Args:
        worlds: numbers of ranks that save, and that load.
        rank_mib: MiB of each rank that saves.
    """
    rows = []
    for before, after in worlds:
        for lost in (False, True) if before == after else (False,):
            what = f"{before} to {after}{', folders lost' if lost else ''}"
            with tempfile.TemporaryDirectory(prefix="resiliency-scale-") as folder:
                _run(before, folder, before * rank_mib * MIB, saves=True)
                for host in Path(folder).glob("host*") if lost else ():
                    shutil.rmtree(host)
                _run(after, folder, before * rank_mib * MIB, saves=False)
                found = [json.loads(path.read_text()) for path in Path(folder).glob("figures-*")]
            figures = [RestoreFigures(what=what, **one) for one in found]
            rows.append(max(figures, key=lambda one: one.ratio))
    return rows


def restore_table(rows: Sequence[RestoreFigures]) -> Table:
    made = Table(title="Bytes read in a restore, the host with the most", title_justify="left", pad_edge=False)
    made.add_column("ranks")
    for head in ("wanted MiB", "read MiB", "of it from the store", "read / wanted", "open files", "seconds"):
        made.add_column(head, justify="right")
    for row in rows:
        mib = (f"{nbytes / MIB:.1f}" for nbytes in (row.wanted_nbytes, row.read_nbytes, row.store_nbytes))
        made.add_row(row.what, *mib, f"{row.ratio:.3f}", str(row.open_files), f"{row.seconds:.2f}")
    return made
