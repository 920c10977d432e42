"""The GPU side of a save. Needs CUDA; counted, not run, elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.storage.stage import Stage

pytestmark = pytest.mark.gpu


def test_a_lazy_save_from_the_gpu_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(32)}
    with Checkpointer(tmp_path, rank=0, world_size=1, options=CheckpointerOptions(agent="embedded")) as checkpointer:
        ticket = checkpointer.save(1, weights, lazy=True)
        checkpointer.fence()
        for tensor in weights.values():
            tensor.fill_(-1.0)  # runs on the compute stream, which waits for the copies
        assert ticket is not None
        ticket.wait(Stage.COMMITTED)
        restored = checkpointer.load()
    assert restored is not None
    for i in range(32):
        assert torch.equal(restored.state[f"w{i}"], torch.full((1 << 20,), float(i)))


def test_the_fence_does_not_block_the_cpu(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(1 << 28, device="cuda")}
    with Checkpointer(tmp_path, rank=0, world_size=1, options=CheckpointerOptions(agent="embedded")) as checkpointer:
        checkpointer.warm_up(weights)
        ticket = checkpointer.save(1, weights, lazy=True)
        assert ticket is not None
        assert not ticket.has_reached(Stage.COPIED)
        checkpointer.fence()
        assert not ticket.has_reached(Stage.COPIED), (
            "1 GiB cannot have crossed the bus yet: the fence must not have waited for it"
        )
        ticket.wait(Stage.COMMITTED)
