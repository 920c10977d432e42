"""Both charts on simulated nodes: real supervisors and simulated hosts of one job at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.error
from collections.abc import Collection
from pathlib import Path
from typing import Any

from resiliency.testing.zygote import Zygote
from tests.cluster.client import ApiError, CommandFailed, Write, wait_for
from tests.cluster.rig import Rig
from tests.cluster.simulated_hosts import SimulatedHosts
from tests.cluster.supervisors import Identity, SupervisorProcess
from tests.cluster.tools import REPOSITORY

__all__ = ["PERIOD_S", "TIMEOUT_S", "SimulatedJob", "SimulatedRelease"]

PERIOD_S, TIMEOUT_S = 0.5, 2.0
WORKLOAD = "train"


class SimulatedRelease:
    """The supervisor's chart in namespaces of their own, and simulated nodes. Jobs come and go.

    Args:
        hosts: of a job, without spares.
        settings: further values of the supervisor's chart.
    """

    def __init__(
        self, rig: Rig, folder: Path, zygote: Zygote, *, nodes: int, hosts: int, name: str = "", **settings: Any
    ) -> None:
        self.rig, self.cluster, self.hosts, self._zygote = rig, rig.cluster, hosts, zygote
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.system, self.jobs = rig.namespace(f"{name}system"), rig.namespace(f"{name}jobs")
        self.nodes = [rig.simulated_node(f"{name}k{number}") for number in range(nodes)]
        values = {
            "workload_name": WORKLOAD,
            "workload_namespace": self.jobs,
            "num_dp_replicas": hosts,
            "num_nodes_per_dp": 1,
            "workers_per_host": 1,
            "min_num_dp_replicas": 1,
            "heartbeat_polling_period_s": PERIOD_S,
            "heartbeat_timeout_s": TIMEOUT_S,
            "thaw_s": 0.5,
            "correlate_s": 0.05,
            "lease_s": 3,
            "host_daemon": {"enabled": False},
            **settings,
        }
        self._install("supervisor", "supervisor", self.system, values)
        self.identity = Identity(self.cluster, self.system, folder / "identity")
        self._numbers = itertools.count()

    def _install(self, name: str, chart: str, namespace: str, values: dict[str, Any]) -> None:
        path = str(REPOSITORY / "helm" / chart)
        self.cluster.helm("install", name, path, "-n", namespace, "-f", "-", input=json.dumps(values))

    def job(self, *, spares: int, supervisors: int = 1, timeout_s: float = 60, **values: Any) -> SimulatedJob:
        """Starts a job and its supervisors; returns when it trains."""
        number = next(self._numbers)
        workload = {
            "image": "none",
            "num_dp_replicas": self.hosts,
            "num_nodes_per_dp": 1,
            "spares": spares,
            "workers_per_host": 1,
            "ram_disk": "",
            **values,
        }
        name = f"job{number}"
        # One address that the chart accepts; simulated pods never read it.
        self._install(name, "workload", self.jobs, {"workload": workload, "infrastructure": {"supervisor_ca": ""}})
        folder = self._folder / name
        folder.mkdir()
        made = SimulatedJob(self, name, folder, self._zygote, supervisors)
        try:
            made.until_it_trains(whole=self.hosts + spares, timeout_s=timeout_s)
        except BaseException:
            made.close()
            raise
        return made

    def repair_nodes(self) -> None:
        """All nodes are as new, whoever has changed them."""
        for name in self.nodes:
            node = self.cluster.get(f"/api/v1/nodes/{name}")
            ours = {key: None for key in node["metadata"]["annotations"] if key.startswith(("resiliency/", "test/"))}
            spec = node["spec"]
            if ours or spec.get("unschedulable") or spec.get("taints"):
                changes = {"metadata": {"annotations": ours}, "spec": {"unschedulable": None, "taints": None}}
                self.cluster.patch(f"/api/v1/nodes/{name}", changes)


class SimulatedJob:
    """A job that trains. Its supervisors are processes, its hosts are simulated."""

    def __init__(self, release: SimulatedRelease, name: str, folder: Path, zygote: Zygote, supervisors: int) -> None:
        self.release, self.cluster, self.name = release, release.cluster, name
        self.supervisors = [
            SupervisorProcess(release.identity, folder / f"supervisor-{number}", zygote)
            for number in range(supervisors)
        ]
        wait_for("a supervisor leads", lambda: any(each.terms() for each in self.supervisors))
        urls = [each.url for each in self.supervisors]
        self.simulated = SimulatedHosts(
            self.cluster, release.jobs, folder, urls=urls, ca=release.identity.ca, account=name
        )
        self.training = self.simulated.training

    def close(self) -> None:
        """Its objects and processes are gone, and all nodes are repaired."""
        self.simulated.close()
        for each in self.supervisors:
            each.kill()
        release = self.release
        with contextlib.suppress(CommandFailed):  # the test has removed the JobSet
            self.cluster.helm("uninstall", self.name, "-n", release.jobs)
        self._delete_pods()
        wait_for("no pod is left", lambda: not self.cluster.pods(release.jobs) or self._delete_pods())
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{release.system}/leases/supervisor"
        self.cluster.patch(lease, {"spec": {"holderIdentity": ""}})
        release.repair_nodes()

    @property
    def _jobset_path(self) -> str:
        return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.release.jobs}/jobsets/{self.name}"

    def _delete_pods(self) -> None:
        """Also those whose nodes are gone."""
        self.cluster.request("DELETE", f"/api/v1/namespaces/{self.release.jobs}/pods", {"gracePeriodSeconds": 0})

    # -- what is there ------------------------------------------------------------------------------------------------

    def status(self, *, hosts: bool = True) -> dict[str, Any]:
        """Of the supervisor that leads."""
        found = wait_for("a supervisor that leads", lambda: self._status(hosts))
        assert found is not None
        return found

    def _status(self, hosts: bool) -> dict[str, Any] | None:
        for each in self.supervisors:
            assert each.process.returncode in (None, -9), each.log.read_text()
            if each.process.returncode is None and not _is_stopped(each.process.pid):
                with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                    return each.status(hosts=hosts)
        return None

    def workload(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status(hosts=False)["workloads"][0]
        return found

    def generation(self) -> int:
        found: int = self.workload()["generation"]
        return found

    def places(self) -> list[str]:
        """Hosts by node rank."""
        found: list[str] = self.workload()["hosts"]
        return found

    def ready_spares(self) -> list[str]:
        hosts = self.status()["hosts"]
        return sorted(each["name"] for each in hosts if each["state"] == "ready" and not each["workload"])

    def node_of(self, host: str) -> str:
        node: str = self.simulated.ask(lambda: self.simulated.hosts[host].node)
        return node

    def hosts_with_places(self) -> list[str]:
        """As they themselves know it."""
        return self.simulated.ask(lambda: [name for name, host in self.simulated.hosts.items() if host.place])

    def highest_terms(self) -> set[int]:
        return self.simulated.ask(lambda: {host.term for host in self.simulated.hosts.values() if not host.is_cut})

    def writes(self) -> list[Write]:
        """What its supervisors have asked the API server to change, but for their Lease and reviews of tokens."""
        return [write for each in self.supervisors for write in each.writes()]

    def taken_out(self) -> set[str]:
        """Nodes that a supervisor has taken out."""
        nodes = (self.cluster.get(f"/api/v1/nodes/{name}") for name in self.release.nodes)
        return {each["metadata"]["name"] for each in nodes if "resiliency/failed" in _taints(each)}

    def logs(self) -> str:
        return "\n".join(each.log.read_text() for each in self.supervisors)

    # -- what is waited for -------------------------------------------------------------------------------------------

    def until_it_trains(self, *, whole: int = 0, after: int = 0, timeout_s: float = 60) -> int:
        """Returns the generation that makes steps.

        Args:
            whole: so many hosts are ready.
            after: it is later than this one.
        """

        def trains() -> int:
            workload = self.workload()
            generation: int = workload["generation"]
            steps = self.simulated.ask(lambda: self.training.steps_of(generation))
            if workload["state"] != "running" or generation <= after or steps < 2:
                raise OSError(
                    f"{workload['state']} in generation {generation} with {steps} steps: {workload['reason']}"
                )
            ready = self.status(hosts=False)["host_states"].get("ready", 0)
            if ready < whole:
                raise OSError(f"{ready} of {whole} hosts are ready")
            return generation

        return wait_for(f"it trains ({self.supervisors[0].log})", trains, timeout_s=timeout_s)

    def until_steps_after(self, generation: int) -> None:
        """A later generation makes steps, whatever the supervisor does beside."""
        wait_for("a new generation", lambda: self.simulated.ask(lambda: self.training.newest) > generation)

    def until_steps(self, count: int = 3, timeout_s: float = 60) -> None:
        """So many more steps are made."""
        goal = self.simulated.ask(lambda: self.training.step) + count
        wait_for("steps", lambda: self.simulated.ask(lambda: self.training.step) >= goal, timeout_s=timeout_s)

    # -- faults -------------------------------------------------------------------------------------------------------

    def kill_nodes(self, *hosts: str) -> set[str]:
        """The nodes of these hosts die at once; returns their names."""
        nodes = {self.node_of(host) for host in hosts}
        dead = {"metadata": {"annotations": {"test/dead": "1"}}}
        for host in hosts:
            self.cluster.patch(f"/api/v1/nodes/{self.node_of(host)}", dead)
            self.cluster.patch(f"/api/v1/namespaces/{self.release.jobs}/pods/{host}", dead)
        self.simulated.kill(hosts)
        return nodes

    def evict(self, host: str) -> None:
        metadata = {"name": host, "namespace": self.release.jobs}
        path = f"/api/v1/namespaces/{self.release.jobs}/pods/{host}/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        self.cluster.request("POST", path, eviction)

    def preempt(self, host: str) -> None:
        """A pod that is more important comes to its node."""
        container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
        spec = {
            "priorityClassName": "system-node-critical",
            "nodeSelector": {"kubernetes.io/hostname": self.node_of(host)},
            "containers": [container],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "important"}, "spec": spec}
        self.cluster.request("POST", f"/api/v1/namespaces/{self.release.jobs}/pods", pod)

    def take_away(self, *, delete: bool) -> None:
        """The user deletes the JobSet, or suspends it."""
        path = self._jobset_path
        self._jobset = self.cluster.get(path)
        if delete:
            self.cluster.kubectl("delete", "jobset", self.name, "-n", self.release.jobs)
        else:
            self.cluster.patch(path, {"spec": {"suspend": True}})

    def bring_back(self) -> None:
        given = self._jobset["metadata"]
        metadata = {key: given[key] for key in ("name", "namespace", "labels", "annotations")}
        made = {**self._jobset, "metadata": metadata, "status": {}}

        try:
            self.cluster.patch(self._jobset_path, {"spec": {"suspend": False}})
        except ApiError:  # it is gone
            self.cluster.request("POST", self._jobset_path.rpartition("/")[0], made)

    # -- what is true after each fault --------------------------------------------------------------------------------

    def check(
        self, before: list[str], *, out: Collection[str], spares: Collection[str], nodes: Collection[str]
    ) -> None:
        """The newest generation is whole, and nothing was done beside what had to be.

        Args:
            before: hosts by node rank before the fault.
            out: hosts that have lost their places.
            spares: that have taken one.
            nodes: that were taken out.
        """
        workload = self.workload()
        held = self.simulated.ask(lambda: self.training.hosts_of(workload["generation"]))
        assert workload["state"] == "running"
        assert [held[rank] for rank in sorted(held)] == workload["hosts"]
        assert sorted(held) == list(range(len(workload["hosts"])))
        assert self.simulated.ask(lambda: self.training.problems) == []
        assert set(before) - set(workload["hosts"]) == set(out)
        assert set(workload["hosts"]) - set(before) == set(spares)
        wait_for(f"{sorted(nodes)} are taken out", lambda: self.taken_out() == set(nodes) or _said(self.taken_out()))
        # Another one may have come since: the scheduler hears of cordons later than pods of their deletion.
        wait_for("no pod is left there", lambda: not (left := self._pods_on(nodes) & set(out)) or _said(left))
        assert "Traceback" not in self.logs()

    def _pods_on(self, nodes: Collection[str]) -> set[str]:
        pods = self.cluster.pods(self.release.jobs)
        return {each["metadata"]["name"] for each in pods if each["spec"].get("nodeName") in nodes}


def _taints(node: dict[str, Any]) -> set[str]:
    return {each["key"] for each in node["spec"].get("taints", ())}


def _said(left: object) -> bool:
    raise OSError(f"there is {left}")  # which the wait says at its end


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
