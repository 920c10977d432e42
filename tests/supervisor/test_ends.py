"""A job that was stopped stays so although every state of a supervisor is lost: the cluster keeps that with the job."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from resiliency.supervisor.ends import ends_of
from resiliency.supervisor.model import WorkloadSpec, WorkloadState

from .simulated_service import Journal, Whole

RUNNING, STOPPED = WorkloadState.RUNNING, WorkloadState.STOPPED


@pytest.fixture
def whole() -> Iterator[Whole]:
    made = Whole(WorkloadSpec(name="job", replicas=2, dwell_s=1.0, start_timeout_s=6.0), 2)
    try:
        made.is_of("train")
        made.until(lambda: made.job is not None and made.job.state is RUNNING and made.job.job == "train")
        yield made
    finally:
        made.close()


def stop(whole: Whole, *, by_hand: bool = True) -> None:
    assert whole.service is not None
    if by_hand:
        assert whole.service.stop_workload("job", "enough")
    else:
        whole.service.controller.stop("job", "nothing helps", whole.service.now_s(), 0.0)
    whole.until(lambda: whole.kept != "")


def begin_with(whole: Whole, journal: Journal) -> None:
    whole.kill()
    whole.journal = journal
    whole.start()


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("state", ["lost", "older"])
def test_a_stopped_job_is_not_begun_by_a_supervisor_that_never_heard_of_it(
    whole: Whole, state: str, by_hand: bool
) -> None:
    older = copy.deepcopy(whole.journal)
    stop(whole, by_hand=by_hand)
    generation = whole.job.generation
    begin_with(whole, Journal() if state == "lost" else older)
    whole.pass_time(30.0)
    assert (whole.job.state, whole.job.by_hand) == (STOPPED, by_hand)
    assert whole.job.reason == ("enough" if by_hand else "nothing helps") and whole.job.generation >= generation
    assert all(host.place is None for host in whole.hosts.values())
    assert whole.service is not None and whole.service.start_workload("job")
    whole.until(lambda: whole.job.state is RUNNING)
    assert whole.job.generation > generation
    whole.until(lambda: not whole.kept)


@pytest.mark.parametrize("state", ["lost", "kept"])
def test_a_job_that_was_started_since_is_not_stopped(whole: Whole, state: str) -> None:
    stop(whole)
    kept = whole.kept
    assert whole.service is not None and whole.service.start_workload("job")
    whole.until(lambda: whole.job.state is RUNNING)
    generation, whole.kept = whole.job.generation, kept  # the cluster was away, and was not told
    begin_with(whole, Journal() if state == "lost" else whole.journal)
    whole.until(lambda: whole.job is not None and whole.job.state is RUNNING)
    whole.pass_time(20.0)
    assert (whole.job.generation, whole.job.state) == (generation, RUNNING)
    whole.until(lambda: not whole.kept)


def test_a_job_that_is_stopped_before_it_has_hosts_is_that_of_the_hosts_there_are() -> None:
    made = Whole(WorkloadSpec(name="job", replicas=3), 2)
    try:
        made.is_of("train")
        made.pass_time(2.0)
        assert made.service is not None and made.service.stop_workload("job", "enough")
        made.until(lambda: made.kept != "")
        (end,) = ends_of(made.kept)
        assert (end.workload, end.by_hand, end.reason) == ("job", True, "enough")
    finally:
        made.close()


@pytest.mark.parametrize("text", ["{", "3", "[{}]", '[{"workload": "job"}]'])
def test_a_text_that_somebody_else_has_written_is_replaced(
    whole: Whole, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole.kill()
    whole.kept = text
    whole.start()
    whole.until(lambda: not whole.kept)
    assert "cannot be read" in caplog.text and whole.job.state is RUNNING
