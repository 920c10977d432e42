"""A supervisor whose state is lost, or is an old one, takes over ranks that run, and ends none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from resiliency.runtime.messages.monitor import Report
from resiliency.supervisor.adoption import Adoption, RunningGeneration
from resiliency.supervisor.model import WorkloadSpec, WorkloadState
from resiliency.supervisor.views import status_view

from .simulated_service import PERIOD_S, TIMEOUT_S, Journal, Whole

RUNNING = WorkloadState.RUNNING


def report(generation: int, node_rank: int, nodes: int, workload: str = "job") -> Report:
    return Report(number=0, workload=workload, generation=generation, node_rank=node_rank, nodes=nodes)


def test_a_whole_epoch_that_is_newer_than_the_stored_one_is_found() -> None:
    adoption = Adoption({"job": 3}, until_s=10.0)
    assert adoption.reported("a", report(4, 1, 2)) is None
    assert adoption.reported("b", report(4, 0, 2)) == RunningGeneration(workload="job", generation=4, places=("b", "a"))


def test_what_is_stored_already_or_of_a_job_that_is_not_known_here_is_no_find() -> None:
    adoption = Adoption({"job": 3}, until_s=10.0)
    assert adoption.reported("a", report(3, 0, 1)) is None
    assert adoption.reported("a", report(9, 0, 1, workload="other")) is None
    assert not adoption.holds_host("a", 0.0) and not adoption.holds_workload("job", 0.0)


def test_of_two_epochs_the_newest_is_waited_for() -> None:
    """Hosts of an generation that is over may be late to leave it."""
    adoption = Adoption({"job": 0}, until_s=10.0)
    adoption.reported("c", report(5, 0, 2))
    assert adoption.reported("a", report(4, 0, 1)) is None
    assert adoption.reported("b", report(5, 1, 2)) == RunningGeneration(workload="job", generation=5, places=("c", "b"))


def test_a_host_that_reports_something_else_since_is_counted_no_more() -> None:
    adoption = Adoption({"job": 0}, until_s=10.0)
    adoption.reported("a", report(4, 0, 2))
    adoption.reported("a", Report(number=1))
    assert adoption.reported("b", report(4, 1, 2)) is None


def test_hosts_are_held_until_they_report_and_no_longer_than_the_window() -> None:
    adoption = Adoption({"job": 0}, until_s=10.0)
    adoption.connected("new", 0)
    assert not adoption.holds_host("new", 0.0) and not adoption.holds_workload("job", 0.0)
    adoption.connected("old", 7)
    assert adoption.holds_host("old", 0.0) and adoption.holds_workload("job", 0.0)
    adoption.reported("old", Report(number=0))
    assert not adoption.holds_host("old", 0.0) and adoption.holds_workload("job", 9.9)
    assert not adoption.holds_workload("job", 10.0)


@pytest.fixture
def whole() -> Iterator[Whole]:
    made = Whole(WorkloadSpec(name="job", replicas=2, dwell_s=1.0, start_timeout_s=6.0, verify_timeout_s=3.0), 4)
    try:
        made.until(lambda: made.job is not None and made.job.state is RUNNING)
        yield made
    finally:
        made.close()


def told(whole: Whole) -> dict[str, list[Any]]:
    return {name: list(host.told) for name, host in whole.hosts.items()}


def swap(whole: Whole) -> None:
    """Has the first host of the job replaced, by a host that had no place before."""
    generation = whole.job.generation
    whole.lose_host(whole.job.places[0])
    whole.until(lambda: whole.job.generation > generation and whole.job.state is RUNNING and whole.job.incident is None)


def test_with_a_lost_state_training_notices_nothing(whole: Whole) -> None:
    swap(whole)
    before, known = whole.job, told(whole)
    whole.kill()
    whole.journal = Journal()
    whole.start()
    whole.until(lambda: whole.job is not None and whole.job.state is RUNNING)
    whole.pass_time(2 * (TIMEOUT_S + PERIOD_S))
    assert (whole.job.places, whole.job.generation) == (before.places, before.generation)
    assert told(whole) == known


def test_with_an_old_state_training_notices_nothing(whole: Whole) -> None:
    """As that of a replica which led before: it has other places for hosts that train, and none for one of them."""
    old = copy.deepcopy(whole.journal)
    swap(whole)
    before, known = whole.job, told(whole)
    whole.kill()
    whole.journal = old
    whole.start()
    whole.until(lambda: whole.job.generation == before.generation)
    whole.pass_time(2 * (TIMEOUT_S + PERIOD_S))
    assert (whole.job.places, whole.job.state) == (before.places, RUNNING)
    assert told(whole) == known


@pytest.mark.parametrize("keeps_state", [True, False])
@pytest.mark.parametrize(
    "sizes", [{"replicas": 1, "hosts_per_replica": 2}, {"replicas": 2, "hosts_per_replica": 3}, {"ranks_per_host": 8}]
)
def test_settings_of_other_sizes_leave_ranks_that_run_alone_and_it_is_said(
    whole: Whole, sizes: dict[str, int], keeps_state: bool, caplog: pytest.LogCaptureFixture
) -> None:
    swap(whole)
    before, known = whole.job, told(whole)
    whole.kill()
    if not keeps_state:
        whole.journal = Journal()
    whole.spec = replace(whole.spec, **sizes)
    whole.start()
    whole.until(lambda: whole.job is not None and whole.job.state is RUNNING)
    whole.pass_time(3 * (TIMEOUT_S + PERIOD_S))
    assert (whole.job.places, whole.job.replicas, told(whole)) == (before.places, 2, known)
    assert whole.service is not None
    (shown,) = status_view(whole.service)["workloads"]
    if "ranks_per_host" in sizes:  # that is for the hosts to know
        assert not shown["reason"]
        return
    said = (
        f"runs as 2 replicas of 1 hosts, and the settings say {whole.spec.replicas} of {whole.spec.hosts_per_replica}"
    )
    assert said in shown["reason"]
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    swap(whole)
    assert whole.job.replicas == 2


def test_a_job_that_is_begun_anew_has_the_sizes_of_the_settings(whole: Whole) -> None:
    whole.kill()
    whole.spec = replace(whole.spec, replicas=1, hosts_per_replica=2)
    whole.start()
    whole.until(lambda: whole.job is not None and whole.job.state is RUNNING)
    generation = whole.job.generation
    assert whole.service is not None and whole.service.stop_workload("job", "") and whole.service.start_workload("job")
    whole.until(lambda: whole.job.generation > generation and whole.job.state is RUNNING)
    assert (whole.job.replicas, len(whole.job.places)) == (1, 2)


def test_hosts_that_do_not_say_their_replicas_keep_their_number() -> None:
    found = RunningGeneration(workload="job", generation=4, places=("a", "b", "c"))
    assert [found.hosts_per_replica(usual) for usual in (1, 2, 3, 4)] == [1, 3, 3, 3]


def test_a_plan_of_the_old_state_is_over(whole: Whole) -> None:
    whole.hook_behaves = "hangs"
    whole.lose_host(whole.job.places[0])
    whole.until(lambda: whole.job.plan is not None)
    old = copy.deepcopy(whole.journal)
    whole.hook_behaves = "works"
    whole.until(lambda: whole.job.generation > 1 and whole.job.state is RUNNING and whole.job.incident is None)
    swap(whole)
    before, known = whole.job, told(whole)
    whole.kill()
    whole.journal = old
    whole.start()
    whole.until(lambda: whole.job.generation == before.generation)
    whole.pass_time(2 * (TIMEOUT_S + PERIOD_S))
    assert (whole.job.places, whole.job.plan, whole.job.incident) == (before.places, None, None)
    assert told(whole) == known


def test_after_a_takeover_the_next_loss_is_mended(whole: Whole) -> None:
    whole.kill()
    whole.journal = Journal()
    whole.start()
    whole.until(lambda: whole.job is not None and whole.job.state is RUNNING)
    swap(whole)
    assert whole.job.generation == 2


def test_ranks_of_which_a_host_is_gone_are_placed_anew_above_their_generation(whole: Whole) -> None:
    generation = whole.job.generation
    whole.hosts[whole.job.places[0]].up = False
    whole.kill()
    whole.journal = Journal()
    whole.start()
    whole.until(lambda: whole.job is not None and whole.job.state is RUNNING)
    assert whole.job.generation > generation
