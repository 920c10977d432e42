"""Faults of nodes, supervisors and the API server, with real supervisors and a dozen simulated hosts."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.cluster.client import Cluster, wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rig import Rig
from tests.cluster.simulated_release import SimulatedJob, SimulatedRelease

Start = Callable[..., SimulatedJob]


@pytest.fixture(scope="module", params=[16, pytest.param(132, marks=pytest.mark.nightly)], ids="{}-nodes".format)
def release(
    control_plane: Cluster, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[SimulatedRelease]:
    """Four nodes more than its jobs have hosts."""
    folder = tmp_path_factory.mktemp("release")
    rig = Rig(control_plane, folder)
    yield SimulatedRelease(rig, folder / "r", zygote, nodes=request.param, hosts=request.param - 4)
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
    assert len(job.places()) == len(before) - 1
    job.check(before, out={before[3], before[7]}, spares=spares, nodes=nodes)
    # Kubernetes' own controllers change nodes, too; what meets such a change is refused and done again.
    done = [(each.verb, each.resource, each.code) for each in job.writes() if each.code != 409]
    assert sorted(done) == [("delete", "pods", 200)] * 2 + [("patch", "nodes", 200)] * 2


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

    node = job.node_of(before[0])  # whose first rank begins each step
    job.simulated.cut(before[0])
    job.until_it_trains(after=generation)
    job.check(before, out={before[0]}, spares=spares, nodes={node})
    # Its kubelet would find only later that its pod is gone: until then it asks for its old place.
    job.simulated.mend(before[0])
    job.until_steps(6)
    assert job.generation() == generation + 1
    job.check(before, out={before[0]}, spares=spares, nodes={node})


@pytest.mark.parametrize("keep_state", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["kept", "lost"])
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


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_node_that_has_died_with_the_leader_is_taken_out_by_the_next_one_when_it_is_not_ready(start: Start) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    job.supervisors[0].kill()
    nodes = job.kill_nodes(before[0])
    job.supervisors[0].begin_again(keep_state=False)
    job.until_it_trains(after=generation)
    wait_for("the node is taken out", lambda: job.taken_out() == nodes, timeout_s=150)
    job.check(before, out={before[0]}, spares=spares, nodes=nodes)


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
    assert len([each for each in other.writes() if each.code == 200]) == 4


@pytest.mark.nightly
def test_a_node_that_others_change_all_the_time_is_taken_out_and_given_back(start: Start) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    (node,) = nodes = {job.node_of(before[6])}
    with changed_all_the_time(job, node):
        job.kill_nodes(before[6])
        job.until_it_trains(after=generation)
        job.check(before, out={before[6]}, spares=spares, nodes=nodes)
    assert {each.code for each in job.writes()} <= {200, 409}

    job.cluster.kubectl("uncordon", node)
    wait_for("it is given back", lambda: job.taken_out() == set())
    found = job.cluster.get(f"/api/v1/nodes/{node}")
    assert "unschedulable" not in found["spec"]
    assert "resiliency/reason" not in found["metadata"]["annotations"]


@pytest.mark.nightly
def test_a_token_that_is_no_good_any_more_is_read_again(start: Start) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    supervisor = job.supervisors[0]
    supervisor.token.write_text("expired")
    wait_for("it notices", lambda: "the lease cannot be renewed" in supervisor.log.read_text())
    nodes = job.kill_nodes(before[8])
    job.release.identity.write_token(supervisor.token)
    job.until_it_trains(after=generation)
    job.check(before, out={before[8]}, spares=spares, nodes=nodes)


@pytest.mark.nightly
def test_without_its_rights_the_swap_works_and_the_rest_is_done_when_they_are_back(start: Start) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{job.release.jobs}/rolebindings"
    binding = job.cluster.get(f"{bindings}/{job.release.system}-supervisor")
    del binding["metadata"]["resourceVersion"], binding["metadata"]["uid"]
    job.cluster.request("DELETE", f"{bindings}/{binding['metadata']['name']}")
    try:
        nodes = job.kill_nodes(before[1])
        job.until_it_trains(after=generation)
        wait_for("a refusal", lambda: 403 in {each.code for each in job.writes()})
    finally:
        job.cluster.request("POST", bindings, binding)
    job.check(before, out={before[1]}, spares=spares, nodes=nodes)
    assert "cannot delete resource" in job.logs()


@pytest.mark.parametrize("how", ["eviction", pytest.param("preemption", marks=pytest.mark.nightly)])
def test_a_pod_that_the_cluster_takes_is_swapped_and_its_node_stays_in_use(start: Start, how: str) -> None:
    job = start(spares=1)
    before, spares, generation = job.places(), job.ready_spares(), job.generation()
    if how == "eviction":
        job.evict(before[10])
    else:
        job.preempt(before[10])
    job.until_it_trains(after=generation)
    job.check(before, out={before[10]}, spares=spares, nodes=())
    assert job.writes() == []


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["suspend", "delete"])
def test_a_jobset_that_its_user_takes_away_and_brings_back_begins_again(start: Start, how: str) -> None:
    job = start(spares=1)
    generation = job.generation()
    job.take_away(delete=how == "delete")
    wait_for("no host is left", lambda: not job.simulated.ask(lambda: list(job.simulated.hosts)))
    wait_for("it waits", lambda: job.workload()["state"] == "waiting")
    job.bring_back()
    job.until_it_trains(after=generation, whole=13)
    job.check(places := job.places(), out=(), spares=(), nodes=())
    assert len(places) == 12
    assert job.writes() == []


@pytest.mark.nightly
def test_two_releases_on_the_same_nodes_leave_each_other_alone(
    start: Start, release: SimulatedRelease, zygote: Zygote, tmp_path: Path
) -> None:
    job = start(spares=1)
    small = SimulatedRelease(release.rig, tmp_path / "small", zygote, nodes=0, hosts=2, name="small-")
    with running(small, spares=0) as other:
        before, spares, generation = job.places(), job.ready_spares(), job.generation()
        theirs = other.places()
        nodes = job.kill_nodes(before[0])
        job.until_it_trains(after=generation)
        job.check(before, out={before[0]}, spares=spares, nodes=nodes)
        other.until_steps()
        other.check(theirs, out=(), spares=(), nodes=())
        assert other.generation() == 1 and other.writes() == []


@pytest.mark.long
def test_a_hot_swap_needs_no_api_server_and_one_that_has_forgotten_all_versions_is_followed_again(
    own_control_plane: ControlPlane, zygote: Zygote, tmp_path: Path
) -> None:
    rig = Rig(own_control_plane, tmp_path)
    release = SimulatedRelease(rig, tmp_path / "r", zygote, nodes=16, hosts=12)
    with running(release, spares=2) as job:
        before, spares, generation = job.places(), job.ready_spares(), job.generation()
        nodes = {job.node_of(before[4])}
        with own_control_plane.frozen_api_server():
            job.simulated.kill(before[4:5])
            job.until_steps_after(generation)
            assert job.writes() == []
        job.until_it_trains(after=generation)
        (new,) = set(job.places()) - set(before)
        job.check(before, out=before[4:5], spares={new}, nodes=nodes)

        with own_control_plane.without_api_server():
            job.until_steps(20)
            own_control_plane.forget_history()
        before, generation = job.places(), job.generation()
        drained = job.node_of(before[7])
        job.cluster.kubectl("cordon", drained)
        job.until_it_trains(after=generation)
        job.check(before, out=before[7:8], spares=set(spares) - {new}, nodes={*nodes, drained})


@contextlib.contextmanager
def running(release: SimulatedRelease, **values: Any) -> Iterator[SimulatedJob]:
    job = release.job(**values)
    try:
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def changed_all_the_time(job: SimulatedJob, node: str) -> Iterator[None]:
    """Somebody else writes an annotation of a node, as often as the API server lets them."""
    ended = threading.Event()

    def change() -> None:
        for number in itertools.count():
            job.cluster.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": {"test/number": str(number)}}})
            if ended.wait(0.02):
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
