"""Ranks that leave an attempt, when others die one after the other while gloo connects them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

RANKS = 4
ROUNDS = 40

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(240)]

JOB = """
    import os, sys, time
    from pathlib import Path
    import torch.distributed as dist
    from resiliency.launch import restartable

    @restartable
    def main():
        rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(Path(sys.argv[1], rank), "a") as file:
            file.write(f"{attempt} {os.getpid()} began\\n")
            file.flush()
            dist.init_process_group("gloo")
            file.write(f"{attempt} {os.getpid()} connected\\n")
        if Path(sys.argv[1], "enough").exists():
            dist.barrier()
            dist.destroy_process_group()
            return
        time.sleep(1000)

    main()
"""


def _pids(folder: Path, mark: str) -> list[dict[int, int]]:
    """Of each rank: attempt -> process, of those that got that far."""
    found = []
    for rank in range(RANKS):
        path = folder / str(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines if line.endswith(mark)]
        found.append({int(attempt): int(pid) for attempt, pid, _ in words})
    return found


def _wait_for_all(folder: Path, mark: str, after: int) -> tuple[int, list[int]]:
    """The newest attempt after one in which all ranks got there, and their processes."""
    deadline = time.monotonic() + 90
    while True:
        found = _pids(folder, mark)
        common = set.intersection(*(set(one) for one in found))
        if common and max(common) > after:
            return max(common), [one[max(common)] for one in found]
        assert time.monotonic() < deadline, (mark, after, found)
        time.sleep(0.005)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has left, and another one has its place


def test_nobody_waits_for_a_rank_that_died_before_it_was_connected(launch: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    flags = ["--nproc-per-node", RANKS, "--max-restarts", 10 * ROUNDS, "--crash-loop", 0]
    # Torch's store asks for the name of 127.0.0.1 at each connection; with a resolver that does not answer that waits for
    # 5 s and more in native code, which is not what this test is about.
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    job = launch(JOB, *flags, arguments=[folder], env=env)
    draw, attempt = random.Random(1), -1
    for _ in range(ROUNDS):
        attempt, pids = _wait_for_all(folder, "connected", attempt)
        first, second = draw.sample(range(RANKS), 2)
        _kill(pids[first])
        time.sleep(draw.uniform(0.01, 0.12))  # the others leave, or form the next group
        _kill(pids[second])
    _wait_for_all(folder, "connected", attempt)
    (folder / "enough").touch()
    _kill(_wait_for_all(folder, "connected", attempt)[1][0])
    assert job.wait() == 0, job.text[-3000:]
    assert "did not leave its attempt" not in job.text
