"""Writes the sample of format 5 that lies beside this file: ``python -m tests.storage.samples.make_format_5 DIR``."""

from __future__ import annotations

import os
import shutil
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from resiliency.checkpoint import shard_plan
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.state.leaf_kinds import Box, LeafDescription, box_of, register_leaf_kind
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import QUICK, make_checkpointer, run_ranks
from tests.storage.joining import unjoined


@dataclass
class Rows:
    """Some rows of a tensor that the ranks divide."""

    data: torch.Tensor
    shape: tuple[int, ...]
    first: int


class TenAndSix:
    """Rank 0 has the first 10 rows, rank 1 the other 6."""

    copies = 1
    copies_key = digest = "ten and six"

    def copy_of(self, rank: int) -> int | None:
        return 0

    def boxes(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        return (Box((10, 0), (6, shape[1])) if rank else Box((0, 0), (10, shape[1])),)


class RowsKind:
    name = "rows"
    replicated = False

    def takes(self, class_: type) -> bool:
        return class_ is Rows

    def detach(self, leaf: Any, key: str) -> Any:
        return leaf

    def describe(self, leaf: Any) -> LeafDescription:
        boxes = (Box((leaf.first, 0), tuple(leaf.data.shape)),)
        return LeafDescription(shape=leaf.shape, dtype=leaf.data.dtype, boxes=boxes, layout=TenAndSix())

    def structure(self, leaf: Any) -> Any:
        return leaf.shape, leaf.first, leaf.data.shape, leaf.data.dtype

    def local(self, leaf: Any, box: Box) -> torch.Tensor:
        return box_of(leaf.data, [box.offsets[0] - leaf.first, 0], box.sizes)


def state(step: int) -> dict[str, Any]:
    """A tree with what the page names; values differ from step to step."""
    weight = torch.arange(64, dtype=torch.float32).reshape(16, 4) + step
    return {
        "model": OrderedDict(
            weight=weight,
            bias=torch.tensor([0.5, -1.5], dtype=torch.bfloat16),
            tied=weight,
            transposed=torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        ),
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": weight * 2}}, "lr": 0.1},
        "odd": {"a/b": torch.tensor([True, False]), "c%d": torch.tensor([1 + 2j, -3j])},
        "epoch": step // 10,
        "note": ("tuple", {1: "a key that is no text"}, b"\x00\xff", 1 << 80, "\u00e9"),
    }


def sharded_state(step: int, rank: int) -> dict[str, Any]:
    """The same, with the weight divided: rank 0 has 10 rows, rank 1 the other 6."""
    first, end = (0, 10) if rank == 0 else (10, 16)
    whole = state(step)
    model = dict(whole["model"])
    model["weight"] = model["tied"] = Rows(model["weight"][first:end].clone(), (16, 4), first)
    return {**whole, "model": model}


def per_rank(step: int, rank: int) -> dict[str, Any]:
    return {"seed": 100 * step + rank, "generator": torch.tensor([rank, step], dtype=torch.uint8)}


def write(directory: Path) -> None:
    os.environ["RESILIENCY_NODE"] = "host-0"
    shard_plan._MIN_BLOCK = 128  # so that a file this small has blocks for both ranks
    register_leaf_kind(RowsKind())

    def work(rank: int, coordinator: Coordinator) -> None:
        options = replace(QUICK, lazy_bytes=64)
        for run, name in (("pretrain", "step={}.ckpt"), ("sharded", "sharded={}.ckpt")):
            with make_checkpointer(directory, coordinator, run=run, options=options) as checkpointer:
                for step in (10, 20) if run == "pretrain" else (10,):
                    ticket = checkpointer.save(
                        step,
                        state(step) if run == "pretrain" else sharded_state(step, rank),
                        per_rank=per_rank(step, rank),
                        names=[name.format(step), "last.ckpt"] if run == "pretrain" else [name.format(step)],
                        info={"epoch": step // 10},
                        exact=step == 10,
                        beside=None if run == "pretrain" else {"meta.pt": {"epoch": step // 10}},
                    )
                    assert ticket is not None
                    ticket.wait(Stage.COMMITTED)
                checkpointer.flush()

    with unjoined():
        run_ranks(2, work)
    local = LocalTierOptions(directory=str(directory), only_files=True)

    def work_together(rank: int, coordinator: Coordinator) -> None:
        options = replace(QUICK, lazy_bytes=64, agent="process")  # of one agent, which makes one file of it
        with make_checkpointer(local, coordinator, run="together", options=options) as checkpointer:
            checkpointer.save(10, state(10), per_rank=per_rank(10, rank), names=["together=10.ckpt"])

    run_ranks(2, work_together)
    with make_checkpointer(local, run="alone", options=replace(QUICK, lazy_bytes=64)) as checkpointer:
        checkpointer.save(10, state(10), per_rank=per_rank(10, 0), names=["alone=10.ckpt"])
    (directory / ".resiliency" / ".gitignore").unlink()  # or the sample could not be added
    for run in ("pretrain", "sharded"):
        for folder in ("files", "events", "logs", "fetch"):
            shutil.rmtree(directory / ".resiliency" / run / folder, ignore_errors=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
