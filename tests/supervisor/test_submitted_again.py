"""A job that the user submits again, as a JobSet of its own, is begun although the one before has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resiliency.supervisor.model import WorkloadSpec, WorkloadState

from .simulated_service import Whole


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
