"""A supervisor and several hosts on this machine, with real gloo training: hosts, ranks and the supervisor itself die,
and the job ends unaided with the weights of a run in which nothing happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from resiliency.testing.zygote import Zygote
from tests.launch import soak_job
from tests.launch.launching import Job
from tests.patience import PATIENCE
from tests.rings import few

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(240)]

JOB = Path(soak_job.__file__)


class Cluster:
    """``resiliency run --spares`` in a session of its own, which trains until a test has seen enough; everything it has
    started is killed at the end."""

    def __init__(self, folder: Path, zygote: Zygote, *flags: Any) -> None:
        self.folder = folder
        words = [*flags, "--nproc-per-node", 1, JOB, folder, 0, "--restartable"]
        self.job = Job("ours", ["--state-dir", folder / "state", *words], folder / "output", zygote, cwd=folder)

    def progress(self) -> tuple[int, int]:
        """Newest attempt and step."""
        with suppress(FileNotFoundError, IndexError, ValueError):
            attempt, step, _ = (self.folder / "steps").read_text().splitlines()[-1].split()
            return int(attempt), int(step)
        return -1, 0

    def wait_for(self, attempt: int, step: int, timeout_s: float = 60) -> float:
        """Until this step of this attempt, or a later one of either, was made; when it was."""
        deadline = time.monotonic() + PATIENCE * timeout_s
        while self.progress() < (attempt, step):
            assert self.job.running, self.job.text[-8000:]
            assert time.monotonic() < deadline, f"not beyond {self.progress()}:\n{self.job.text[-8000:]}"
            self.job.descendants()
            time.sleep(0.02)
        return time.monotonic()

    def process(self, *words: str) -> psutil.Process:
        """The one whose command line has all these words."""
        for process in self.job.descendants():
            with suppress(psutil.NoSuchProcess):
                if set(words) <= set(process.cmdline()):
                    return process
        raise AssertionError(f"no process {words}")

    def host_of(self, rank: int) -> psutil.Process:
        """The monitor of the host that has this rank in the first attempt. Which hosts have places, and which is the
        spare, depends on who was ready first."""
        for process in psutil.Process(int((self.folder / f"pid-{rank}-0").read_text())).parents():
            if "host-monitor" in process.cmdline():
                return process
        raise AssertionError(f"rank {rank} has no monitor")

    def kill_host_of(self, rank: int) -> float:
        """All of it at once: monitor, launcher, ranks, agent."""
        monitor = self.host_of(rank)
        all_of_it = [monitor, *monitor.children(recursive=True)]
        for process in all_of_it:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return time.monotonic()

    def finish(self, ranks: int, timeout_s: float = 120) -> None:
        """Trains on for a while. All ranks then have the weights of a run of as many steps in which nothing happened;
        no ranks: their number has changed."""
        attempt, step = self.progress()
        self.wait_for(attempt, step + 20)
        self.job.descendants()
        (self.folder / "enough").touch()
        assert self.job.wait(timeout_s=timeout_s) == 0, self.job.text[-8000:]
        ends = {int((self.folder / f"end-{rank}").read_text()) for rank in range(ranks)}
        assert len(ends) == bool(ranks), "ranks have ended after different steps"
        expected = soak_job.weights_after(max(ends), ranks) if ends else None
        for rank in range(ranks):
            assert torch.equal(torch.load(self.folder / f"weights-{rank}"), expected), f"rank {rank}"
        assert self.job.left() == []


@pytest.fixture
def cluster(tmp_path: Path, zygote: Zygote) -> Iterator[Any]:
    made: list[Cluster] = []

    def start(*flags: Any) -> Cluster:
        made.append(Cluster(tmp_path, zygote, *flags))
        return made[-1]

    yield start
    for one in made:
        one.job.close()


def test_a_host_that_is_killed_is_swapped_for_the_spare(cluster: Any) -> None:
    job = cluster("--nnodes", 2, "--spares", 1)
    job.wait_for(0, 20)
    killed = job.kill_host_of(1)
    again = job.wait_for(1, 1)
    print(f"{again - killed:.2f} s from the death of a host to the first new step")
    job.finish(ranks=2)
    assert "hot_swap" in job.job.text


def test_a_rank_that_is_killed_is_replaced_and_its_peer_stays(cluster: Any) -> None:
    job = cluster("--nnodes", 2, "--spares", 0, "--leave-timeout", 10 * PATIENCE)
    job.wait_for(0, 20)
    before = (job.folder / "pid-0-0").read_text()
    os.kill(int((job.folder / "pid-1-0").read_text()), signal.SIGKILL)
    job.wait_for(1, 1)
    assert (job.folder / "pid-0-1").read_text() == before
    job.finish(ranks=2)


def test_without_a_spare_the_job_goes_on_with_fewer_hosts(cluster: Any) -> None:
    job = cluster("--nnodes", "1:2", "--spares", 0)
    job.wait_for(0, 20)
    job.kill_host_of(0)
    job.wait_for(1, 1)
    job.finish(ranks=0)
    assert "scale_down" in job.job.text


@pytest.mark.nightly
def test_training_goes_on_without_the_supervisor_and_the_next_one_goes_on_with_it(cluster: Any) -> None:
    job = cluster("--nnodes", 2, "--spares", 1)
    job.wait_for(0, 20)
    os.kill(job.process("supervisor", "run").pid, signal.SIGKILL)
    _, step = job.progress()
    job.wait_for(0, step + 50)
    job.kill_host_of(0)
    job.wait_for(1, 1)
    job.finish(ranks=2)


@pytest.mark.parametrize(
    "number", few([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]), ids=lambda number: number.name
)
def test_nothing_is_left_when_it_is_told_to_end(number: signal.Signals, cluster: Any) -> None:
    job = cluster("--nnodes", 2, "--spares", 1)
    job.wait_for(0, 5)
    job.job.descendants()
    if number == signal.SIGINT:
        job.host_of(1).kill()  # its launcher waits for the next monitor, and there will be none
    os.kill(job.job.pid, number)
    assert job.job.wait(timeout_s=60) == 128 + number, job.job.text[-8000:]
    assert job.job.left() == []
