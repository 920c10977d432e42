"""Status and explain say what a workload waits for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resiliency.supervisor.clusters.base import HostFacts
from resiliency.supervisor.model import Host, HostState, WorkloadSpec, WorkloadState
from resiliency.supervisor.views import explain_view, now_of, status_view
from resiliency.supervisor.waiting import names, waits_for

from .simulated_service import Whole

SPEC = WorkloadSpec(name="job", replicas=4, min_replicas=2)


def host(name: str, state: HostState, reason: str = "") -> Host:
    return Host(name=name, incarnation="1", state=state, heard_s=0.0, reason=reason)


def test_each_host_that_is_not_ready_is_named_with_what_is_the_matter() -> None:
    hosts = [host("a", HostState.READY), host("b", HostState.JOINING), host("c", HostState.QUARANTINED, "disk full")]
    given = {"ready": ["a"], "hosts": hosts, "unheard": ["d"], "of_others": {}}
    said = waits_for(SPEC, has_pods=True, **given)
    assert said == (
        "1 of 4 hosts are ready, and 2 are enough; b is joining; c is quarantined (disk full); d has not connected yet"
    )


@pytest.mark.parametrize(
    "has_pods, said", [(True, "3 have no pod on a node: kubectl get pods says why"), (False, "3 have never connected")]
)
def test_hosts_of_which_nothing_is_known_are_counted(has_pods: bool, said: str) -> None:
    found = waits_for(SPEC, ready=["a"], hosts=[], unheard=[], has_pods=has_pods, of_others={"second": 2})
    assert said in found and "2 ready hosts belong to second, which is another job" in found


def test_of_many_hosts_the_first_are_named() -> None:
    assert names([f"h-{number}" for number in range(9)]).endswith("h-7 and 1 more")


@pytest.fixture
def whole() -> Iterator[Whole]:
    made = Whole(WorkloadSpec(name="job", replicas=2, min_replicas=2, dwell_s=1.0, start_timeout_s=6.0), 2)
    yield made
    made.close()


def reason(whole: Whole) -> str:
    assert whole.service is not None
    text: str = status_view(whole.service)["workloads"][0]["reason"]
    return text


def test_a_job_that_waits_for_a_host_says_so_in_status_and_in_explain(whole: Whole) -> None:
    assert whole.service is not None
    whole.hosts["h-1"].up = False
    whole.until(lambda: "1 of 2 hosts are ready; h-1 has not connected yet" in reason(whole))
    assert now_of(whole.service, "job") == f"job is waiting: {reason(whole)}"
    whole.bring_back("h-1")
    whole.until(lambda: whole.job is not None and whole.job.state is WorkloadState.RUNNING)
    assert reason(whole) == ""
    whole.lose_host("h-1")
    whole.until(lambda: whole.job.state is WorkloadState.WAITING)
    assert "1 of the 2 replicas" in reason(whole) and "h-1 is silent" in reason(whole)
    shown = explain_view(whole.service, max(whole.service.controller.incidents))
    assert shown is not None and shown["now"] == f"job is waiting: {reason(whole)}"


def test_who_waits_for_the_end_of_another_job_is_said(whole: Whole) -> None:
    assert whole.service is not None
    whole.until(lambda: whole.job is not None and whole.job.state is WorkloadState.RUNNING)
    whole.is_of("first")
    whole.until(lambda: whole.job.job == "first")
    whole.add_host("h-2", of="second")
    whole.until(lambda: reason(whole) == "hosts of second wait for the end of first")
    shown = {each["name"]: each for each in status_view(whole.service)["hosts"]}
    assert shown["h-2"]["reason"] == "of second, which waits" and not shown["h-2"]["spare"]
    whole.service.cluster_says(HostFacts(host="h-2", node="n", job="0123456789", job_name="llama"))
    assert reason(whole) == "hosts of llama (01234567) wait for the end of first"
