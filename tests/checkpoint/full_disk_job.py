"""What a process does in :mod:`tests.checkpoint.test_full_disk`: saves before, while and after its disk is full."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTierOptions, Stage

WAIT = timedelta(seconds=20)


def fill(path: Path) -> None:
    """Until not a byte more can be written; of bytes that no file system compresses or leaves out."""
    with path.open("wb", buffering=0) as file:
        for _ in range(2):  # the second time, what the first had reserved
            for nbytes in (1 << 20, 4096, 512):
                with suppress(OSError):
                    while file.write(os.urandom(nbytes)):
                        pass
            os.sync()


def train(*, folder: str, result: str) -> None:
    made = Checkpointer(
        LocalTierOptions(directory=f"{folder}/ckpts", keep=1),
        options=CheckpointerOptions(agent="embedded"),
        rank=0,
        world_size=1,
    )
    state = {f"w{number}": torch.randn(1 << 18) for number in range(16)}
    answer: dict[str, Any] = {"committed": [], "failed": {}}

    def save(step: int) -> None:
        for tensor in state.values():
            tensor.add_(1)
        ticket = made.save(step, state, lazy=bool(step % 2))
        made.fence()
        if ticket is None:
            answer["failed"][step] = "skipped"
            return
        try:
            ticket.wait(Stage.COMMITTED, timeout=WAIT)
            answer["committed"].append(step)
        except Exception as error:
            answer["failed"][step] = f"{type(error).__name__}: {error}"

    with made:
        made.warm_up(state)
        save(1)
        save(2)
        deadline = time.monotonic() + WAIT.total_seconds()
        while len(list(Path(folder, "ckpts/.resiliency").glob("*/steps/*"))) > 1:  # a step that goes makes room
            assert time.monotonic() < deadline
            time.sleep(0.02)
        filler = Path(folder, "filler")
        fill(filler)
        for step in range(3, 8):
            save(step)
        filler.unlink()
        deadline = time.monotonic() + WAIT.total_seconds()
        step = 8
        while step not in answer["committed"]:  # the file system gives blocks back when it likes
            assert time.monotonic() < deadline, answer
            os.sync()
            step += step in answer["failed"]
            save(step)
        restored = made.load()
        assert restored is not None and restored.step == step
        answer["same"] = all(torch.equal(restored.state[name], tensor) for name, tensor in state.items())
    Path(result).write_text(json.dumps(answer))
