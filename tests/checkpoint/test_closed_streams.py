"""A program that has closed its standard streams, as daemons do, and prints all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
for number in {closed}:
    os.close(number)
import torch
from resiliency.checkpoint.checkpointer import CheckpointerOptions
from resiliency.testing.checkpoints import make_checkpointer
with make_checkpointer({directory!r}, options=CheckpointerOptions(agent={agent!r})) as checkpointer:
    for step in range(1, 6):
        checkpointer.save(step, {{"w": torch.full((40_000,), float(step))}}, lazy=True, names=[f"{{step}}.ckpt"])
        for number in {closed}:
            try:
                os.write(number, b"a line of a log" * 100)
            except OSError:
                pass  # closed, or open for reading
        checkpointer.fence()
for step in range(1, 6):
    assert torch.load(os.path.join({directory!r}, f"{{step}}.ckpt"))["w"].eq(step).all()
"""


@pytest.mark.parametrize("agent", ["embedded", "process"])
@pytest.mark.parametrize("closed", [[0, 1, 2], [1], [0, 2]], ids=str)
def test_what_is_printed_there_does_not_get_into_a_checkpoint(closed: list[int], agent: str, tmp_path: Path) -> None:
    program = PROGRAM.format(closed=closed, directory=str(tmp_path), agent=agent)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, timeout=60, text=True)
    assert done.returncode == 0, done.stderr
