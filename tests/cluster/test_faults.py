"""Faults of nodes, supervisors and the API server, with real supervisors and a dozen simulated hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.cluster.client import Cluster
from tests.cluster.rig import Rig
from tests.cluster.simulated_release import SimulatedJob, SimulatedRelease
from tests.supervisor.supervisor_command import PRELOAD

Start = Callable[..., SimulatedJob]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Supervisors are forks of one that has imported what they need."""
    log = tmp_path_factory.mktemp("supervisors") / "log"
    with Zygote(PRELOAD, log=str(log), path=[str(Path(__file__).parents[2])]) as made:
        yield made


@pytest.fixture(scope="module")
def release(
    control_plane: Cluster, forks: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimulatedRelease]:
    """Sixteen nodes for a job of twelve."""
    folder = tmp_path_factory.mktemp("release")
    rig = Rig(control_plane, folder)
    yield SimulatedRelease(rig, folder / "r", forks, nodes=16, hosts=12)
    rig.close()


@pytest.fixture
def start(release: SimulatedRelease) -> Iterator[Start]:
    """Starts the test's job, which ends with it."""
    started: list[SimulatedJob] = []

    def start(**values: Any) -> SimulatedJob:
        started.append(release.job(**values))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_of_two_dead_nodes_one_is_swapped_and_the_job_goes_on_without_the_other(start: Start) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.workload()["generation"]
    nodes = job.kill_nodes(before[3], before[7])
    job.until_it_trains(after=generation)
    assert len(job.places()) == 11 + 1 - 1
    job.check(before, out={before[3], before[7]}, spares=spares, nodes=nodes)
