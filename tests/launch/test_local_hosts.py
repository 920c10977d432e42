"""Several hosts on one machine, with real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.launch.local_hosts import exit_status

pytestmark = pytest.mark.timeout(180)

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
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        node, local = os.environ["RESILIENCY_NODE"], os.environ["RESILIENCY_LOCAL_DIR"]
        host = f"host {os.environ['GROUP_RANK']} node {node} local {local}"
        os.write(1, f"rank {rank} attempt {attempt} process {os.getpid()} {host}\\n".encode())
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


def _start(launch: Any, tmp_path: Path, nnodes: str, *flags: Any, launcher: str = "ours", **env: str) -> Any:
    flags = ("--local-hosts", "--nnodes", nnodes, "--max-restarts", 3, "--crash-loop", 0, *flags)
    env = {"RESILIENCY_LOCAL_DIR": "/fast"} | env
    return launch(SUMMING, *flags, arguments=[tmp_path], launcher=launcher, env=env)


def _process_of(folder: Path, rank: int, world: int, attempt: int = 0) -> int:
    """Of a rank in one of the attempts in which all were there."""
    path, deadline = folder / f"there-{world}-{rank}", time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") <= attempt:
        assert time.monotonic() < deadline, f"rank {rank} did not meet the others"
        time.sleep(0.02)
    return int(path.read_text().splitlines()[attempt].split()[0])


def _launcher_of(pid: int, above: int) -> int:
    """The ancestor of a rank that is a child of the process that has started all hosts."""
    process = psutil.Process(pid)
    while process.ppid() != above:
        process = process.parent()
    return process.pid


@pytest.mark.long
def test_each_host_is_a_group_of_its_own_and_a_death_restarts_all(launch: Any, tmp_path: Path) -> None:
    job = _start(launch, tmp_path, "2", "--nproc-per-node", 2, launcher="ours, not forked", STAYS="1")
    pids = [_process_of(tmp_path, rank, 4, 0) for rank in range(4)]
    launchers = {_launcher_of(pid, job.pid) for pid in pids}
    assert len(launchers) == 2
    assert {os.getpgid(launcher) for launcher in launchers} == launchers
    os.kill(pids[3], signal.SIGKILL)
    stayed = [_process_of(tmp_path, rank, 4, 1) for rank in range(4)]
    job.descendants()
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.text
    assert sorted(set(pids) & set(stayed)) == sorted(pids[:3]), job.text
    places = set(re.findall(r"node (\S+)-(\d) local (\S+)", job.text))
    assert {(number, folder) for _, number, folder in places} == {("0", "/fast/host-0"), ("1", "/fast/host-1")}
    assert job.left() == []


def test_a_job_that_can_do_with_fewer_goes_on_without_a_host_that_was_killed(launch: Any, tmp_path: Path) -> None:
    job = _start(launch, tmp_path, "1:2")
    pids = [_process_of(tmp_path, rank, 2) for rank in range(2)]
    os.kill(_launcher_of(pids[0], job.pid), signal.SIGKILL)
    _process_of(tmp_path, 0, 1)
    assert (tmp_path / "there-1-0").read_text().split()[1] != "0", "it is to know that this is not the first start"
    job.descendants()
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.text  # it has finished on as many hosts as it needs
    assert "was ended by SIGKILL; the job goes on with 1" in job.text
    assert job.left() == []


def test_a_job_that_needs_all_hosts_ends_when_one_was_killed(launch: Any, tmp_path: Path) -> None:
    job = _start(launch, tmp_path, "2")
    pids = [_process_of(tmp_path, rank, 2) for rank in range(2)]
    job.descendants()
    os.kill(_launcher_of(pids[1], job.pid), signal.SIGKILL)
    assert job.wait() == 1, job.text
    assert "was ended by SIGKILL; the job needs 2 hosts, so the other one ends" in job.text
    assert job.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_host_is_left_when_the_process_above_them_ends(number: signal.Signals, launch: Any, tmp_path: Path) -> None:
    job = _start(launch, tmp_path, "2")
    for rank in range(2):
        _process_of(tmp_path, rank, 2)
    job.descendants()
    os.kill(job.pid, number)
    assert job.wait() == (-number if number == signal.SIGKILL else 128 + number), job.text
    assert job.left(timeout_s=40) == []


def test_a_rendezvous_of_ones_own_is_refused(launch: Any) -> None:
    flags = ("--local-hosts", "--nnodes", 2, "--rdzv-endpoint", "10.0.0.1:29400", "--node-rank", 1)
    job = launch("", *flags, arguments=["train.py"])
    assert job.wait() == 2, job.text
    assert "--local-hosts has its own rendezvous; leave out --rdzv-endpoint, --node-rank" in job.text
    assert "Traceback" not in job.text


@pytest.mark.parametrize(
    ("codes", "fewest", "asked", "status"),
    [
        ([0, 0], 2, None, 0),
        ([0, 3], 2, None, 3),
        ([-9, 0], 1, None, 0),
        ([-9, 0], 2, None, 1),
        ([-9, 143], 1, None, 1),
        ([-9, 3], 1, None, 3),
        ([1, 3], 2, None, 1),
        ([143, 143], 2, signal.SIGTERM, 143),
        ([130, -9], 1, signal.SIGINT, 130),
    ],
)
def test_the_exit_status_is_that_of_the_host_that_failed_by_itself(
    codes: list[int], fewest: int, asked: int | None, status: int
) -> None:
    assert exit_status(codes, fewest=fewest, asked=asked) == status
