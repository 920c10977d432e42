"""Lightning jobs of four ranks that stay: who leaves an attempt must leave nothing that another one waits for."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restart import JOB, Marks
from tests.rings import few

RANKS = 4

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(180)]


@pytest.mark.parametrize("kills", few([3, 10], [3]))
def test_nobody_waits_for_a_rank_that_was_told_to_leave(kills: int, launch: Any, tmp_path: Path) -> None:
    flags = ["--standalone", "--nproc-per-node", RANKS, "--max-restarts", 100, "--crash-loop", 0]
    job = launch("", *flags, arguments=[JOB, tmp_path, "--restartable"], env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    marks, draw, attempt = Marks(tmp_path, RANKS), random.Random(1), 0
    for _ in range(kills):
        steps, current = draw.randint(6, 12), attempt
        found = marks.wait(lambda of: min(len(one.get(current, {}).get("step", [])) for one in of) >= steps)  # noqa: B023
        time.sleep(draw.uniform(0, 0.05))
        os.kill(int(found[draw.randrange(RANKS)][current]["pid"][0]), signal.SIGKILL)
        found = marks.wait(lambda of: all(any(a > current and "step" in m for a, m in one.items()) for one in of))  # noqa: B023
        attempt = max(number for one in found for number in one)
    job.close()
    assert "did not leave its attempt" not in job.text, job.text[-3000:]
    assert attempt == kills
