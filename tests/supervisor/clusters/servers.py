"""API servers of a contract: the fake one, and a real one of the rig. Both say what the supervisor has written."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Protocol

from resiliency.supervisor.clusters.kubernetes.api import Access
from tests.cluster.client import ApiError, wait_for
from tests.cluster.rig import Rig

from .fake_api import JOBSET, NODES, FakeApi

__all__ = ["AUDIENCE", "FakeServer", "RealServer", "Server"]

AUDIENCE = "resiliency-supervisor"
Object = dict[str, Any]
_ALL = ("get", "list", "watch", "patch", "create", "delete")
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"

_READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}


class Server(Protocol):
    """Attributes: access: as the supervisor. jobs, own: namespaces of the workloads, and of the supervisor."""

    access: Access
    jobs: str
    own: str

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *exc: object) -> None: ...

    def add_node(self, name: str, *, block: str = "") -> str:
        """Makes a node that is ready, and returns its whole name."""
        ...

    def node(self, name: str) -> Object: ...
    def change_node(self, name: str, changes: Object) -> None: ...
    def set_ready(self, name: str, ready: bool) -> None: ...
    def remove_node(self, name: str) -> None: ...

    def add_pod(self, name: str, node: str, *, namespace: str = "", job: str = "job") -> str:
        """Makes a pod that is bound to the node, and returns its uid."""
        ...

    def pods(self) -> set[str]:
        """Names in the namespace of the jobs."""
        ...

    def end_pod(self, name: str, phase: str) -> None: ...

    def delete_pod(self, name: str, *, at_once: bool = True, namespace: str = "") -> None: ...

    def token(self, pod: str, *, namespace: str = "", audience: str = AUDIENCE) -> str: ...

    def add_jobset(self, name: str) -> str:
        """Makes a JobSet, or another one of the same name; returns its uid."""
        ...

    def jobset(self, name: str) -> Object: ...

    def change_jobset(self, name: str, changes: Object) -> None: ...

    def events(self) -> list[tuple[str, str]]:
        """Reason and message of each in the namespace of the jobs that the supervisor has made."""
        ...

    def finish_deletion(self, name: str) -> None:
        """Of a JobSet: its pods have ended."""
        ...

    def add_lease(self, name: str) -> None:
        """In the supervisor's own namespace."""
        ...

    def add_job(self, name: str) -> None: ...
    def job(self, name: str) -> Object: ...

    def writes(self, at_least: int = 0) -> list[tuple[str, str, int]]:
        """What the supervisor has written, refused or not: verb, kind and name, status. Of such as are written down
        after the answer, so many are waited for."""
        ...


def _pod(name: str, node: str, job: str) -> Object:
    labels = {JOBSET: "train", "batch.kubernetes.io/job-name": job}
    container = {"name": "main", "image": "none"}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": node, "containers": [container]}}


class FakeServer:
    jobs, own = "jobs", "system"

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self._pods, self._jobs = f"/api/v1/namespaces/{self.jobs}/pods", f"/apis/batch/v1/namespaces/{self.jobs}/jobs"
        self._jobsets = JOBSETS.format(self.jobs)

    async def __aenter__(self) -> FakeServer:
        await self.api.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.api.__aexit__()

    @property
    def access(self) -> Access:
        return self.api.access

    def add_node(self, name: str, *, block: str = "") -> str:
        self.api.put(NODES, {"metadata": {"name": name, "labels": {"block": block}}, "spec": {}, **_READY})
        return name

    def node(self, name: str) -> Object:
        return copy.deepcopy(self.api.objects[NODES][name])

    def change_node(self, name: str, changes: Object) -> None:
        self.api.change(NODES, name, changes)

    def set_ready(self, name: str, ready: bool) -> None:
        self.change_node(name, {"status": {"conditions": [{"type": "Ready", "status": str(ready)}]}})

    def remove_node(self, name: str) -> None:
        self.api.remove(NODES, name)

    def add_pod(self, name: str, node: str, *, namespace: str = "", job: str = "job") -> str:
        made = self.api.put(f"/api/v1/namespaces/{namespace or self.jobs}/pods", _pod(name, node, job))
        return str(made["metadata"]["uid"])

    def pods(self) -> set[str]:
        return set(self.api.objects.get(self._pods, {}))

    def end_pod(self, name: str, phase: str) -> None:
        self.api.change(self._pods, name, {"status": {"phase": phase}})

    def delete_pod(self, name: str, *, at_once: bool = True, namespace: str = "") -> None:
        if at_once:
            self.api.remove(self._pods, name)
        else:
            self.api.change(self._pods, name, {"metadata": {"deletionTimestamp": "now"}})

    def token(self, pod: str, *, namespace: str = "", audience: str = AUDIENCE, account: str = "default") -> str:
        namespace = namespace or self.jobs
        of = self.api.objects[f"/api/v1/namespaces/{namespace}/pods"][pod]
        key = "authentication.kubernetes.io"
        extra = {f"{key}/pod-name": [pod], f"{key}/node-name": [of["spec"]["nodeName"]]}
        user = {"username": f"system:serviceaccount:{namespace}:{account}", "extra": extra}
        token = f"token-{namespace}-{account}-{pod}-{audience}"
        self.api.reviews[token] = {"user": user, "audiences": [audience]}
        return token

    def add_jobset(self, name: str) -> str:
        if name in self.api.objects.get(self._jobsets, {}):
            self.api.remove(self._jobsets, name)
        return str(self.api.put(self._jobsets, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name, "namespace": self.jobs, "labels": {"x": "y"}, "creationTimestamp": "2026-01-02T03:04:05Z"}, "spec": {"suspend": True}})["metadata"]["uid"])  # fmt: skip

    def events(self) -> list[tuple[str, str]]:
        found = self.api.objects.get(f"/api/v1/namespaces/{self.jobs}/events", {}).values()
        return [(each["reason"], each["message"]) for each in found]

    def finish_deletion(self, name: str) -> None:
        assert "deletionTimestamp" in self.jobset(name)["metadata"]
        self.api.remove(self._jobsets, name)

    def add_lease(self, name: str) -> None:
        self.api.put(f"/apis/coordination.k8s.io/v1/namespaces/{self.own}/leases", {"metadata": {"name": name}})

    def jobset(self, name: str) -> Object:
        return copy.deepcopy(self.api.objects[self._jobsets][name])

    def change_jobset(self, name: str, changes: Object) -> None:
        self.api.change(self._jobsets, name, changes)

    def add_job(self, name: str) -> None:
        self.api.put(self._jobs, {"metadata": {"name": name}, "spec": {}})

    def job(self, name: str) -> Object:
        return copy.deepcopy(self.api.objects[self._jobs][name])

    def writes(self, at_least: int = 0) -> list[tuple[str, str, int]]:
        return [(verb, "/".join(path.split("/")[-2:]), code) for verb, path, code in self.api.writes]


class RealServer:
    def __init__(self, rig: Rig, folder: Any) -> None:
        self._rig, self._cluster = rig, rig.cluster
        self.jobs, self.own = rig.namespace("jobs"), rig.namespace("system")
        group = "/apis/rbac.authorization.k8s.io/v1"
        self._made = [f"{group}/{kind}/{rig.name}" for kind in ("clusterroles", "clusterrolebindings")]
        token = folder / "supervisor.token"
        rules = [
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "patch"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
            {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list", "watch", "patch"]},
            {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["list"]},
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
            {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": [*_ALL]},
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "patch"]},
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
        ]
        role = {"metadata": {"name": rig.name}, "rules": rules}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": rig.name}
        subject = {"kind": "ServiceAccount", "name": "default", "namespace": self.own}
        binding = {"metadata": {"name": rig.name}, "roleRef": reference, "subjects": [subject]}
        self._cluster.request("POST", f"{group}/clusterroles", role)
        self._cluster.request("POST", f"{group}/clusterrolebindings", binding)
        token.write_text(self._cluster.token(self.own, "default"))
        ca = str(self._cluster.ca)
        self.access = Access(server=self._cluster.server, token_file=str(token), ca_file=ca, namespace=self.own)
        self._pods = f"/api/v1/namespaces/{self.jobs}/pods"
        self._jobs = f"/apis/batch/v1/namespaces/{self.jobs}/jobs"

    async def __aenter__(self) -> RealServer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for path in self._made:
            with contextlib.suppress(ApiError):  # the test has removed it
                self._cluster.request("DELETE", path)

    def add_node(self, name: str, *, block: str = "") -> str:
        whole = f"{self._rig.name}-{name}"
        self._cluster.request("POST", NODES, {"metadata": {"name": whole, "labels": {"block": block}}})
        self._made.append(f"{NODES}/{whole}")
        self.set_ready(whole, True)

        def untainted() -> bool:  # the cluster has taken note
            return not self.node(whole)["spec"].get("taints")

        wait_for("the node without taints", untainted, every_s=0.02)
        return whole

    def node(self, name: str) -> Object:
        found: Object = self._cluster.get(f"{NODES}/{name}")
        return found

    def change_node(self, name: str, changes: Object) -> None:
        self._cluster.patch(f"{NODES}/{name}", changes)

    def set_ready(self, name: str, ready: bool) -> None:
        conditions = [{"type": "Ready", "status": str(ready), "reason": "Test", "message": ""}]
        self._cluster.patch(f"{NODES}/{name}/status", {"status": {"conditions": conditions}})

    def remove_node(self, name: str) -> None:
        self._cluster.request("DELETE", f"{NODES}/{name}")

    def change(self, path: str, changes: Object) -> None:
        self._cluster.patch(path, changes)

    def add_pod(self, name: str, node: str, *, namespace: str = "", job: str = "job") -> str:
        path = f"/api/v1/namespaces/{namespace or self.jobs}/pods"
        made = self._cluster.request("POST", path, _pod(name, node, job))
        return str(made["metadata"]["uid"])

    def pods(self) -> set[str]:
        return {each["metadata"]["name"] for each in self._cluster.pods(self.jobs)}

    def end_pod(self, name: str, phase: str) -> None:
        self._cluster.patch(f"{self._pods}/{name}/status", {"status": {"phase": phase}})

    def delete_pod(self, name: str, *, at_once: bool = True, namespace: str = "") -> None:
        path = f"/api/v1/namespaces/{namespace or self.jobs}/pods/{name}"
        self._cluster.request("DELETE", path, {"gracePeriodSeconds": 0} if at_once else {})

    def token(self, pod: str, *, namespace: str = "", audience: str = AUDIENCE) -> str:
        return self._cluster.token(namespace or self.jobs, "default", audience=audience, pod=pod)

    def add_jobset(self, name: str) -> str:
        path = JOBSETS.format(self.jobs)
        if any(each["metadata"]["name"] == name for each in self._cluster.get(path)["items"]):
            self._cluster.request("DELETE", f"{path}/{name}", {"propagationPolicy": "Background"})
        container = {"name": "main", "image": "none"}
        template = {"spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}}
        spec = {"suspend": True, "replicatedJobs": [{"name": "host", "replicas": 1, "template": template}]}

        def made() -> Object | None:
            with contextlib.suppress(ApiError):  # the one before is being deleted
                found: Object = self._cluster.request("POST", path, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name, "labels": {"x": "y"}}, "spec": spec})  # fmt: skip
                return found
            return None

        return str(wait_for("the JobSet", made)["metadata"]["uid"])

    def events(self) -> list[tuple[str, str]]:
        found = self._cluster.get(f"/api/v1/namespaces/{self.jobs}/events")["items"]
        own = [each for each in found if each.get("source", {}).get("component") == "resiliency-supervisor"]
        return [(each["reason"], each["message"]) for each in own]

    def finish_deletion(self, name: str) -> None:
        return

    def add_lease(self, name: str) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.own}/leases"
        self._cluster.request("POST", path, {"metadata": {"name": name}})

    def jobset(self, name: str) -> Object:
        found: Object = self._cluster.get(f"{JOBSETS.format(self.jobs)}/{name}")
        return found

    def change_jobset(self, name: str, changes: Object) -> None:
        self._cluster.patch(f"{JOBSETS.format(self.jobs)}/{name}", changes)

    def add_job(self, name: str) -> None:
        container = {"name": "main", "image": "none"}
        template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
        spec = {"suspend": True, "template": template}
        self._cluster.request("POST", self._jobs, {"metadata": {"name": name}, "spec": spec})

    def job(self, name: str) -> Object:
        found: Object = self._cluster.get(f"{self._jobs}/{name}")
        return found

    def writes(self, at_least: int = 0) -> list[tuple[str, str, int]]:
        user = f"system:serviceaccount:{self.own}:default"

        def written() -> list[tuple[str, str, int]]:
            found = [each for each in self._cluster.writes(user) if "reviews" not in each.resource]
            return [(each.verb.upper(), f"{each.resource}/{each.name}", each.code) for each in found]

        wait_for("the audit log", lambda: len(written()) >= at_least, every_s=0.02)
        return written()
