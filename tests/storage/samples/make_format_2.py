"""Writes the sample of format 2 that lies beside this file: ``python -m tests.storage.samples.make_format_2 DIR``."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from resiliency.checkpoint import plan
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import QUICK, make_checkpointer, run_ranks


def state(step: int) -> dict[str, Any]:
    """A tree with what the page names; values differ from step to step."""
    weight = torch.arange(64, dtype=torch.float32).reshape(16, 4) + step
    return {
        "model": {"weight": weight, "bias": torch.tensor([0.5, -1.5], dtype=torch.bfloat16), "tied": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": weight * 2}}, "lr": 0.1},
        "!odd": {"a/b": torch.tensor([True, False]), "c%d": torch.tensor([1 + 2j, -3j])},
        "epoch": step // 10,
        "note": ("tuple", {1: "a key that is no text"}, b"\x00\xff", 1 << 80, "\u00e9"),
    }


def write(directory: Path) -> None:
    os.environ["RESILIENCY_NODE"] = "host-0"
    plan._CUT_BYTES = 32  # so that a tensor this small is shared out between the ranks

    def work(rank: int, coordinator: Coordinator) -> None:
        options = replace(QUICK, lazy_bytes=64)
        with make_checkpointer(directory, coordinator, run="pretrain", options=options) as checkpointer:
            for step in (10, 20):
                per_rank = {"seed": 100 * step + rank, "generator": torch.tensor([rank, step], dtype=torch.uint8)}
                names = [f"step={step}.ckpt", "last.ckpt"]
                ticket = checkpointer.save(
                    step, state(step), per_rank=per_rank, names=names, info={"epoch": step // 10}, exact=step == 10
                )
                assert ticket is not None
                ticket.wait(Stage.COMMITTED)
            checkpointer.flush()

    run_ranks(2, work)
    for folder in ("arena", "events", "logs", "fetch"):
        shutil.rmtree(directory / ".resiliency" / "pretrain" / folder, ignore_errors=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
