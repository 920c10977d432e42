"""Faults of nodes, supervisors and the API server, with real supervisors and a dozen simulated hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.cluster.client import Cluster, wait_for
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
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    nodes = job.kill_nodes(before[3], before[7])
    job.until_it_trains(after=generation)
    assert len(job.places()) == 11
    job.check(before, out={before[3], before[7]}, spares=spares, nodes=nodes)
    assert sorted((each.verb, each.resource, each.code) for each in job.writes()) == [
        ("delete", "pods", 200),
        ("delete", "pods", 200),
        ("patch", "nodes", 200),
        ("patch", "nodes", 200),
    ]


def test_a_spare_that_dies_during_the_swap_is_replaced_by_the_other(start: Start) -> None:
    job = start(spares=2)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    nodes = job.kill_nodes(before[5])
    first = wait_for("a place of a spare", lambda: [each for each in job.hosts_with_places() if each in spares])
    nodes |= job.kill_nodes(*first)
    job.until_it_trains(after=generation + 1)
    job.check(before, out={before[5]}, spares=set(spares) - set(first), nodes=nodes)


def test_a_node_that_flaps_loses_nothing_and_one_that_is_swapped_stays_out(start: Start) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    for _ in range(2):  # shorter than the timeout
        job.simulated.cut(before[2])
        job.simulated.mend(before[2])
        job.until_steps(2)
    assert job.generation() == generation
    job.check(before, out=(), spares=(), nodes=())

    node = job.node_of(before[2])
    job.simulated.cut(before[2])
    job.until_it_trains(after=generation)
    job.check(before, out={before[2]}, spares=spares, nodes={node})
    # Its kubelet would find only later that its pod is gone: until then it asks for its old place.
    job.simulated.mend(before[2])
    job.until_steps(6)
    assert job.generation() == generation + 1
    job.check(before, out={before[2]}, spares=spares, nodes={node})


@pytest.mark.parametrize("keep_state", [True, False], ids=["kept", "lost"])
def test_a_supervisor_that_is_killed_with_a_node_goes_on_with_the_swap(start: Start, keep_state: bool) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    job.supervisors[0].kill()
    job.until_steps()
    nodes = job.kill_nodes(before[0])
    job.supervisors[0].begin_again(keep_state=keep_state)
    job.until_it_trains(after=generation)
    # Without its state it has never heard of that host: its pod may as well be one that still starts.
    job.check(before, out={before[0]}, spares=spares, nodes=nodes if keep_state else ())


def test_a_leader_that_is_stopped_past_its_lease_does_nothing_afterwards(start: Start) -> None:
    job = start(spares=2, supervisors=2)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    (leader,) = [each for each in job.supervisors if each.terms()]
    (other,) = [each for each in job.supervisors if each is not leader]
    leader.freeze()
    term = other.until_it_leads()
    assert term > leader.terms()[-1]
    wait_for("all hosts obey the other", lambda: job.highest_terms() == {term})
    nodes = job.kill_nodes(before[4])
    job.until_it_trains(after=generation)
    leader.thaw()
    wait_for("it stands by", lambda: "stands by" in leader.log.read_text())
    nodes |= job.kill_nodes(before[9])
    job.until_it_trains(after=generation + 1)
    job.check(before, out={before[4], before[9]}, spares=spares, nodes=nodes)
    assert job.highest_terms() == {term}
    assert leader.writes() == []
    assert len(other.writes()) == 4
