"""The fork server of the tests: what their jobs of several ranks import is imported once for each worker of pytest.

A start of it takes five seconds of processor time, so it is one fixture of the whole session (``zygote`` in conftest.py).
"""

from __future__ import annotations

from pathlib import Path

from resiliency.testing.zygote import Zygote

PRELOAD = [
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "torchmetrics",
    "resiliency.checkpoint.checkpointer",
    "tests.callbacks.ddp_job",
    "tests.callbacks.epoch_job",
    "tests.e2e.job",
    # Lightning and torch import these in the first training of a process.
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "fsspec.implementations.chained",
    "asyncio",
]


def make_zygote(log: Path) -> Zygote:
    return Zygote(PRELOAD, log=str(log), path=[str(Path(__file__).parents[1])])
