"""Several hosts without a supervisor: launchers that meet through torch's rendezvous."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

pytestmark = pytest.mark.timeout(180)

#: By default torch's rendezvous notices a lost host after 15 s.
CONFIGURATION = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
#: Sums over all ranks in each attempt; waits in those that a file does not let go.
SUMMING = """
    import os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from resiliency.checkpoint import Checkpointer
    from resiliency.checkpoint.options import LocalTierOptions
    from resiliency.launch import restartable

    folder = Path(sys.argv[1])

    def main():
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        # The launchers count restarts each for itself.
        local = LocalTierOptions(directory=str(folder / "checkpoints"))
        Checkpointer(local, rank=rank, world_size=dist.get_world_size()).open()
        with open(folder / f"there-{dist.get_world_size()}-{rank}", "a") as file:
            file.write(f"{os.getpid()} {os.environ['RESILIENCY_LAUNCHER_STARTS']}\\n")
        done = torch.zeros(1)
        while not done:
            time.sleep(0.02)
            done.fill_(float((folder / "go").exists()))
            dist.all_reduce(done)
        assert int(total) == dist.get_world_size()
        dist.destroy_process_group()

    (restartable(main) if "STAYS" in os.environ else main)()
"""


@pytest.fixture
def hosts(launch: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """Starts two launchers, and keeps the store in which they meet, so that either can be killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(nnodes: str, *flags: Any, **env: str) -> list[Any]:
        meeting = ("--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{store.port}")
        meeting += ("--rdzv-conf", CONFIGURATION, "--local-addr", "127.0.0.1")
        restarts = ("--max-restarts", 3, "--crash-loop", 0)
        one = [*meeting, "--nnodes", nnodes, *restarts, *flags]
        names = [env | {"RESILIENCY_NODE": f"host-{number}"} for number in range(2)]
        return [launch(SUMMING, *one, arguments=[tmp_path], env=name) for name in names]

    return start


def _process_of(folder: Path, rank: int, world: int, attempt: int = 0) -> int:
    """Of a rank in one of the attempts in which all were there."""
    path, deadline = folder / f"there-{world}-{rank}", time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") <= attempt:
        assert time.monotonic() < deadline, f"rank {rank} did not meet the others"
        time.sleep(0.02)
    return int(path.read_text().splitlines()[attempt].split()[0])


def _job_of(pid: int, jobs: list[Any]) -> Any:
    """The launcher of a rank."""
    above = {one.pid for one in psutil.Process(pid).parents()}
    (found,) = [job for job in jobs if job.pid in above]
    return found


@pytest.mark.long
def test_a_death_on_one_host_restarts_both_and_the_other_ranks_stay(hosts: Any, tmp_path: Path) -> None:
    jobs = hosts("2", "--nproc-per-node", 2, STAYS="1")
    pids = [_process_of(tmp_path, rank, 4, 0) for rank in range(4)]
    os.kill(pids[3], signal.SIGKILL)
    stayed = [_process_of(tmp_path, rank, 4, 1) for rank in range(4)]
    for job in jobs:
        job.descendants()
    (tmp_path / "go").touch()
    for job in jobs:
        assert job.wait() == 0, job.text
        assert job.left() == []
    assert len(set(pids) & set(stayed)) == 3, jobs[0].text + jobs[1].text


def test_a_job_that_can_do_with_fewer_goes_on_without_a_host_that_was_killed(hosts: Any, tmp_path: Path) -> None:
    jobs = hosts("1:2")
    pids = [_process_of(tmp_path, rank, 2) for rank in range(2)]
    lost = _job_of(pids[0], jobs)
    (left,) = [job for job in jobs if job is not lost]
    lost.descendants()
    os.kill(lost.pid, signal.SIGKILL)
    _process_of(tmp_path, 0, 1)
    assert (tmp_path / "there-1-0").read_text().split()[1] != "0", "it is to know that this is not the first start"
    left.descendants()
    (tmp_path / "go").touch()
    assert left.wait() == 0, left.text
    assert left.left() == []
