"""What one test has in the shared cluster: namespaces and nodes that no pod of another test comes to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.cluster.client import ApiError, Cluster, CommandFailed, wait_for
from tests.cluster.tools import REPOSITORY
from tests.patience import PATIENCE
from tests.processes import descendant_pids

__all__ = ["ProcessNode", "Rig"]

_NONE: Mapping[str, str] = MappingProxyType({})


class ProcessNode:
    """A node whose pods are processes of this machine."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._cluster = cluster
        folder.mkdir()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        module = "tests.cluster.process_kubelet"
        with open(self.folder / "kubelet.log", "ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", module, str(self._cluster.folder), self.name, str(self.folder)],
                cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def pids(self) -> list[int]:
        """All processes of its pods, as this machine numbers them, and their parents up to the kubelet."""
        return descendant_pids(self._process.pid)

    def run_in(self, namespace: str, pod: str, *command: str, timeout_s: float = 60) -> str:
        """What a command prints in the first container of a pod, with its files and variables, as ``kubectl exec`` would.

        Raises:
            CommandFailed: it did not end with 0.
        """
        found = self._cluster.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        container = found["spec"]["containers"][0]["name"]
        pid = (self.folder / found["metadata"]["uid"] / f"{container}.pid").read_text()
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        enter = ["nsenter", "--target", pid, "--mount", "--pid", "--uts", "env", "-i", *filter(None, words)]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=PATIENCE * timeout_s)
        if done.returncode:
            raise CommandFailed(f"{' '.join(command)} in {pod} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def kill(self) -> None:
        """All its processes are gone at once, and nobody is told. The API server finds out after 45 s."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def reboot(self) -> None:
        """Kills it, and starts it with another boot id; pods that are still bound to it start again."""
        self.kill()
        self._process = self._start()


class Rig:
    """Makes namespaces and nodes for a test, and removes them. One thread, which must live as long as the nodes."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        #: The value of the label ``test`` of its nodes, and how all names of its namespaces and nodes begin.
        self.name = f"t{uuid.uuid4().hex[:6]}"
        self._folder = folder
        #: What is to be removed, in this order.
        self._objects: list[str] = []
        self._nodes: list[ProcessNode] = []

    def namespace(self, name: str = "jobs") -> str:
        """Makes a namespace, whose pods run on the nodes of this rig only; returns its whole name."""
        whole = f"{self.name}-{name}"
        selector = {"scheduler.alpha.kubernetes.io/node-selector": f"test={self.name}"}
        self.cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": whole, "annotations": selector}})
        account = f"/api/v1/namespaces/{whole}/serviceaccounts/default"
        wait_for("the default ServiceAccount", lambda: self.cluster.get(account))
        self._objects += [f"/api/v1/namespaces/{whole}", f"/api/v1/namespaces/{whole}/pods"]
        return whole

    def node(self, name: str, *, gpus: int = 8, labels: Mapping[str, str] = _NONE) -> ProcessNode:
        """Starts a node whose pods are processes. It is ready some seconds later."""
        whole = self._make_node(name, gpus, labels, {})
        self._nodes.append(ProcessNode(self.cluster, whole, self._folder / whole))
        return self._nodes[-1]

    def simulated_node(self, name: str, *, gpus: int = 8, labels: Mapping[str, str] = _NONE) -> str:
        """Makes a node whose pods only say that they run (:mod:`tests.cluster.kwok_stages`); returns its whole name."""
        return self._make_node(name, gpus, labels, {"kwok.x-k8s.io/node": "fake"})

    def _make_node(self, name: str, gpus: int, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
        whole = f"{self.name}-{name}"
        room = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
        own = {"test": self.name, "kubernetes.io/hostname": whole, "kubernetes.io/os": "linux"}
        metadata = {"name": whole, "labels": {**own, **labels}, "annotations": annotations}
        status = {"capacity": room, "allocatable": room}
        self.cluster.request("POST", "/api/v1/nodes", {"metadata": metadata, "status": status})
        self._objects.append(f"/api/v1/nodes/{whole}")
        return whole

    def close(self) -> None:
        """Ends its processes, and leaves the removal of its objects to the cluster."""
        for node in self._nodes:
            node.kill()
        for path in self._objects:
            with contextlib.suppress(ApiError):  # the test has removed it
                self.cluster.request("DELETE", path, {"gracePeriodSeconds": 0})
