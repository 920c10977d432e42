"""Checkpoints for the tests of what reads them: small, quick, of one rank or of two, on folders and on memory:// stores."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import StoreCoordinator
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import META_DIR, StepId
from resiliency.storage.stage import Stage
from resiliency.storage.tiers import open_tier

EMBEDDED = CheckpointerOptions(agent="embedded")
DEADLINE_S = 30.0
_stores = itertools.count()


def state(step: int, *, ranks: int = 1) -> dict[str, Any]:
    """A state with tied weights, for two ranks a tensor they share out, and Python objects. Differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    rows = 2100 if ranks > 1 else 100  # engines cut tensors of more than 8 MiB
    weight = torch.randn(6, 4, generator=generator)
    return {
        "epoch": 3,
        "global_step": step,
        "state_dict": {
            "net.weight": weight,
            "head.weight": weight,
            "big": torch.randn(rows, 1024, generator=generator),
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((6, 4), 0.5)}}}],
    }


def solo(
    directory: Path, *steps: int, run: str = "solo", named: bool = True, what: Any = None, keep: int | None = None
) -> None:
    """Steps written by one rank."""
    folder = LocalTierOptions(directory=str(directory), keep=keep)
    with Checkpointer(folder, run=run, rank=0, world_size=1, options=EMBEDDED) as checkpointer:
        for step in steps:
            ticket = checkpointer.save(
                step,
                state(step) if what is None else what,
                per_rank={"rng": torch.arange(5)},
                names=[f"step={step}.ckpt"] if named else [],
                info={"epoch": 3, "val_loss": 0.25},
            )
            assert ticket is not None
            ticket.wait(Stage.DURABLE)


def duo(directory: Path, *steps: int, run: str = "duo", what: Any = None) -> None:
    """Steps written by two ranks, one shard each."""
    store, failures = HashStore(), []

    def rank(number: int) -> None:
        coordinator = StoreCoordinator(store, rank=number, world_size=2, prefix="duo")
        folder = LocalTierOptions(directory=str(directory), keep=None)
        try:
            with Checkpointer(
                folder, run=run, rank=number, world_size=2, coordinator=coordinator, options=EMBEDDED
            ) as checkpointer:
                for step in steps:
                    ticket = checkpointer.save(
                        step,
                        state(step, ranks=2) if what is None else what,
                        per_rank={"rng": torch.arange(5) + number},
                        names=[f"{run}={step}.ckpt"],
                    )
                    assert ticket is not None
                    ticket.wait(Stage.DURABLE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "the two ranks did not finish"
    assert not failures, failures


def steps_of(directory: Path, run: str) -> list[StepId]:
    """Step folders of a run, oldest first."""
    folders = directory.joinpath(META_DIR, run, "steps").glob("*")
    return sorted(step for step in (StepId.parse(path.name) for path in folders) if step is not None)


def folder_of(directory: Path, run: str, step: int) -> Path:
    """Folder of the only attempt at a step."""
    (found,) = [known for known in steps_of(directory, run) if known.step == step]
    return directory / step_prefix(run, found).rstrip("/")


def flip(path: Path, offset: int) -> None:
    """Changes one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def upload(directory: Path) -> str:
    """A copy of everything in a folder, on a memory:// store of its own; returns its address."""
    address = f"memory://made-{next(_stores)}"
    tier = open_tier(address)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "attempt" and "events" not in path.parts:
            tier.put_bytes(path.relative_to(directory).as_posix(), path.read_bytes())
    return address


def same(a: Any, b: Any) -> bool:
    """Equal trees, bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
