"""The project's charts, installed into a test's namespaces, with a training whose steps can be followed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.client import address_in_pods, wait_for
from tests.cluster.rig import ProcessNode, Rig
from tests.cluster.tools import REPOSITORY

__all__ = ["Release", "Step", "uninterrupted"]

#: The tests of the monitors' connections look at certificates.
_TRUSTING = ssl._create_unverified_context()
JOB = REPOSITORY / "tests" / "cluster" / "train_job.py"
TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Step:
    attempt: int
    number: int
    at_s: float


class Release:
    """Supervisors on nodes of their own, and hosts of a job.

    Args:
        folder: shared by all hosts, as a file system of a cluster is.
        script: what ranks run, with the folder and ``--steps``.
        more_nodes: beside those that the job needs.
        settings: further values of the supervisor's chart.
    """

    def __init__(
        self,
        rig: Rig,
        folder: Path,
        *,
        hosts: int,
        spares: int,
        steps: int,
        supervisors: int = 1,
        script: Path = JOB,
        more_nodes: int = 0,
        **settings: Any,
    ) -> None:
        self.rig, self.cluster, self.folder = rig, rig.cluster, folder
        self.hosts, self.spares = hosts, spares
        self.system, self.jobs = rig.namespace("system"), rig.namespace("jobs")
        for number in range(supervisors):
            rig.node(f"infra-{number}", gpus=0, labels={"infra": "yes"})
        self.nodes: dict[str, ProcessNode] = {}
        for number in range(hosts + spares + more_nodes):
            node = rig.node(f"gpu-{number}")
            self.nodes[node.name] = node
        self._install_supervisor(supervisors, settings)
        self.submit("train", folder, steps=steps, script=script)

    def _install_supervisor(self, replicas: int, settings: dict[str, Any]) -> None:
        values = {
            "replicaCount": replicas,
            "listen": "$(POD_IP):7600",
            "nodeSelector": {"infra": "yes"},
            "workload_name": "train",
            "workload_namespace": self.jobs,
            "num_dp_replicas": self.hosts,
            "num_nodes_per_dp": 1,
            "workers_per_host": 1,
            "min_num_dp_replicas": 1,
            "heartbeat_polling_period_s": 0.5,
            "heartbeat_timeout_s": TIMEOUT_S,
            "dwell_s": 2,
            "host_daemon": {"enabled": False},
            **settings,
        }
        self._helm("install", "supervisor", self.system, values)

    def submit(self, name: str, folder: Path, *, steps: int, script: Path = JOB) -> None:
        """Installs a job of this name, whose ranks write into the folder."""
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RESILIENCY_EVENTS_DIR": str(folder / "events"),
        }
        values = {
            "workload": {
                "image": "none",
                "script": [str(script), str(folder)],
                "flags": ["--steps", str(steps)],
                "num_dp_replicas": self.hosts,
                "num_nodes_per_dp": 1,
                "spares": self.spares,
                "workers_per_host": 1,
                "ram_disk": "",
                "save_timeout_s": 10,
                "watchdogs": ["disk"],
                "env": [{"name": name, "value": value} for name, value in variables.items()],
            },
            "infrastructure": {"supervisor_address": self.urls},
        }
        self._helm("install", name, self.jobs, values, chart="workload")

    @property
    def urls(self) -> str:
        services = self.cluster.get(f"/api/v1/namespaces/{self.system}/services")["items"]
        return ",".join(f"https://{each['metadata']['name']}.{self.system}:7600" for each in services)

    def _helm(self, verb: str, name: str, namespace: str, values: dict[str, Any], chart: str = "") -> None:
        folder = str(REPOSITORY / "helm" / (chart or name))
        self.cluster.helm(verb, name, folder, "-n", namespace, "-f", "-", input=json.dumps(values))

    def uninstall(self) -> None:
        for name, namespace in (("train", self.jobs), ("supervisor", self.system)):
            self.cluster.helm("uninstall", name, "-n", namespace, "--wait")

    def until_nothing_is_left(self) -> None:
        wait_for("nothing is left", lambda: not (left := self._left()) or _said(left))

    def _left(self) -> list[str]:
        """Objects in the namespaces, and rights in the cluster, that an uninstallation has left."""
        kinds = "jobsets,jobs,deployments,daemonsets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,leases,pods"
        names = ["configmap/kube-root-ca.crt", "serviceaccount/default"]
        found = []
        for namespace in (self.system, self.jobs):
            lines = self.cluster.kubectl("get", kinds, "-n", namespace, "-o", "name").split()
            found += [line for line in lines if line not in names]
        rights = self.cluster.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").split()
        return found + [line for line in rights if self.rig.name in line]

    # -- what is there ------------------------------------------------------------------------------------------------

    def pods(self) -> dict[str, Any]:
        """Pods of the job that run and are not about to go, by name."""
        found = [each for each in self.cluster.pods(self.jobs) if "deletionTimestamp" not in each["metadata"]]
        return {each["metadata"]["name"]: each for each in found if each["status"]["phase"] == "Running"}

    def uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods().items()}

    def status(self) -> dict[str, Any]:
        """What the supervisor that leads answers to ``resiliency supervisor status``."""
        return wait_for("a supervisor that leads", self._status)

    def _status(self) -> dict[str, Any]:
        secret = self.cluster.get(f"/api/v1/namespaces/{self.system}/secrets/supervisor-operator")["data"]["token"]
        headers = {"Authorization": f"Bearer {base64.b64decode(secret).decode().strip()}"}
        found: dict[str, Any] = {}
        for pod in self.cluster.pods(self.system):
            address = address_in_pods(pod["status"].get("podIP", ""))
            request = urllib.request.Request(f"https://{address}:7600/v1/status", headers=headers)
            with contextlib.suppress(OSError), urllib.request.urlopen(request, context=_TRUSTING, timeout=5) as answer:
                found = json.loads(answer.read())
        return found

    def host_of(self, node_rank: int) -> str:
        """The pod that has this place."""
        hosts = self.status()["hosts"]
        return next(each["name"] for each in hosts if each["node_rank"] == node_rank)

    def node_of(self, pod: str) -> ProcessNode:
        return self.nodes[self.pods()[pod]["spec"]["nodeName"]]

    def supervisor_log(self) -> str:
        names = [pod["metadata"]["name"] for pod in self.cluster.pods(self.system)]
        return "\n".join(self.cluster.kubectl("logs", "-n", self.system, name) for name in names)

    def writes(self) -> list[Any]:
        """What the supervisor has asked the API server to change, but for its Lease and reviews of tokens."""
        user = f"system:serviceaccount:{self.system}:supervisor"
        beside = ("leases", "tokenreviews", "selfsubjectaccessreviews")
        return [each for each in self.cluster.writes(user) if each.resource not in beside]

    # -- the training -------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        try:
            lines = (self.folder / "steps").read_text().rpartition("\n")[0].splitlines()
        except FileNotFoundError:
            return []
        words = (line.split() for line in lines)
        return [Step(int(attempt), int(step), float(at)) for attempt, step, at in words]

    def until_step(self, number: int, *, timeout_s: float = 120) -> Step:
        def reached() -> Step | None:
            found = [step for step in self.steps() if step.number >= number]
            return found[0] if found else None

        step = wait_for(f"step {number}", reached, timeout_s=timeout_s)
        assert step is not None
        return step

    def until_attempt_after(self, attempt: int, *, timeout_s: float = 60) -> Step:
        """The first step of a later attempt."""

        def reached() -> Step | None:
            return next((step for step in self.steps() if step.attempt > attempt), None)

        step = wait_for(f"a step after attempt {attempt}", reached, timeout_s=timeout_s)
        assert step is not None
        return step

    def result(self, *, timeout_s: float = 120) -> str:
        wait_for("the end of the training", (self.folder / "result").exists, timeout_s=timeout_s)
        return (self.folder / "result").read_text()

    def is_completed(self) -> bool:
        return self.has_condition("Completed")

    def has_condition(self, kind: str, jobset: str = "train") -> bool:
        path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.jobs}/jobsets/{jobset}"
        conditions = self.cluster.get(path).get("status", {}).get("conditions", [])
        return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def _said(left: list[str]) -> bool:
    raise OSError(f"there is still {left}")  # which the wait says at its end


def uninterrupted(folder: Path, *, ranks: int, steps: int) -> subprocess.Popen[bytes]:
    """Starts the same training without a cluster; its result is in ``folder/result``."""
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(JOB), str(folder)]
    return subprocess.Popen(
        [sys.executable, *command, "--steps", str(steps), "--devices", str(ranks)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
