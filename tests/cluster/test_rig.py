"""The rig itself: pods that are processes, nodes that die, names, probes, tokens, and what is counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.client import Cluster, Write, address_in_pods, wait_for
from tests.cluster.rig import Rig
from tests.processes import wait_ended

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="pods have namespaces of their own, which root alone can make"
)

MAX = 2**31 - 1


def jobset(namespace: str, command: list[str]) -> dict[str, Any]:
    """Three Jobs of one pod each."""
    container = {"name": "host", "image": "none", "command": command, "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    pod = {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 5, "containers": [container]}
    job = {"completions": 1, "completionMode": "Indexed", "backoffLimit": MAX, "podReplacementPolicy": "TerminatingOrFailed", "template": {"spec": pod}}  # fmt: skip
    hosts = {"name": "host", "replicas": 3, "template": {"spec": job}}
    spec = {"network": {"publishNotReadyAddresses": True}, "replicatedJobs": [hosts]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "train", "namespace": namespace}, "spec": spec}  # fmt: skip


def pod(namespace: str, name: str, command: str, **more: Any) -> dict[str, Any]:
    spec = {key: more.pop(key) for key in ("restartPolicy", "volumes") if key in more}
    container = {"name": "main", "image": "none", "command": ["sh", "-c", command], **more}
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, "containers": [container]}}


def running(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Pods that run and are not about to go, by node."""
    found = [each for each in cluster.pods(namespace) if "deletionTimestamp" not in each["metadata"]]
    return {each["spec"]["nodeName"]: each for each in found if each["status"]["phase"] == "Running"}


def log(cluster: Cluster, namespace: str, name: str) -> str:
    return cluster.kubectl("logs", "-n", namespace, name)


def test_a_dead_node_takes_its_pod_along_and_no_other_and_the_replacement_runs_elsewhere(rig: Rig) -> None:
    cluster, namespace = rig.cluster, rig.namespace()
    nodes = {node.name: node for node in (rig.node(f"n{number}") for number in range(4))}
    cluster.apply(jobset(namespace, ["sh", "-c", "sleep 1000 & wait"]))
    wait_for("three pods on three nodes", lambda: len(running(cluster, namespace)) == 3)
    before = running(cluster, namespace)
    dead, *others = [nodes[name] for name in before]
    (spare,) = nodes.keys() - before.keys()
    alive = [psutil.Process(pid) for node in others for pid in node.pids()]
    gone = [psutil.Process(pid) for pid in dead.pids()]
    assert len(gone) == 3  # unshare, sh, sleep

    dead.kill()
    assert wait_ended(gone, timeout_s=5) == []
    assert cluster.patch(f"/api/v1/nodes/{dead.name}", {"spec": {"unschedulable": True}})
    lost = before[dead.name]["metadata"]["name"]
    cluster.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{lost}", {"gracePeriodSeconds": 0})

    wait_for("a replacement on the spare node", lambda: spare in running(cluster, namespace))
    after = running(cluster, namespace)
    assert after.keys() == (before.keys() | {spare}) - {dead.name}
    assert {name: after[name]["metadata"]["uid"] for name in after if name != spare} == {
        name: before[name]["metadata"]["uid"] for name in before if name != dead.name
    }
    assert all(each.is_running() for each in alive)
    deletion = Write("admin", "delete", "pods", namespace, lost, 200)
    wait_for("the audit log", lambda: deletion in cluster.writes("admin", "delete"))
    assert cluster.writes("admin", "delete").count(deletion) == 1


def test_a_ready_pod_has_a_name_in_others_and_loses_it_with_its_readiness(rig: Rig, tmp_path: Path) -> None:
    cluster, namespace = rig.cluster, rig.namespace()
    rig.node("n0")
    served = {"name": "served", "hostPath": {"path": str(tmp_path)}}
    probe = {"httpGet": {"path": "/pod/served/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    server = pod(
        namespace, "server", 'exec python3 -u -m http.server --bind $(POD_IP) 8000', ports=[{"name": "http", "containerPort": 8000}], readinessProbe=probe,
        env=[{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        volumes=[served], volumeMounts=[{"name": "served", "mountPath": "/pod/served"}],
    )  # fmt: skip
    names = "web", f"web.{namespace}", f"web.{namespace}.svc", f"web.{namespace}.svc.cluster.local"
    # Each round: how many of the names lead somewhere.
    count = f"while :; do n=0; for i in {' '.join(names)}; do getent hosts $i && n=$((n+1)); done; echo names=$n; sleep 0.2; done"
    service = {"selector": {"app": "server"}, "ports": [{"port": 8000}]}
    cluster.apply(
        server,
        pod(namespace, "client", count),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": namespace}, "spec": service},
    )

    def last_count() -> str:
        return log(cluster, namespace, "client").rpartition("names=")[2].strip()

    wait_for("both pods", lambda: len(cluster.pods(namespace)) == 2 and "names=" in log(cluster, namespace, "client"))
    wait_for("a probe", lambda: "404" in log(cluster, namespace, "server"))
    assert last_count() == "0"
    (tmp_path / "ready").touch()
    wait_for("names", lambda: last_count() == "4")
    (address,) = [address_in_pods(each["status"]["podIP"]) for each in cluster.pods(namespace, "app=server")]
    assert f"{address} " in log(cluster, namespace, "client")
    (tmp_path / "ready").unlink()
    wait_for("no names", lambda: last_count() == "0")
