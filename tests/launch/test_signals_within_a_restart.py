"""Signals that reach the launcher while it starts its ranks again, or that stop it while one of them dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import wait_for
from tests.rings import few

#: Rank 1 dies in attempt 0. Its peer, which is told to end, takes as long as it likes; in attempt 1 both wait.
SLOW_TO_END = """
    import os, signal, sys, time
    folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == "0" and attempt == "0":
        def linger(*_):
            open(f"{folder}/told", "w").write("now")
            time.sleep(2)
            sys.exit(1)
        signal.signal(signal.SIGTERM, linger)
    open(f"{folder}/rank-{rank}-{attempt}", "w").write(str(os.getpid()))
    time.sleep(120)
"""
#: Both ranks die at once, again and again.
CRASH_LOOP = """
    import os, sys
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    open(f"{sys.argv[1]}/rank-{os.environ['RANK']}-{attempt}", "w").write("x")
    sys.exit(1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("times", few([1, 2], ["once"]), ids=["once", "twice"])
def test_a_launcher_that_is_told_to_end_while_it_ends_its_ranks_ends(
    number: signal.Signals, times: int, launch: Any, tmp_path: Path
) -> None:
    job = launch(SLOW_TO_END, "--nproc-per-node", 2, "--max-restarts", 9, arguments=[tmp_path])
    wait_for(tmp_path / "rank-0-0")
    os.kill(int(wait_for(tmp_path / "rank-1-0")), signal.SIGKILL)
    wait_for(tmp_path / "told")
    job.descendants()
    for _ in range(times):
        os.kill(job.pid, number)
    assert job.wait(timeout_s=20) == 128 + number, job.text
    assert job.left() == []
    assert not (tmp_path / "rank-0-1").exists(), "the ranks were started again"


def test_a_launcher_that_is_told_to_end_while_it_waits_for_the_next_attempt_ends_at_once(
    launch: Any, tmp_path: Path
) -> None:
    job = launch(CRASH_LOOP, "--nproc-per-node", 2, "--max-restarts", 99, "--crash-loop", 60, arguments=[tmp_path])
    wait_for(tmp_path / "rank-0-4")  # the next pause is of 8 s
    deadline = time.monotonic() + 30
    while "starts in 8 s" not in job.text:
        assert time.monotonic() < deadline, job.text
        time.sleep(0.02)
    job.descendants()
    told = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(timeout_s=30) == 143, job.text
    assert time.monotonic() - told < 6 and not (tmp_path / "rank-0-5").exists()
    assert job.left() == []


@pytest.mark.parametrize("count", few([1, 2], [2]), ids=["one rank", "all ranks"])
def test_a_launcher_that_is_stopped_while_ranks_die_starts_them_again_when_it_goes_on(
    count: int, launch: Any, tmp_path: Path
) -> None:
    script = """
        import os, sys, time
        rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        open(f"{sys.argv[1]}/rank-{rank}-{attempt}", "w").write(str(os.getpid()))
        if attempt == "0":
            time.sleep(120)
    """
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 1, arguments=[tmp_path])
    pids = [int(wait_for(tmp_path / f"rank-{rank}-0")) for rank in (0, 1)]
    job.descendants()
    os.kill(job.pid, signal.SIGSTOP)
    for pid in pids[:count]:
        os.kill(pid, signal.SIGKILL)
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait(timeout_s=60) == 0, job.text
    assert "was ended by SIGKILL" in job.text and (tmp_path / "rank-1-1").exists()
    assert job.left() == []
