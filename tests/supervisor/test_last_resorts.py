"""What is done when neither restarts nor other hosts help: what the cluster was found able to, each once, then no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resiliency.runtime.messages.observations import ObservationKind
from resiliency.supervisor.model import Incident, RemedyKind, Workload, WorkloadSpec, WorkloadState
from resiliency.supervisor.policy import Situation, last_resort, problem_of

from .simulated_service import Whole

RUNNING = WorkloadState.RUNNING
RENEW_HOSTS, RENEW_JOB, STOP = RemedyKind.RENEW_HOSTS, RemedyKind.RENEW_JOB, RemedyKind.STOP
SPEC = WorkloadSpec(name="job", replicas=2, min_replicas=2, max_in_job_restarts=0, max_workload_restarts=0, dwell_s=1.0, start_timeout_s=6.0)  # fmt: skip


@pytest.mark.parametrize(
    ("possible", "chosen"),
    [((), STOP), ((RENEW_HOSTS,), RENEW_HOSTS), ((RENEW_JOB,), RENEW_JOB), ((RENEW_HOSTS, RENEW_JOB), RENEW_HOSTS)],
)
def test_the_mildest_that_is_possible_is_chosen_and_no_other_is_allowed(
    possible: tuple[RemedyKind, ...], chosen: RemedyKind
) -> None:
    incident = Incident(number=1, workload="job", opened_at_s=0.0, opened_at=0.0)
    workload = Workload(spec=SPEC, places=("a", "b"))
    situation = Situation(workload=workload, incident=incident, observations=(), out=(), spares=(), resorts=possible)
    remedy = last_resort(situation, "nothing helps")
    assert (remedy.kind, remedy.reason) == (chosen, "nothing helps") and problem_of(remedy, situation) == ""
    for other in {RENEW_HOSTS, RENEW_JOB} - set(possible):
        assert "cannot do it" in problem_of(replace(remedy, kind=other), situation)


@pytest.mark.parametrize("restarts", [0, 100], ids=["no host can be replaced", "too many plans"])
@pytest.mark.parametrize("can", [(), (RENEW_HOSTS,), (RENEW_HOSTS, RENEW_JOB)])
def test_each_is_taken_once_and_then_the_job_is_given_up(
    can: tuple[RemedyKind, ...], restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Whole(replace(SPEC, max_in_job_restarts=restarts, max_workload_restarts=restarts), 2)
    try:
        whole.can = can
        whole.is_of("train")
        whole.until(lambda: whole.job is not None and whole.job.state is RUNNING and whole.job.job)
        generation = whole.job.generation
        monkeypatch.setattr(whole, "trains", lambda place: False)
        whole.observed(whole.job.places[0], ObservationKind.WORKER_LOST, rank=0)
        whole.until(lambda: whole.job.state is WorkloadState.STOPPED, within_s=3000)
        whole.pass_time(2.0)
        assert [what for _, what, _ in whole.told_last] == [str(kind).replace("_", " ") for kind in can] + ["give up"]
        assert whole.job.resorts == can and whole.job.generation >= generation + len(can)
        assert all(job == "train" and "seen last" in reason for job, _, reason in whole.told_last)
    finally:
        whole.close()


def test_a_job_for_whose_end_another_one_waits_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Whole(SPEC, 2)
    try:
        whole.can = RENEW_HOSTS, RENEW_JOB
        whole.is_of("train")
        whole.until(lambda: whole.job is not None and whole.job.state is RUNNING and whole.job.job)
        whole.add_host("waits", of="second")
        monkeypatch.setattr(whole, "trains", lambda place: False)
        whole.observed(whole.job.places[0], ObservationKind.WORKER_LOST, rank=0)
        whole.until(lambda: whole.job.state is WorkloadState.STOPPED, within_s=3000)
        whole.pass_time(2.0)
        assert [what for _, what, _ in whole.told_last] == ["renew hosts", "give up"]
    finally:
        whole.close()


def test_no_host_has_ranks_meanwhile_and_after_training_for_long_they_are_there_again() -> None:
    whole = Whole(replace(SPEC, healthy_s=60.0), 2)
    try:
        whole.can = (RENEW_HOSTS,)
        whole.is_of("train")
        whole.until(lambda: whole.job is not None and whole.job.state is RUNNING and whole.job.job)
        for _ in range(2):
            told = len(whole.told_last)
            whole.observed(whole.job.places[0], ObservationKind.WORKER_LOST, rank=0)
            whole.until(lambda told=told: len(whole.told_last) > told)  # type: ignore[misc]
            whole.pass_time(1.0)
            assert whole.job.places == () and all(host.place is None for host in whole.hosts.values())
            whole.until(lambda: whole.job.state is RUNNING and whole.job.resorts == ())
        assert [what for _, what, _ in whole.told_last] == ["renew hosts"] * 2
    finally:
        whole.close()
