"""``recipes/nemo_llama3_70b`` with real NeMo on the CPU: killed in the middle, and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import NEMO_PYTHON
from tests.nemo.test_nemo import finish, started

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(600)]

STEP = re.compile(r"Step \d+ time")
RESUMED = re.compile(r"Restoring states from the checkpoint path at \S*-consumed_samples=(\d+)\.0-last/weights")


def job(folder: Path) -> subprocess.Popen[str]:
    flags = ["--model", "36M", "--layers", "2", "--cpu", "--max-steps", "9", "--enable-optimized-async-ckpt"]
    where = ["--ckpt-dir", str(folder), "--checkpoint-interval", "3", "--topk-ckpt", "2", "--job-name", "job"]
    command = [str(NEMO_PYTHON), "-W", "ignore", "-m", "recipes.nemo_llama3_70b.train", *flags, *where]
    return started(command, {"TMPDIR": str(folder.with_name(folder.name + "-tmp"))})


def ended(said: str) -> str:
    """What the job says at its end: its step, and the loss of that step."""
    return next(line.partition("trained to ")[2] for line in said.splitlines() if "trained to " in line)


def read_until_a_step_after_a_checkpoint(output: IO[str]) -> str:
    """What is said until the first step that ends when a checkpoint is finished."""
    said, is_finished = "", False
    for line in output:  # the test's timeout bounds it
        said += line
        is_finished = is_finished or "finalized successfully" in line
        if is_finished and STEP.search(line):
            break
    return said


def test_a_job_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    for name in ("straight-tmp", "killed-tmp"):
        (tmp_path / name).mkdir()
    (straight,) = finish([job(tmp_path / "straight")])
    first = job(tmp_path / "killed")
    assert first.stdout is not None
    with first.stdout as output:
        said = read_until_a_step_after_a_checkpoint(output)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, said[-3000:]
    (second,) = finish([job(tmp_path / "killed")])
    resumed = RESUMED.search(second)
    assert resumed and f"consumed_samples: {resumed[1]}" in second, second[-3000:]
    assert ended(second) == ended(straight) and ended(straight).startswith("step 9, loss ")
    folder = tmp_path / "killed" / "job" / "checkpoints"
    kept = {f"step={step}-consumed_samples={step + 1}.0" for step in (5, 8)}
    assert {path.name for path in folder.glob("step=*")} == {*kept, "step=8-consumed_samples=9.0-last"}
    for name in kept:
        assert {path.name for path in (folder / name / "context").iterdir()} >= {"io.json", "model.yaml"}
