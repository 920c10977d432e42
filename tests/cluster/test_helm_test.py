"""``helm test`` of the supervisor's chart, run for real: it succeeds, and where something is broken its log names that."""

from __future__ import annotations

import pytest

from tests.cluster.client import CommandFailed
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rig import Rig
from tests.cluster.tools import REPOSITORY


@pytest.mark.long
@pytest.mark.timeout(300)
def test_helm_test_succeeds_and_names_what_is_broken(own_control_plane: ControlPlane, rig: Rig) -> None:
    cluster, system, jobs = rig.cluster, rig.namespace("system"), rig.namespace("jobs")
    rig.node("infra", gpus=0)
    given = [f"workload_namespace={jobs}", "listen=$(POD_IP):7600", "host_daemon.enabled=false"]
    words = [word for each in given for word in ("--set", each)]
    cluster.helm("install", "supervisor", str(REPOSITORY / "helm" / "supervisor"), "-n", system, "--wait", *words)
    role = f"{system}-supervisor"

    def why(pod: str, helm: str) -> str:
        """What the log says after a test that has failed, by the command that the chart's notes name."""
        with pytest.raises(CommandFailed, match=pod):
            getattr(cluster, helm)("test", "supervisor", "-n", system, "--timeout", "20s")
        of_tests = "app.kubernetes.io/instance=supervisor,app.kubernetes.io/component=test"
        return " ".join(cluster.kubectl("-n", system, "logs", "-l", of_tests, "--tail", "-1").split())

    for helm in cluster.helm, cluster.helm3:
        assert "Succeeded" in helm("test", "supervisor", "-n", system, timeout_s=130)
    assert "supervisor-test" not in cluster.kubectl("get", "pods", "-n", system)

    # The Service, and with it the name, of the one that leads; of the other one, too.
    cluster.kubectl("delete", "service", "-n", system, "supervisor-0", "supervisor-1")
    assert f"no supervisor answers at https://supervisor-0.{system}:7600" in why("supervisor-test", "helm")

    rules = [{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch"]}]
    cluster.request("PATCH", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}", rules, content_type="application/json-patch+json")  # fmt: skip
    said = why("supervisor-test-cluster", "helm3")
    assert "right to patch nodes" in said and "add it to the supervisor's ClusterRole" in said

    cluster.kubectl("delete", "crd", "jobsets.jobset.x-k8s.io")
    said = why("supervisor-test-cluster", "helm")
    assert "JobSet is not installed" in said and "torch" not in said  # which is about a host
