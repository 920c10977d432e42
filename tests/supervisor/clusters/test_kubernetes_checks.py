"""What a cluster lacks, as the supervisor and `resiliency doctor --cluster` say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from resiliency.supervisor.clusters.kubernetes.api import KubernetesApi
from resiliency.supervisor.clusters.kubernetes.checks import ClusterCheck, check_cluster

from .fake_api import FakeApi
from .servers import FakeServer

BUDGETS = "/apis/policy/v1/namespaces/jobs/poddisruptionbudgets"
OF_JOB, OF_ANOTHER = {"batch.kubernetes.io/job-name": "job"}, {"app": "another"}


def checks(fake: FakeApi, *budgets: tuple[str, dict[str, Any]]) -> dict[str, ClusterCheck]:
    """With a pod of a JobSet, and these budgets, by name."""

    async def work() -> dict[str, ClusterCheck]:
        server = FakeServer(fake)
        async with server:
            server.add_pod("a", server.add_node("n"))
            for name, spec in budgets:
                fake.put(BUDGETS, {"metadata": {"name": name}, "spec": spec})
            api = KubernetesApi(server.access)
            try:
                return {each.what: each for each in await check_cluster(api, namespace="jobs", lease="supervisor")}
            finally:
                await api.close()

    return asyncio.run(work())


def of(labels: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {"selector": {"matchLabels": labels}, **spec}


def test_a_cluster_that_has_everything_lacks_nothing(fake_api: FakeApi) -> None:
    found = checks(fake_api, ("good", of(OF_JOB, minAvailable=3)))
    assert not [each for each in found.values() if each.problem]


def test_budgets_that_would_never_allow_an_eviction_are_named_and_those_of_others_are_not(fake_api: FakeApi) -> None:
    found = checks(
        fake_api,
        ("share", of(OF_JOB, minAvailable="80%")),
        ("most", of(OF_JOB, maxUnavailable=1)),
        ("good", of(OF_JOB, minAvailable=3)),
        ("theirs", of(OF_ANOTHER, maxUnavailable="10%")),
    )
    problem = found["PodDisruptionBudgets in jobs"].problem
    assert problem.startswith("share (minAvailable: 80%), most (maxUnavailable: 1):") and "theirs" not in problem


@pytest.mark.parametrize(
    ("verb", "resource", "where"),
    [("list", "poddisruptionbudgets", "jobs"), ("patch", "jobsets", "jobs"), ("patch", "leases", "system"), ("patch", "nodes", "")],
)  # fmt: skip
def test_a_right_that_is_missing_is_named_with_the_role(
    fake_api: FakeApi, verb: str, resource: str, where: str
) -> None:
    fake_api.may_not = {(verb, resource)}
    (missing,) = [each for each in checks(fake_api).values() if each.problem]
    assert missing.what == f"right to {verb} {resource}" + (f" in {where}" if where else "")
    assert f"add it to the supervisor's {f'Role in {where}' if where else 'ClusterRole'}" in missing.remedy
