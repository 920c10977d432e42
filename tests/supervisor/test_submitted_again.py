"""A job that the user submits again, as a JobSet of its own, is begun although the one before has ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from resiliency.supervisor.clusters.base import HostFacts
from resiliency.supervisor.model import HostState, WorkloadSpec, WorkloadState

from .simulated_service import SimHost, Whole, _AsCluster


@pytest.fixture
def whole() -> Iterator[Whole]:
    made = Whole(WorkloadSpec(name="job", replicas=2, dwell_s=1.0, start_timeout_s=6.0), 2)
    try:
        made.until(lambda: made.job is not None and made.job.state is WorkloadState.RUNNING)
        submit(made, "first")
        made.until(lambda: made.job.job == "first")
        yield made
    finally:
        made.close()


def submit(whole: Whole, job: str) -> None:
    whole.kept = ""
    whole.is_of(job)


def stop(whole: Whole) -> None:
    assert whole.service is not None and whole.service.stop_workload("job", "enough")
    whole.until(lambda: whole.job.state is WorkloadState.STOPPED)


def test_hosts_of_a_new_job_begin_an_ended_workload(whole: Whole) -> None:
    stop(whole)
    generation = whole.job.generation
    submit(whole, "second")
    whole.until(lambda: whole.job.state is WorkloadState.RUNNING and whole.job.job == "second")
    assert whole.job.generation > generation


def test_hosts_of_the_job_that_has_ended_do_not(whole: Whole) -> None:
    stop(whole)
    whole.is_of("first")
    whole.pass_time(5.0)
    assert whole.job.state is WorkloadState.STOPPED


def test_a_supervisor_that_was_started_again_knows_which_job_has_ended(whole: Whole) -> None:
    stop(whole)
    whole.kill()
    whole.start()
    whole.pass_time(5.0)
    assert whole.job.state is WorkloadState.STOPPED
    submit(whole, "second")
    whole.until(lambda: whole.job.state is WorkloadState.RUNNING)


def test_the_incident_of_a_job_that_was_deleted_is_over_when_the_next_one_is_there(whole: Whole) -> None:
    assert whole.service is not None
    for name in list(whole.hosts):
        whole.hosts.pop(name).up = False
        whole.service.cluster_says(HostFacts(host=name, node="n", is_gone=True))
    whole.until(lambda: whole.job.state is WorkloadState.WAITING)
    whole.pass_time(5.0)
    (incident,) = whole.service.controller.incidents.values()
    assert incident.is_open, "the cluster may make its hosts anew"
    for number in range(2):
        whole.add_host(f"new-{number}", of="second")
    whole.until(lambda: whole.job.state is WorkloadState.RUNNING and whole.job.job == "second")
    (incident,) = whole.service.controller.incidents.values()
    assert incident.outcome == "all hosts of job first were deleted"


@pytest.fixture
def crowded() -> Iterator[Whole]:
    """Two hosts train; two others are of a second job, which was submitted meanwhile."""
    made = Whole(WorkloadSpec(name="job", replicas=2, dwell_s=1.0, start_timeout_s=6.0, wait_timeout_s=600.0), 4)
    try:
        made.until(lambda: made.job is not None and made.job.state is WorkloadState.RUNNING)
        made.others = dict.fromkeys(made.hosts.keys() - set(made.job.places), "second")
        submit(made, "first")
        made.until(lambda: made.job.job == "first")
        yield made
    finally:
        made.close()


def test_a_host_of_another_job_takes_nobodys_place(crowded: Whole, caplog: pytest.LogCaptureFixture) -> None:
    lost, kept = crowded.job.places
    crowded.hosts[lost].up = False
    crowded.until(lambda: crowded.job.places == (kept,) and crowded.job.state is WorkloadState.RUNNING)
    crowded.pass_time(10.0)
    assert crowded.job.places == (kept,)
    said = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    assert (
        sum("belong to job second, and are not given to workload job, which is job first" in one for one in said) == 1
    )


def test_a_job_that_waits_for_the_end_of_another_is_begun_then(crowded: Whole) -> None:
    stop(crowded)
    crowded.until(lambda: crowded.job.state is WorkloadState.RUNNING and crowded.job.job == "second")
    assert set(crowded.job.places) == crowded.others.keys()
    generation = crowded.job.generation
    stop(crowded)
    crowded.pass_time(10.0)
    assert crowded.job.generation == generation, "the one that was stopped first is not begun again"


def test_two_jobs_that_come_together_are_not_mixed() -> None:
    made = Whole(WorkloadSpec(name="job", replicas=2, dwell_s=1.0, start_timeout_s=6.0), 0)
    try:
        names = [f"h-{number}" for number in range(4)]
        made.others = {"h-0": "bb", "h-1": "aa", "h-2": "bb", "h-3": "aa"}
        made.hosts.update({name: SimHost(made, name) for name in names})
        made.is_of("")
        made.until(lambda: made.job is not None and made.job.state is WorkloadState.RUNNING)
        assert {made.others[host] for host in made.job.places} == {"aa"}
    finally:
        made.close()


def test_the_job_that_was_submitted_first_is_begun_first(crowded: Whole) -> None:
    names = ["z-0", "z-1", "a-0", "a-1"]
    crowded.created = {"second": "2026-01-03T00:00:00Z", "zz": "2026-01-01T00:00:00Z", "aa": "2026-01-02T00:00:00Z"}
    for name in names:
        crowded.others[name] = "zz" if name.startswith("z") else "aa"
        crowded.add_host(name, of=crowded.others[name])
    submit(crowded, "first")
    crowded.pass_time(5.0)
    for job in ("zz", "aa", "second"):
        stop(crowded)
        crowded.until(lambda job=job: crowded.job.state is WorkloadState.RUNNING and crowded.job.job == job)


def test_a_job_with_enough_hosts_is_begun_before_one_that_lacks_some(crowded: Whole) -> None:
    crowded.created = {"second": "2026-01-03T00:00:00Z", "zz": "2026-01-01T00:00:00Z"}
    crowded.others["z-0"] = "zz"
    crowded.add_host("z-0", of="zz")
    submit(crowded, "first")
    crowded.pass_time(5.0)
    stop(crowded)
    crowded.until(lambda: crowded.job.state is WorkloadState.RUNNING and crowded.job.job == "second")


@pytest.mark.parametrize("exists", [True, False])
def test_a_job_all_of_whose_pods_are_deleted_keeps_its_turn_while_it_exists(crowded: Whole, exists: bool) -> None:
    assert crowded.service is not None
    crowded.wants_hosts = {"first"} if exists else set()
    lost = crowded.job.places
    for name in lost:
        crowded.hosts.pop(name).up = False
        crowded.service.cluster_says(HostFacts(host=name, node=f"n-{name}", is_gone=True))
    if not exists:
        crowded.until(lambda: crowded.job.state is WorkloadState.RUNNING and crowded.job.job == "second")
        return
    crowded.until(lambda: crowded.job.state is WorkloadState.WAITING)
    crowded.pass_time(30.0)
    assert crowded.job.job == "first" and not crowded.job.places
    for number in range(2):
        crowded.add_host(f"new-{number}", of="first")
    crowded.until(lambda: crowded.job.state is WorkloadState.RUNNING)
    assert crowded.job.job == "first" and set(crowded.job.places) == {"new-0", "new-1"}


def test_devices_are_compared_within_a_job(crowded: Whole) -> None:
    for name, host in crowded.hosts.items():
        host.devices = 4 if name in crowded.others else 8
    crowded.pass_time(10.0)
    assert crowded.service is not None
    assert {crowded.service.sensor.state_of(name) for name in crowded.hosts} == {HostState.READY}


@pytest.fixture
def names_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster says of each host what it belongs to."""
    monkeypatch.setattr(_AsCluster, "vouches", True)


def test_a_host_gets_no_ranks_before_the_cluster_has_said_to_which_job_it_belongs(
    names_hosts: None, crowded: Whole
) -> None:
    assert crowded.service is not None
    spare = next(iter(crowded.others))
    facts = crowded.service.jobs.facts[spare]
    crowded.service.jobs.take(replace(facts, is_gone=True))  # its watch is behind
    lost, kept = crowded.job.places
    crowded.hosts[lost].up = False
    crowded.until(lambda: crowded.job.places == (kept,) and crowded.job.state is WorkloadState.RUNNING)
    crowded.pass_time(10.0)
    assert crowded.job.places == (kept,)
    crowded.service.cluster_says(replace(facts, job="first"))
    crowded.until(lambda: set(crowded.job.places) == {kept, spare})


def test_the_time_to_wait_for_hosts_begins_when_the_job_is_submitted_or_goes_on(names_hosts: None) -> None:
    made = Whole(WorkloadSpec(name="job", replicas=2, min_replicas=2, dwell_s=1.0, wait_timeout_s=20.0), 0)
    try:
        for name in ("first", "suspended"):
            made.pass_time(60.0)
            made.add_host(name, of="first")
            made.pass_time(15.0)
            assert made.job.state is WorkloadState.WAITING
            if name == "first":
                made.hosts.pop(name).up = False
                assert made.service is not None
                made.service.cluster_says(HostFacts(host=name, node="n", is_gone=True))
        made.until(lambda: made.job.state is WorkloadState.STOPPED, within_s=15.0)
    finally:
        made.close()


@pytest.mark.parametrize("late_s", [0.0, 40.0])
def test_a_job_is_not_begun_on_spares_while_the_host_that_has_its_ranks_cannot_connect(
    names_hosts: None, late_s: float
) -> None:
    """The supervisor knows nothing of it, and the host has no certificate of it yet; nor has the spare for a while."""
    made = Whole(WorkloadSpec(name="job", replicas=1, dwell_s=1.0, start_timeout_s=6.0), 2)
    try:
        made.is_of("first")
        made.until(lambda: made.job is not None and made.job.state is WorkloadState.RUNNING)
        (trains,), generation = made.job.places, made.job.generation
        made.kill()
        made.journal.workloads.clear(), made.journal.plans.clear()
        made.journal.incidents.clear(), made.journal.hosts.clear()
        (spare,) = made.hosts.keys() - {trains}
        made.hosts[trains].up = False
        made.hosts[spare].up = not late_s
        made.start()
        made.pass_time(late_s)
        made.hosts[spare].up = True
        made.pass_time(60.0)
        assert not made.job.places
        made.hosts[trains].up = True
        made.until(lambda: made.job.state is WorkloadState.RUNNING)
        assert (made.job.places, made.job.generation) == ((trains,), generation)
    finally:
        made.close()


def forgets(made: Whole) -> None:
    """The supervisor dies, and its state with it."""
    made.kill()
    for kept in (made.journal.workloads, made.journal.plans, made.journal.incidents, made.journal.hosts):
        kept.clear()


@pytest.mark.parametrize("facts", ["at once", "late"])
def test_a_job_of_which_one_host_connects_late_is_taken_over_and_not_started_anew(
    names_hosts: None, facts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Whole(WorkloadSpec(name="job", replicas=2, dwell_s=1.0, start_timeout_s=6.0), 3)
    try:
        made.is_of("first")
        made.until(lambda: made.job is not None and made.job.state is WorkloadState.RUNNING and made.job.job == "first")
        places, generation = made.job.places, made.job.generation
        forgets(made)
        late = made.hosts[places[1]]
        late.up = False
        if facts == "late":
            monkeypatch.setattr(made, "is_of", lambda job: None)
        made.start()
        if facts == "late":
            made.pass_time(30.0)
            monkeypatch.undo()
            monkeypatch.setattr(_AsCluster, "vouches", True)
            made.is_of("first")
        made.pass_time(60.0)
        late.up = True
        made.until(lambda: made.job.state is WorkloadState.RUNNING)
        made.pass_time(10.0)
        assert (made.job.places, made.job.generation) == (places, generation)
    finally:
        made.close()
