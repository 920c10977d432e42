"""The charts on a real API server: what it takes, what upgrades keep, and what rights are worth."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.chart.rendering import CHARTS, Helm, Json
from tests.chart.test_supervisor_chart import CASES as SUPERVISORS
from tests.chart.test_workload_chart import CASES as WORKLOADS
from tests.cluster.client import Cluster, wait_for

pytestmark = pytest.mark.long


@pytest.fixture
def namespaces(control_plane: Cluster) -> Iterator[tuple[str, str]]:
    """Of the supervisor and of the hosts."""
    name = f"c{uuid.uuid4().hex[:6]}"
    made = f"{name}-sup", f"{name}-jobs"
    for each in made:
        control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": each}})
    yield made
    for each in made:
        control_plane.request("DELETE", f"/api/v1/namespaces/{each}")


def test_the_server_knows_every_field(helm4: Helm, control_plane: Cluster, namespaces: tuple[str, str]) -> None:
    own, jobs = namespaces
    found = helm4.render("gcs-fuse", {"bucket": "b"}, name="ckpts", namespace=jobs)
    for number, (values, _) in enumerate(SUPERVISORS.values()):
        values = {key: value for key, value in values.items() if key != "job_namespace"}
        given = values | {"workload_namespace": jobs}
        found += helm4.render("supervisor", given, name=f"s{number}", namespace=own)
    for number, (values, _) in enumerate(WORKLOADS.values()):
        found += helm4.render("workload", values, name=f"w{number}", namespace=jobs)
    # Those of the Prometheus operator are not there, and pods wait for their ServiceAccounts.
    known = [each for each in found if each["kind"] not in ("ServiceMonitor", "PrometheusRule", "Pod")]
    assert len(known) > 150
    assert_taken(control_plane, known)


def assert_taken(control_plane: Cluster, objects: list[Json]) -> None:
    """The API server would take them, and knows each field."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    words = "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"
    assert control_plane.kubectl(*words, input=text).count("serverside-applied") == len(objects)


@pytest.mark.parametrize("version", ["helm", "helm3"])
def test_upgrades_keep_certificate_and_token_and_an_uninstall_leaves_nothing(
    control_plane: Cluster, namespaces: tuple[str, str], version: str
) -> None:
    own, jobs = namespaces
    helm = getattr(control_plane, version)
    words = "supervisor", str(CHARTS / "supervisor"), "-n", own, "--set", f"workload_namespace={jobs}"

    def secrets() -> dict[str, dict[str, str]]:
        items = control_plane.get(f"/api/v1/namespaces/{own}/secrets")["items"]
        return {each["metadata"]["name"]: each["data"] for each in items if each["type"] != "helm.sh/release.v1"}

    # The server lists a new kind some seconds after it takes the first object.
    wait_for("JobSet", lambda: "has no JobSet" not in helm("install", *words, "--dry-run=server"))
    helm("install", *words)
    before = secrets()
    assert before.keys() == {"supervisor-tls", "supervisor-operator"}
    helm("upgrade", *words, "--set", "heartbeat_timeout_s=20")
    assert secrets() == before
    helm("upgrade", *words, "--set", "tls.dnsNames={s.example}")
    assert secrets()["supervisor-operator"] == before["supervisor-operator"]
    assert secrets()["supervisor-tls"] != before["supervisor-tls"]
    bundle = control_plane.get(f"/api/v1/namespaces/{jobs}/configmaps/supervisor-ca")["data"]["ca.crt"]
    assert bundle != ""
    helm("rollback", "supervisor", "1", "-n", own)
    helm("uninstall", "supervisor", "-n", own)
    left = control_plane.kubectl(
        "get", "all,secrets,roles,rolebindings,netpol,pdb,cm", "-n", own, "-l", "app.kubernetes.io/instance=supervisor", "-o", "name"
    )  # fmt: skip
    remaining = [
        each for each in left.splitlines() if not each.startswith(("pod/", "replicaset", "controllerrevision"))
    ]
    assert remaining == []
    names = control_plane.get("/apis/rbac.authorization.k8s.io/v1/clusterroles")["items"]
    assert not [each for each in names if each["metadata"]["name"].startswith(own)]


def test_the_supervisor_may_do_what_it_does_and_hosts_may_do_nothing(
    control_plane: Cluster, namespaces: tuple[str, str]
) -> None:
    own, jobs = namespaces
    control_plane.helm(
        "install", "supervisor", str(CHARTS / "supervisor"), "-n", own, "--set", f"workload_namespace={jobs}"
    )
    control_plane.helm("install", "train", str(CHARTS / "workload"), "-n", jobs, "--set", "workload.image=i")

    def may(account: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
        resource, _, group = resource.partition(".")
        resource, _, part = resource.partition("/")
        asked = {
            "verb": verb,
            "group": group,
            "resource": resource,
            "subresource": part,
            "namespace": namespace,
            "name": name,
        }
        review = {"spec": {"user": f"system:serviceaccount:{account}", "resourceAttributes": asked}}
        answer = control_plane.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    supervisor = f"{own}:supervisor"
    for verb, *what in [
        ("patch", "nodes"),
        ("create", "tokenreviews.authentication.k8s.io"),
        ("delete", "pods", jobs),
        ("patch", "jobs.batch", jobs),
        ("watch", "jobsets.jobset.x-k8s.io", jobs),
        ("patch", "jobsets.jobset.x-k8s.io", jobs),
        ("list", "poddisruptionbudgets.policy", jobs),
        ("create", "leases.coordination.k8s.io", own),
        ("patch", "leases.coordination.k8s.io", own, "supervisor"),
    ]:
        assert may(supervisor, verb, *what), (verb, what)
    for verb, *what in [
        ("delete", "nodes"),
        ("patch", "nodes/status"),
        ("delete", "pods", own),
        ("delete", "pods", "default"),
        ("create", "pods", jobs),
        ("patch", "pods", jobs),
        ("patch", "pods/status", jobs),
        ("create", "pods/exec", jobs),
        ("delete", "jobsets.jobset.x-k8s.io", jobs),
        ("get", "secrets", own),
        ("get", "secrets", jobs),
        ("patch", "leases.coordination.k8s.io", own, "another"),
        ("patch", "leases.coordination.k8s.io", "kube-system", "supervisor"),
    ]:
        assert not may(supervisor, verb, *what), (verb, what)
    for account in f"{own}:supervisor-node", f"{jobs}:train":
        for verb, *what in [
            ("get", "pods", jobs),
            ("get", "nodes"),
            ("get", "configmaps", jobs),
            ("get", "secrets", own),
        ]:
            assert not may(account, verb, *what), (account, verb, what)
