"""What a cluster lacks for the supervisor to work: rights, JobSet, a version of Kubernetes that is new enough."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from resiliency.supervisor.clusters.kubernetes.api import ApiError, ApiUnavailable, KubernetesApi

__all__ = ["ClusterCheck", "check_cluster", "may"]

#: Oldest minor version of Kubernetes 1 whose Jobs replace a pod that is terminating (podReplacementPolicy), and keep
#: their pods' indexes, without a feature gate.
_OLDEST = 30
_JOBSET = "jobset.x-k8s.io"
_OF_JOBSETS = "jobset.sigs.k8s.io/jobset-name"
_INSTALL = (
    "install JobSet 0.8 or newer: helm install jobset oci://registry.k8s.io/jobset/charts/jobset"
    " --namespace jobset-system --create-namespace"
)
#: (verb, group, resource, where), where: "" everywhere, "workload" in the namespace of the jobs, "own" in this one's.
_RIGHTS = (
    *((verb, "", "nodes", "") for verb in ("get", "list", "watch", "patch")),
    ("create", "authentication.k8s.io", "tokenreviews", ""),
    *((verb, "", "pods", "workload") for verb in ("list", "watch", "delete")),
    ("patch", "batch", "jobs", "workload"),
    *((verb, _JOBSET, "jobsets", "workload") for verb in ("list", "watch", "patch")),
    ("list", "policy", "poddisruptionbudgets", "workload"),
    *((verb, "coordination.k8s.io", "leases", "own") for verb in ("create", "get", "patch")),
)


@dataclass(frozen=True, kw_only=True)
class ClusterCheck:
    """One thing that was looked at.

    Attributes:
        problem: "": it is as it must be.
        remedy: what to do.
    """

    what: str
    found: str = ""
    problem: str = ""
    remedy: str = ""


async def check_cluster(api: KubernetesApi, *, namespace: str, lease: str) -> list[ClusterCheck]:
    """Looks at everything that the supervisor needs. Blocks: up to some 30 s when the API server is away.

    Args:
        namespace: of the workloads.
        lease: name of the supervisor's Lease.
    """
    try:
        version = await api.request("GET", "/version")
    except ApiUnavailable as error:
        return [ClusterCheck(what="API server", problem=str(error), remedy="look at its address, and at the network")]
    except ApiError as error:
        return [ClusterCheck(what="API server", problem=str(error), remedy="mount the ServiceAccount's token")]
    return [
        _judge_version(str(version.get("minor", ""))),
        await _jobset(api),
        *[each async for each in _rights(api, namespace, lease)],
        await _budgets(api, namespace),
    ]


def _judge_version(minor: str) -> ClusterCheck:
    number = "".join(digit for digit in minor if digit.isdecimal())
    found = f"Kubernetes 1.{number or '?'}"
    if number and int(number) < _OLDEST:
        return ClusterCheck(
            what="version", found=found, problem=f"{found} is too old", remedy=f"use 1.{_OLDEST} or newer"
        )
    return ClusterCheck(what="version", found=found)


async def _jobset(api: KubernetesApi) -> ClusterCheck:
    try:
        group = await api.request("GET", f"/apis/{_JOBSET}")
    except ApiError as error:
        problem = "JobSet is not installed" if error.status == 404 else str(error)
        return ClusterCheck(what="JobSet", problem=problem, remedy=_INSTALL)
    versions = [each.get("version") for each in group.get("versions") or ()]
    if "v1alpha2" not in versions:
        return ClusterCheck(what="JobSet", problem=f"it has {versions}, and not v1alpha2", remedy=_INSTALL)
    return ClusterCheck(what="JobSet", found="v1alpha2")


async def may(api: KubernetesApi, verb: str, group: str, resource: str, namespace: str, name: str = "") -> bool:
    """Whether this process has a right, as the API server says."""
    asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = await api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool((answer.get("status") or {}).get("allowed"))


async def _rights(api: KubernetesApi, namespace: str, lease: str) -> AsyncIterator[ClusterCheck]:
    for verb, group, resource, where in _RIGHTS:
        place = {"": "", "workload": namespace, "own": api.access.namespace}[where]
        name = lease if resource == "leases" and verb != "create" else ""
        what = f"right to {verb} {resource}{f' in {place}' if place else ''}"
        if await may(api, verb, group, resource, place, name):
            yield ClusterCheck(what=what, found="yes")
        else:
            role = "ClusterRole" if not place else f"Role in {place}"
            yield ClusterCheck(
                what=what, problem="no", remedy=f"add it to the supervisor's {role}, or upgrade the chart"
            )


async def _budgets(api: KubernetesApi, namespace: str) -> ClusterCheck:
    what = f"PodDisruptionBudgets in {namespace}"
    try:
        found = await api.request("GET", f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets")
        pods = await api.request("GET", f"/api/v1/namespaces/{namespace}/pods", query={"labelSelector": _OF_JOBSETS})
    except ApiError as error:
        if error.status == 403:
            return ClusterCheck(what=what, found="not looked at, for want of the right to list them, see above")
        raise
    labels = [each["metadata"].get("labels") or {} for each in pods.get("items") or ()]
    wrong = list(_wrong_budgets(found.get("items") or (), labels))
    if wrong:
        return ClusterCheck(
            what=what,
            problem=f"{', '.join(wrong)}: a Job has no scale, so that no eviction of its pods is ever allowed",
            remedy="use minAvailable with a whole number: kubectl drain would wait for ever",
        )
    return ClusterCheck(what=what, found="none of the wrong kind")


def _wrong_budgets(items: Iterable[dict[str, Any]], pods: Sequence[dict[str, str]]) -> Iterator[str]:
    """Names, with the words that are wrong, of the budgets that count in shares and select one of these pods, by their
    labels."""
    for item in items:
        spec = item.get("spec") or {}
        wanted = (spec.get("selector") or {}).get("matchLabels") or {}
        if not any(wanted.items() <= labels.items() for labels in pods):
            continue
        for key in ("maxUnavailable", "minAvailable"):
            if key in spec and (key == "maxUnavailable" or isinstance(spec[key], str)):
                yield f"{item['metadata']['name']} ({key}: {spec[key]})"
