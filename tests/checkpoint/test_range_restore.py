"""A sharded step where each host has a folder of its own: each rank reads what it wants, from its host's files and from
the slower tier, and nothing else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from resiliency.checkpoint import shard_assembler, shard_plan, shard_reader
from resiliency.checkpoint.checkpointer import Checkpointer, Restored
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.shard_reader import RangeReader
from resiliency.errors import CorruptShard, TierError
from resiliency.events import Event, EventKind
from resiliency.inspection.by_path import locate_and_load
from resiliency.storage.catalog import read_manifest, step_prefix
from resiliency.storage.stage import Stage
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    QUICK,
    RUN,
    copy_to_memory,
    differences,
    flip_bits,
    make_checkpointer,
    make_flat_state,
    save_steps,
    step_dir,
    step_dirs,
)
from tests.checkpoint.gloo_ranks import run_gloo

SOON = timedelta(seconds=30)
ROWS = 1 << 10
#: 1 MiB each. Of the plain ones, which rank 0 writes, every rank wants all.
LARGE = ("a", "b", "c", "d")


def whole(step: int) -> dict[str, torch.Tensor]:
    """By key: large tensors to be sharded, and a small plain one beside each."""
    made = torch.Generator().manual_seed(step)
    large = {f"{key}.large": torch.randn(ROWS, 256, generator=made) for key in LARGE}
    return {**large, **{f"{key}.step": torch.tensor([float(step)]) for key in LARGE}}


def state(step: int, *, value: bool = True, placement: Any = None) -> dict[str, Any]:
    """The tensors as this rank holds them; without ``value`` zeros."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    made: dict[str, Any] = {}
    for key, tensor in whole(step).items():
        tensor = tensor if value else torch.zeros_like(tensor)
        placements = [placement or Shard(0)]
        made[key] = distribute_tensor(tensor, mesh, placements, src_data_rank=None) if "large" in key else tensor
    return made


def is_whole(found: dict[str, Any], step: int) -> bool:
    return all(
        torch.equal(getattr(found[key], "full_tensor", lambda tensor=found[key]: tensor)(), tensor)
        for key, tensor in whole(step).items()
    )


class Heard(logging.Handler):
    """What a rank was told: warnings, and events."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.events: list[Event] = []

    def emit(self, record: logging.LogRecord | Event) -> None:  # type: ignore[override]
        if isinstance(record, Event):
            self.events.append(record)
        else:
            self.lines.append(record.getMessage())

    def close(self) -> None: ...


def host_of(rank: int) -> int:
    """Two hosts, or one for a job of one rank."""
    return rank * 2 // torch.distributed.get_world_size()


def checkpointer_on(root: str, rank: int, *, store: str | None = "store", heard: Heard | None = None) -> Checkpointer:
    """Each host has ``host0`` or ``host1`` below ``root`` for itself, and ``store`` is common."""
    os.environ["RESILIENCY_NODE"] = f"host{host_of(rank)}"
    if heard is not None:
        logging.getLogger("resiliency").addHandler(heard)
    return Checkpointer(
        LocalTierOptions(directory=f"{root}/host{host_of(rank)}", keep=None),
        run=RUN,
        options=QUICK,
        remotes=[RemoteTierOptions(address=f"{root}/{store}", keep=None)] if store else [],
        sinks=[heard] if heard is not None else [],
    )


def save(rank: int, root: str, steps: Sequence[int], store: str | None = "store") -> None:
    shard_plan.BLOCK_BYTES = 64 * 1024
    with checkpointer_on(root, rank, store=store) as checkpointer:
        for step in steps:
            ticket = checkpointer.save(step, {"m": state(step)}, per_rank={"rank": rank})
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            assert checkpointer.flush(Stage.DURABLE, timeout=SOON)


def answer(root: str, rank: int, text: object) -> None:
    Path(root, f"answer-{rank}").write_text(str(text))


def answers(root: Path) -> list[str]:
    return [path.read_text() for path in sorted(root.glob("answer-*"))]


def load(rank: int, root: str, step: int, store: str | None = "store") -> None:
    """Loads into live tensors; answers with the bytes read for each byte that this rank has."""
    heard, into = Heard(), state(step, value=False)
    addresses = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)().data_ptr() for tensor in into.values()]
    checkpointer = checkpointer_on(root, rank, store=store, heard=heard)
    try:
        restored = checkpointer.load(into={"m": into})
        assert restored is not None and restored.step == step
        assert is_whole(into, step) and restored.per_rank in (None, {"rank": rank})
        held = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in into.values()]
        assert [tensor.data_ptr() for tensor in held] == addresses
        assert not [event for event in heard.events if event.kind == EventKind.CHECKPOINT_REPAIRED]
        answer(root, rank, restored.nbytes / sum(tensor.nbytes for tensor in held))
        answer(root, rank + 100, "\n".join(line for line in heard.lines if "digests" in line or "missing" in line))
    finally:
        checkpointer.close(flush=False)


def files(root: Path) -> list[str]:
    """What the hosts' folders hold of steps."""
    return sorted(str(path.relative_to(root)) for path in root.glob("host*/.resiliency/*/steps/*/*"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two hosts with a rank each, also in the store."""
    root = tmp_path_factory.mktemp("pristine")
    run_gloo(2, save, str(root), (1, 2))
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "root")
    return tmp_path / "root"


def test_each_rank_reads_what_it_wants_and_no_host_gets_the_files_of_another(root: Path) -> None:
    before = files(root)
    assert [name for name in before if "host1" in name and "__0_0" in name] == []
    run_gloo(2, load, str(root), 2)
    assert files(root) == [*before, *(set(files(root)) - set(before))] or files(root) == before
    assert not [name for name in files(root) if "host1" in name and "__0_0" in name]
    assert max(map(float, answers(root)[:2])) < 1.1, "plain tensors of rank 0 lie side by side"
