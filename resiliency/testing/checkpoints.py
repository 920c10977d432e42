"""Small checkpoints for tests: states to save, ranks in threads, series of steps on two tiers, and damage to their
files.

Ranks are threads of one process that talk over a ``HashStore``; the agent is embedded, so that a save, a load and the
end of both take some tens of milliseconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not declare it as exported

from resiliency.checkpoint.checkpointer import Checkpointer, Restored
from resiliency.checkpoint.coordinator import Coordinator, StoreCoordinator
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import EVENTS_DIR, META_DIR, STEPS_DIR
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier

__all__ = [
    "QUICK",
    "RUN",
    "Series",
    "bytes_of",
    "copy_folder",
    "copy_to_memory",
    "differences",
    "flip_bits",
    "make_checkpointer",
    "make_flat_state",
    "make_lightning_state",
    "make_series",
    "make_state",
    "make_write_plan",
    "run_ranks",
    "save_steps",
    "step_dir",
    "step_dirs",
]

T = TypeVar("T")
_memory_stores = itertools.count()

RUN = "run"

#: Everything in one process; tensors from 1 KiB are written by the ranks together; short deadlines.
QUICK = CheckpointerOptions(
    agent="embedded",
    lazy_bytes=1024,
    agree_timeout=timedelta(seconds=20),
    fence_timeout=timedelta(seconds=20),
    previous_save_timeout=timedelta(seconds=10),
)


def make_state(seed: int, *, rows: int = 96) -> dict[str, Any]:
    """A state with large and small tensors, tied ones, several dtypes and Python objects; differs in every tensor by
    ``seed``."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 16, generator=made)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "half": torch.randn(rows, 8, generator=made).to(torch.bfloat16),
            "ids": torch.randint(0, 1 << 40, (rows, 4), generator=made),
            "flag": torch.tensor([True, False, bool(seed % 2)]),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(seed)), "exp_avg": torch.randn(rows, 16, generator=made)}},
            "lr": 1e-3 * seed,
        },
        "loops": {"step": seed, "history": [(seed, "a"), (seed + 1, "b")]},
    }


def make_lightning_state(step: int, *, world_size: int = 1) -> dict[str, Any]:
    """A state with Lightning's layout and tied weights; for several ranks also a tensor of several blocks."""
    made = torch.Generator().manual_seed(step)
    rows = 2100 if world_size > 1 else 100
    weight = torch.randn(6, 4, generator=made)
    return {
        "epoch": 3,
        "global_step": step,
        "state_dict": {
            "net.weight": weight,
            "head.weight": weight,
            "big": torch.randn(rows, 1024, generator=made),
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((6, 4), 0.5)}}}],
    }


def make_flat_state(step: int, *, world_size: int = 1) -> dict[str, Any]:
    """The tensors and objects of :func:`make_lightning_state` side by side, as a saved write plan is loaded."""
    state = make_lightning_state(step, world_size=world_size)
    weights = {f"state_dict/{name}": tensor for name, tensor in state["state_dict"].items()}
    return {**weights, "epoch": state["epoch"], "global_step": state["global_step"]}


def make_write_plan(flat: Mapping[str, Any], *, rank: int, world_size: int) -> WritePlan:
    """A plan by which each rank writes its part of the rows of every tensor: a sharded step."""
    chunks = []
    for key, tensor in flat.items():
        if isinstance(tensor, Tensor):
            rows = len(tensor)
            first, last = rows * rank // world_size, rows * (rank + 1) // world_size
            offsets = (first, *(0 for _ in tensor.shape[1:]))
            chunks.append(WriteChunk(key=key, tensor=tensor[first:last], offsets=offsets, shape=tuple(tensor.shape)))
    objects = {key: value for key, value in flat.items() if not isinstance(value, Tensor)}
    return WritePlan(chunks=chunks, objects=objects)


def bytes_of(tensor: Tensor) -> bytes:
    """The tensor's elements in C order, bit for bit (NaN payloads and signs of zero included)."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two state trees differ, in words; empty when they are equal bit for bit, types included."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
        if one.dtype != other.dtype or one.shape != other.shape:
            return [f"{where}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"]
        return [] if bytes_of(one) == bytes_of(other) else [f"{where}: values differ"]
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return [f"{where}: keys {list(one)} and {list(other)}"]
        return [text for key in one for text in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} items"]
        return [
            text for i, (a, b) in enumerate(zip(one, other, strict=True)) for text in differences(a, b, f"{where}/{i}")
        ]
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]


def run_ranks(world_size: int, work: Callable[[int, Coordinator], T], *, timeout_s: float = 60) -> list[T]:
    """Calls ``work(rank, coordinator)`` for every rank at once, each on a thread of its own.

    Returns:
        The return values, by rank.

    Raises:
        TimeoutError: a rank did not return in time (its thread is left behind).
        Exception: that of the lowest rank that raised.
    """
    store = HashStore()
    pool = ThreadPoolExecutor(world_size, thread_name_prefix="rank")
    try:
        futures = [
            pool.submit(work, rank, StoreCoordinator(store, rank=rank, world_size=world_size, prefix="ranks"))
            for rank in range(world_size)
        ]
        late = wait(futures, timeout=timeout_s).not_done
        if late:
            raise TimeoutError(
                f"rank(s) {[rank for rank, future in enumerate(futures) if future in late]} did not return in"
                f" {timeout_s:.0f} s"
            )
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def make_checkpointer(
    directory: str | Path | LocalTierOptions,
    coordinator: Coordinator | None = None,
    *,
    run: str = RUN,
    options: CheckpointerOptions = QUICK,
    **further: Any,
) -> Checkpointer:
    """A Checkpointer that does not read the environment."""
    target = directory if isinstance(directory, LocalTierOptions) else str(directory)
    rank, world_size = (0, 1) if coordinator is None else (coordinator.rank, coordinator.world_size)
    return Checkpointer(
        target, run=run, rank=rank, world_size=world_size, coordinator=coordinator, options=options, **further
    )


@dataclass(frozen=True)
class Series:
    """Steps saved by several ranks below ``root``: a local tier in ``root/local`` and, maybe, a remote one in
    ``root/remote``.

    Attributes:
        steps: step numbers, oldest first; the state of step N is ``make_state(N)``, the per-rank part ``per_rank(N,
            rank)``.
    """

    root: Path
    world_size: int
    steps: tuple[int, ...]
    remote: bool

    @property
    def local_dir(self) -> Path:
        return self.root / "local"

    @property
    def remote_dir(self) -> Path:
        return self.root / "remote"

    @property
    def tiers(self) -> list[Path]:
        return [self.local_dir, self.remote_dir] if self.remote else [self.local_dir]

    @staticmethod
    def per_rank(step: int, rank: int) -> dict[str, Any]:
        return {"rng": torch.full((64,), step * 100 + rank, dtype=torch.int32), "rank": rank, "step": step}

    def copy_to(self, root: Path) -> Series:
        copy_folder(self.root, root)
        return Series(root, self.world_size, self.steps, self.remote)

    def open(self, coordinator: Coordinator | None, **options: Any) -> Checkpointer:
        remotes = [RemoteTierOptions(address=str(self.remote_dir), keep=None)] if self.remote else []
        return make_checkpointer(
            LocalTierOptions(directory=str(self.local_dir), keep=None), coordinator, remotes=remotes, **options
        )

    def load(self, **arguments: Any) -> list[Restored | None]:
        """Loads with new checkpointers on ``world_size`` ranks; returns the result of each."""

        def work(rank: int, coordinator: Coordinator) -> Restored | None:
            checkpointer = self.open(coordinator)
            try:
                return checkpointer.load(**arguments)
            finally:
                checkpointer.close(flush=False)

        return run_ranks(self.world_size, work)

    def problems(self, restored: Restored, rank: int) -> list[str]:
        """Differences between a restored checkpoint and what was saved at its step, bit for bit."""
        if restored.step not in self.steps:
            return [f"step {restored.step} was never saved"]
        found = differences(restored.state, make_state(restored.step))
        return found + differences(restored.per_rank, self.per_rank(restored.step, rank), "per_rank")


def make_series(root: Path, *, steps: Sequence[int] = (10, 20, 30), world_size: int = 2, remote: bool = True) -> Series:
    """Saves the steps on ``world_size`` ranks and waits until they are on every tier."""
    series = Series(root, world_size, tuple(steps), remote)

    def work(rank: int, coordinator: Coordinator) -> None:
        with series.open(coordinator) as checkpointer:
            for step in steps:
                ticket = checkpointer.save(
                    step, make_state(step), per_rank=series.per_rank(step, rank), names=[f"step={step}.ckpt"]
                )
                assert ticket is not None
                ticket.wait(Stage.COMMITTED, timeout=timedelta(seconds=20))
                # Otherwise the next step would supersede this one while it waits for the remote tier.
                assert checkpointer.flush(Stage.DURABLE, timeout=timedelta(seconds=60))

    run_ranks(world_size, work)
    return series


def save_steps(
    directory: str | Path,
    *steps: int,
    run: str = RUN,
    world_size: int = 1,
    name: str = "step={step}.ckpt",
    what: Any = None,
    sharded: bool = False,
) -> None:
    """Saves steps in a folder, one shard a rank, and waits until each is durable.

    Args:
        name: name of each step; ``{step}`` in it becomes the step number.
        what: the state of every step; None: :func:`make_lightning_state` of the step.
        sharded: every rank writes a part of each tensor of :func:`make_flat_state` into a shard of its own.
    """
    options = LocalTierOptions(directory=str(directory), keep=None)

    def state_of(step: int, rank: int) -> Any:
        if sharded:
            flat = make_flat_state(step, world_size=world_size)
            return make_write_plan(flat, rank=rank, world_size=world_size)
        return make_lightning_state(step, world_size=world_size) if what is None else what

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(options, coordinator, run=run) as checkpointer:
            for step in steps:
                ticket = checkpointer.save(
                    step,
                    state_of(step, rank),
                    per_rank={"rng": torch.arange(5) + rank},
                    names=[name.format(step=step)],
                    info={"epoch": 3, "val_loss": 0.25},
                )
                assert ticket is not None
                ticket.wait(Stage.DURABLE, timeout=timedelta(seconds=30))

    run_ranks(world_size, work)


def step_dirs(tier: str | Path, run: str = RUN) -> dict[StepId, Path]:
    """Step folders of a run in a folder tier, oldest first, committed or not."""
    base = Path(tier, META_DIR, run, STEPS_DIR)
    found = {StepId.parse(path.name): path for path in base.iterdir()} if base.is_dir() else {}
    return {step: Path(tier, step_prefix(run, step)) for step in sorted(step for step in found if step is not None)}


def step_dir(tier: str | Path, run: str, step: int) -> Path:
    """Folder of the only save of a step in a folder tier."""
    (found,) = [path for known, path in step_dirs(tier, run).items() if known.step == step]
    return found


def copy_folder(source: Path, target: Path) -> None:
    """Copies a folder of checkpoints as it is: a name stays another name of its step's shard, not a second file."""
    copies: dict[int, str] = {}

    def copy(one: str, other: str) -> str:
        inode = os.stat(one).st_ino
        if inode in copies:
            os.link(copies[inode], other)
        else:
            copies[inode] = str(shutil.copy2(one, other))
        return other

    shutil.copytree(source, target, copy_function=copy)


def copy_to_memory(directory: Path) -> str:
    """Copies the checkpoints of a folder to a ``memory://`` store of their own; returns its address."""
    address = f"memory://copy-{next(_memory_stores)}"
    tier = open_tier(address)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "attempt" and EVENTS_DIR not in path.parts:
            tier.put_bytes(path.relative_to(directory).as_posix(), path.read_bytes())
    return address


def flip_bits(path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Inverts every bit of the byte ranges ``[start, end)``; negative offsets count from the end of the file."""
    data = bytearray(path.read_bytes())
    for start, end in ranges:
        for index in range(*slice(start, end).indices(len(data))):
            data[index] ^= 0xFF
    path.write_bytes(data)
