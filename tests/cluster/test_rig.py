"""The rig itself: pods that are processes, nodes that die, names, probes, tokens, and what is counted."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.client import ApiError, Cluster, CommandFailed, Write, address_in_pods, wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rig import Rig
from tests.processes import wait_ended

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
    spec = {key: more.pop(key) for key in ("restartPolicy", "terminationGracePeriodSeconds", "volumes") if key in more}
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
    probe = {
        "httpGet": {"path": "/pod/served/ready", "port": "http"},
        "initialDelaySeconds": 2,
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
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
    assert "names=4" not in log(cluster, namespace, "client")
    (tmp_path / "ready").touch()
    wait_for("names", lambda: last_count() == "4")
    (address,) = [address_in_pods(each["status"]["podIP"]) for each in cluster.pods(namespace, "app=server")]
    assert f"{address} " in log(cluster, namespace, "client")
    (tmp_path / "ready").unlink()
    wait_for("no names", lambda: last_count() == "0")


def test_a_container_that_fails_starts_again_in_its_pod_and_the_pod_ends_with_its_last_code(rig: Rig) -> None:
    cluster, namespace = rig.cluster, rig.namespace()
    rig.node("n0")
    state = {
        "volumes": [{"name": "state", "emptyDir": {}}],
        "volumeMounts": [{"name": "state", "mountPath": "/pod/state"}],
    }
    count = "echo x >> /pod/state/starts; echo process $$ of $(hostname); exec test $(wc -l < /pod/state/starts) = 3"
    dead = {"httpGet": {"path": "/", "port": 9}, "periodSeconds": 1, "failureThreshold": 1}
    cluster.apply(
        pod(namespace, "fails", count, restartPolicy="OnFailure", **state),
        pod(namespace, "never", "exit 3", restartPolicy="Never"),
        pod(namespace, "frozen", "sleep 1000 & wait", terminationGracePeriodSeconds=1, livenessProbe=dead),
    )

    def status(name: str) -> Any:
        return cluster.pods(namespace, f"app={name}")[0]["status"]

    def first(name: str) -> Any:
        return status(name)["containerStatuses"][0]

    wait_for("its end", lambda: status("fails")["phase"] == "Succeeded")
    assert first("fails")["restartCount"] == 2
    assert log(cluster, namespace, "fails").splitlines() == ["process 1 of fails"] * 3
    wait_for("failure", lambda: status("never")["phase"] == "Failed")
    assert first("never")["state"]["terminated"]["exitCode"] == 3
    wait_for("a restart by the liveness probe", lambda: first("frozen")["restartCount"] > 0)


def test_a_pod_has_its_identity_and_ends_in_good_order_when_it_is_deleted(rig: Rig) -> None:
    cluster, namespace = rig.cluster, rig.namespace()
    node = rig.node("n0")
    cluster.kubectl("create", "configmap", "settings", "-n", namespace, "--from-literal=colour=blue")
    token = {"serviceAccountToken": {"path": "token", "audience": "supervisor", "expirationSeconds": 600}}
    script = """
        trap 'echo saved > /pod/state/saved; exit 0' TERM
        echo $(cat /pod/settings/colour) $NODE $COLOUR
        cd /var/run/secrets/kubernetes.io/serviceaccount; echo $(ls) $(cat namespace); echo TOKEN=$(cat token)
        command -v resiliency && python -c 'import resiliency' && touch /tmp/there && echo imported
        old=$(cat /etc/resiliency/token/token); touch -d @0 /etc/resiliency/token/token
        while [ "$old" = "$(cat /etc/resiliency/token/token)" ]; do sleep 0.1; done; echo BOUND=$(cat /etc/resiliency/token/token)
        sleep 1000 & wait
    """
    mounts = {"token": "/etc/resiliency/token", "settings": "/pod/settings", "state": "/pod/state", "scratch": "/tmp"}
    cluster.apply(
        pod(
            namespace, "host", script,
            env=[{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}}],
            volumes=[{"name": "token", "projected": {"sources": [token]}}, {"name": "settings", "configMap": {"name": "settings"}}, {"name": "state", "emptyDir": {}}, {"name": "scratch", "emptyDir": {}}],
            volumeMounts=[{"name": name, "mountPath": path} for name, path in mounts.items()],
        )
    )  # fmt: skip

    def said(prefix: str) -> str:
        return next((line for line in log(cluster, namespace, "host").splitlines() if line.startswith(prefix)), "")

    bound = wait_for("a new token", lambda: said("BOUND=")).removeprefix("BOUND=")
    assert said(f"blue {node.name} blue") and said("imported")
    assert said(f"ca.crt namespace token {namespace}")
    claims = json.loads(base64.urlsafe_b64decode(bound.split(".")[1] + "=="))
    assert claims["aud"] == ["supervisor"]
    assert (claims["kubernetes.io"]["node"]["name"], claims["kubernetes.io"]["pod"]["name"]) == (node.name, "host")
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    me = cluster.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review, token=said("TOKEN=")[6:])
    assert me["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:default"

    assert node.run_in(namespace, "host", "sh", "-c", "hostname; echo $NODE") == f"host\n{node.name}\n"
    cluster.kubectl("delete", "pod", "host", "-n", namespace)
    assert [path.read_text() for path in node.folder.glob("*/volumes/state/saved")] == ["saved\n"]


def test_simulated_pods_run_and_end_as_a_test_says(rig: Rig) -> None:
    cluster, namespace = rig.cluster, rig.namespace()
    name = rig.simulated_node("k0")
    cluster.apply(pod(namespace, "one", "none", restartPolicy="Never"))
    wait_for("it runs", lambda: name in running(cluster, namespace))
    cluster.kubectl("annotate", "pod", "one", "-n", namespace, "test/fail=1")
    wait_for("it fails", lambda: cluster.pods(namespace)[0]["status"]["phase"] == "Failed")


@pytest.mark.long
def test_pods_live_on_while_the_api_server_is_away(own_control_plane: ControlPlane, rig: Rig) -> None:
    cluster, namespace = own_control_plane, rig.namespace()
    node = rig.node("n0")
    cluster.apply(pod(namespace, "before", "sleep 1000 & wait"))
    wait_for("it runs", lambda: running(cluster, namespace))
    processes = [psutil.Process(pid) for pid in node.pids()]
    uid = cluster.pods(namespace)[0]["metadata"]["uid"]
    for absence in cluster.without_api_server, cluster.frozen_api_server:
        with absence(), pytest.raises(OSError):
            cluster.request("GET", "/readyz", timeout_s=0.5)
    cluster.apply(pod(namespace, "after", "exit 0", restartPolicy="Never"))
    wait_for("another", lambda: cluster.pods(namespace, "app=after")[0]["status"]["phase"] == "Succeeded")
    assert cluster.pods(namespace, "app=before")[0]["metadata"]["uid"] == uid
    assert all(each.is_running() for each in processes)


def test_a_refusal_says_why(control_plane: Cluster) -> None:
    with pytest.raises(CommandFailed, match='namespaces "none" not found'):
        control_plane.kubectl("get", "namespace", "none")
    with pytest.raises(ApiError, match="Unauthorized"):
        control_plane.request("GET", "/api/v1/nodes", token="none")
    for helm in control_plane.helm, control_plane.helm3:
        with pytest.raises(CommandFailed, match="not-there"):
            helm("template", "not-there")
