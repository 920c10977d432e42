"""What is kept of nodes and pods, and what follows from it. Pure: no input, no output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

__all__ = [
    "FAILED",
    "UNTIL",
    "ENDED",
    "JobSet",
    "Node",
    "Pod",
    "cordon_patch",
    "jobset_of",
    "node_of",
    "pod_of",
    "uncordon_patch",
    "unwanted_because",
]

#: Taint, and annotations, of a node that the supervisor has taken out: until when, why, how often in a row, and whether
#: it was this supervisor that made the node unschedulable.
FAILED = "resiliency/failed"
UNTIL = "resiliency/quarantined-until"
_REASON, _FALLS, _CORDONED = "resiliency/reason", "resiliency/falls", "resiliency/cordoned"
#: Annotation of a JobSet: which of its workloads were stopped, see :mod:`resiliency.supervisor.ends`.
ENDED = "resiliency/ended"
#: Conditions of a JobSet that has ended, and gets no pods any more.
_FINISHED = ("Completed", "Failed")
_OURS = (UNTIL, _REASON, _FALLS, _CORDONED)
#: A node that did well for this many seconds after its quarantine has its earlier failures forgiven.
_FORGIVE_S = 86400.0
_MOST_DOUBLINGS = 8
_LONGEST_REASON = 200

#: Taints that say that a node will soon be taken away, by the part of their key that is the same everywhere.
_LEAVING = (
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    "cloud.google.com/maintenance",
    "karpenter.sh/disrupted",
    "kubernetes.azure.com/scheduled-event",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/out-of-service",
)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod of a job.

    Attributes:
        job, jobset: that it belongs to; the second by its uid, where the version of JobSet tells it.
        jobset_name: of its JobSet.
        is_going: somebody has deleted it already.
    """

    name: str
    uid: str
    node: str = ""
    job: str = ""
    jobset: str = ""
    jobset_name: str = ""
    is_going: bool = False


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node.

    Attributes:
        annotations: this supervisor's own.
        taints: key and value of each.
        cordoned: it is unschedulable.
    """

    name: str
    uid: str
    cordoned: bool = False
    ready: bool = True
    block: str = ""
    taints: tuple[tuple[str, str], ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is out because this supervisor has taken it out. Who removes the taint has given it back."""
        return UNTIL in self.annotations and any(key == FAILED for key, _ in self.taints)

    def is_quarantined(self, wall: float) -> bool:
        """Whether it is out, and not for long enough."""
        return self.is_ours and wall < _seconds(self.annotations[UNTIL])

    def may_return(self, wall: float) -> bool:
        """Whether its quarantine is over and the node works, or somebody has uncordoned it."""
        return self.is_ours and (not self.cordoned or (self.ready and not self.is_quarantined(wall)))


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """A JobSet.

    Attributes:
        ended: what the supervisor has written there.
        created: the API server's time of its creation; such texts sort by time.
        wants_pods: it is to have pods now: it is neither suspended nor finished.
    """

    name: str
    uid: str
    ended: str = ""
    created: str = ""
    wants_pods: bool = True


def jobset_of(item: Mapping[str, Any]) -> JobSet:
    metadata = item["metadata"]
    ended = (metadata.get("annotations") or {}).get(ENDED, "")
    conditions = (item.get("status") or {}).get("conditions") or ()
    is_finished = any(one["type"] in _FINISHED and one["status"] == "True" for one in conditions)
    return JobSet(
        name=metadata["name"],
        uid=metadata["uid"],
        ended=ended,
        created=metadata.get("creationTimestamp") or "",
        wants_pods=not (is_finished or (item.get("spec") or {}).get("suspend")),
    )


def pod_of(item: Mapping[str, Any]) -> Pod | None:
    """What is kept of a pod; None of one that has ended: it comes to life no more, also while its object stays."""
    if (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    metadata, labels = item["metadata"], item["metadata"].get("labels") or {}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=(item.get("spec") or {}).get("nodeName") or "",
        job=labels.get("batch.kubernetes.io/job-name", ""),
        jobset=labels.get("jobset.sigs.k8s.io/jobset-uid") or labels.get("jobset.sigs.k8s.io/jobset-name", ""),
        jobset_name=labels.get("jobset.sigs.k8s.io/jobset-name", ""),
        is_going="deletionTimestamp" in metadata,
    )


def node_of(item: Mapping[str, Any], block_label: str) -> Node:
    metadata, spec = item["metadata"], item.get("spec") or {}
    conditions = (item.get("status") or {}).get("conditions") or ()
    return Node(
        name=metadata["name"],
        uid=metadata["uid"],
        cordoned=bool(spec.get("unschedulable")),
        ready=any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions),
        block=(metadata.get("labels") or {}).get(block_label, ""),
        taints=tuple((one["key"], one.get("value", "")) for one in spec.get("taints") or ()),
        annotations={key: value for key, value in (metadata.get("annotations") or {}).items() if key in _OURS},
    )


def unwanted_because(node: Node, pod: Pod) -> str:
    """Why a host should be emptied while it still works; "": nothing asks for it."""
    if node.is_ours:
        return f"node {node.name} was taken out: {node.annotations.get(_REASON, '')}"
    for key, _ in node.taints:
        if any(known in key for known in _LEAVING):
            return f"node {node.name} will be taken away (taint {key})"
    if node.cordoned:
        return f"node {node.name} is cordoned"
    return f"pod {pod.name} is being deleted" if pod.is_going else ""


def cordon_patch(item: Mapping[str, Any], reason: str, quarantine_s: float, wall: float) -> dict[str, Any]:
    """The merge patch that takes a node out. It fails when the node has changed since ``item`` was read.

    A node that is in quarantine already has failed once: that another of its pods is lost, or that it is taken out
    again because the pod could not be deleted, makes the quarantine no longer.
    """
    metadata, spec, node = item["metadata"], item.get("spec") or {}, node_of(item, "")
    annotations: dict[str, str | None] = {}
    if not node.is_quarantined(wall):
        falls = _falls(node.annotations, wall) + 1
        by_others = node.cordoned and not (node.is_ours and _CORDONED in node.annotations)
        annotations = {
            _REASON: reason[:_LONGEST_REASON],
            UNTIL: _text(wall + quarantine_s * 2.0 ** min(falls - 1, _MOST_DOUBLINGS)),
            _FALLS: str(falls),
            _CORDONED: None if by_others else "true",
        }
    taints = [one for one in spec.get("taints") or () if one["key"] != FAILED]
    return {
        "metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": annotations},
        "spec": {"unschedulable": True, "taints": [*taints, {"key": FAILED, "effect": "NoSchedule"}]},
    }


def uncordon_patch(item: Mapping[str, Any], wall: float) -> dict[str, Any] | None:
    """The merge patch that gives a node back; None when it may not return, because it has just failed again. How often
    it has failed, and until when it was out, stays written there: after a day without a failure that is forgiven."""
    if not node_of(item, "").may_return(wall):
        return None
    metadata, spec = item["metadata"], item.get("spec") or {}
    taints = [one for one in spec.get("taints") or () if one["key"] != FAILED]
    ours = _CORDONED in (metadata.get("annotations") or {})
    return {
        "metadata": {
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {_REASON: None, _CORDONED: None},
        },
        "spec": {"taints": taints, **({"unschedulable": None} if ours else {})},
    }


def _falls(annotations: Mapping[str, str], wall: float) -> int:
    count = annotations.get(_FALLS, "")
    if not count.isdecimal() or wall - _seconds(annotations.get(UNTIL, "")) > _FORGIVE_S:
        return 0
    return min(int(count), 1000)


def _text(wall: float) -> str:
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float:
    """Seconds of a time in an annotation; one that nobody can read is over."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0
