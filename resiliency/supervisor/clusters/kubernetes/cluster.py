"""The Kubernetes backend: a host is a pod of a JobSet, its machine is a node.

A lost host needs the API server for nothing: its ranks are given to a spare pod that runs already. Afterwards two
writes clean up: the node is cordoned and tainted, and the pod is deleted, so that the Job controller makes it anew on
another node, where it is the next spare. No other pod is touched, and the JobSet does not restart. A pod whose host
lives is given its own grace, in which checkpoints are uploaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Collection
from datetime import datetime, timezone
from typing import Any

from resiliency.supervisor.clusters.base import ClusterUnavailable, HostFacts, Identity
from resiliency.supervisor.clusters.kubernetes.api import ApiError, KubernetesApi
from resiliency.supervisor.clusters.kubernetes.checks import check_cluster, may
from resiliency.supervisor.clusters.kubernetes.facts import (
    ENDED,
    JobSet,
    Node,
    Pod,
    cordon_patch,
    jobset_of,
    node_of,
    pod_of,
    uncordon_patch,
    unwanted_because,
)
from resiliency.supervisor.clusters.kubernetes.renewal import Renewal
from resiliency.supervisor.model import RemedyKind

__all__ = ["KubernetesCluster"]

logger = logging.getLogger(__name__)

_MERGE = "application/merge-patch+json"
_LABEL = "jobset.sigs.k8s.io/jobset-name"
#: How often a change is made again that met another one.
_TRIES = 5
#: Seconds between two looks at nodes whose quarantine may be over.
_LOOK_S = 5.0
#: Reviews of tokens at a time, when thousands of hosts connect together.
_REVIEWS = 16
#: Seconds that a review may take; the host connects again.
_REVIEW_S = 5.0
#: Longest message of an event, in characters: the API server's limit is 1024.
_LONGEST_MESSAGE = 1000
_NODE_NAME, _POD_NAME = "authentication.kubernetes.io/node-name", "authentication.kubernetes.io/pod-name"


class KubernetesCluster:
    """See :class:`~resiliency.supervisor.clusters.base.Cluster`.

    Args:
        namespace: of the workloads.
        audience: that hosts' tokens are made for.
        watchdog_account: ServiceAccount of the machines' watchdogs; "": any in this process's own namespace, where no
            hosts are.
        lease: name of the supervisor's Lease, for the check of what the cluster lacks.
        block_label: label of nodes that names their failure domain.
        quarantine_s: for how long a node is kept out after its first failure; each further one doubles it.
        dry_run: nothing is changed.
    """

    vouches = True

    def __init__(
        self,
        api: KubernetesApi,
        *,
        namespace: str,
        audience: str,
        lease: str,
        block_label: str,
        quarantine_s: float,
        watchdog_account: str = "",
        dry_run: bool = False,
    ) -> None:
        self._api, self._namespace, self._audience, self._lease = api, namespace, audience, lease
        self._watchdog_account = watchdog_account
        self._block_label, self._quarantine_s, self._dry_run = block_label, quarantine_s, dry_run
        self._jobsets_path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"
        self._pods: dict[str, Pod] = {}
        self._nodes: dict[str, Node] = {}
        #: By uid.
        self._jobsets: dict[str, JobSet] = {}
        self._by_node: dict[str, set[str]] = {}
        self._facts: dict[str, HostFacts] = {}
        self._uids: dict[str, str] = {}
        #: Last resorts that the rights allow.
        self.can: Collection[RemedyKind] = ()
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{api.access.namespace}/leases"
        self._renewal = Renewal(api, path=self._jobsets_path, lease=f"{leases}/{lease}")
        self._changed: Callable[[HostFacts], None] = lambda facts: None
        self._reviews = asyncio.Semaphore(_REVIEWS)
        #: The newest review of each host, by digest of its token, for a time in which the API server is away.
        self._reviewed: dict[bytes, Identity] = {}

    # -- what the cluster says ----------------------------------------------------------------------------------------

    async def run(self, changed: Callable[[HostFacts], None]) -> None:
        self._changed = changed
        for known in (self._pods, self._nodes, self._jobsets, self._by_node, self._facts, self._uids):
            known.clear()
        pods = f"/api/v1/namespaces/{self._namespace}/pods"
        works = (
            self._say_what_is_missing(),
            self._api.follow(pods, pod_of, self._pod_changed, query={"labelSelector": _LABEL}),
            self._api.follow("/api/v1/nodes", lambda item: node_of(item, self._block_label), self._node_changed),
            self._api.follow(self._jobsets_path, jobset_of, self._jobset_changed),
            self._give_back_nodes(),
            self._renew_jobset(),
        )
        await asyncio.gather(*works)

    async def _say_what_is_missing(self) -> None:
        """It may be added while the supervisor runs, which therefore goes on."""
        try:
            found = await check_cluster(self._api, namespace=self._namespace, lease=self._lease)
            self.can = await self._find_last_resorts()
        except ApiError as error:
            logger.warning("what the cluster lacks cannot be found out: %s", error)
            return
        for each in found:
            if each.problem:
                logger.error("%s: %s; %s", each.what, each.problem, each.remedy)

    async def _find_last_resorts(self) -> Collection[RemedyKind]:
        needed = {
            RemedyKind.RENEW_HOSTS: [("delete", "", "pods")],
            RemedyKind.RENEW_JOB: [(verb, "jobset.x-k8s.io", "jobsets") for verb in ("create", "delete")],
        }
        found = []
        for kind, rights in needed.items():
            missing = [
                f"{right[0]} {right[2]}" for right in rights if not await may(self._api, *right, self._namespace)
            ]
            if missing:
                logger.info("%s is passed over as a last resort: no right to %s", kind, " and ".join(missing))
            elif not self._dry_run:
                found.append(kind)
        return found

    def _pod_changed(self, uid: str, pod: Pod | None) -> None:
        name = self._uids.get(uid, "") if pod is None else pod.name
        known = self._pods.get(name)
        if pod is None:
            self._uids.pop(uid, None)
            if known is None or known.uid != uid:
                return  # another pod has its name already
            del self._pods[name]
            self._by_node.get(known.node, set()).discard(name)
            self._reviewed = {each: one for each, one in self._reviewed.items() if one.host != name}
            if self._facts.pop(name, None) is not None:
                self._changed(HostFacts(host=name, node=known.node, is_gone=True))
            return
        self._uids[uid] = name
        self._pods[name] = pod
        if known is not None and known.node != pod.node:
            self._by_node.get(known.node, set()).discard(name)
        self._by_node.setdefault(pod.node, set()).add(name)
        self._say(pod)

    def _node_changed(self, uid: str, node: Node | None) -> None:
        if node is None:
            name = next((name for name, known in self._nodes.items() if known.uid == uid), "")
            self._nodes.pop(name, None)
            return
        self._nodes[node.name] = node
        for name in sorted(self._by_node.get(node.name, ())):
            self._say(self._pods[name])

    def _jobset_changed(self, uid: str, jobset: JobSet | None) -> None:
        if jobset is None:
            del self._jobsets[uid]
            return
        self._jobsets[uid] = jobset
        for pod in [pod for pod in self._pods.values() if pod.jobset in (uid, jobset.name)]:
            self._say(pod)

    def _jobset(self, job: str) -> JobSet | None:
        found = (each for each in self._jobsets.values() if each.name == job)
        return self._jobsets.get(job) or next(found, None)

    def _say(self, pod: Pod) -> None:
        node = self._nodes.get(pod.node)
        if node is None:
            return
        facts = HostFacts(
            host=pod.name,
            node=node.name,
            block=node.block,
            job=pod.jobset,
            job_name=pod.jobset_name,
            job_created="" if (jobset := self._jobset(pod.jobset)) is None else jobset.created,
            ended=None if jobset is None else jobset.ended,
            unwanted=unwanted_because(node, pod),
            is_down=not node.ready,
        )
        if self._facts.get(pod.name) != facts:
            self._facts[pod.name] = facts
            self._changed(facts)

    def wants_hosts(self, job: str) -> bool:
        jobset = self._jobset(job)
        return jobset is not None and jobset.wants_pods

    async def identify(self, token: str) -> Identity | None:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._audience]},
        }
        digest = hashlib.sha256(token.encode()).digest()
        try:
            async with self._reviews:
                path = "/apis/authentication.k8s.io/v1/tokenreviews"
                answer = await self._api.request("POST", path, review, give_up_s=_REVIEW_S)
        except ApiError as error:
            known = self._reviewed.get(digest)
            if known is not None and known.host in self._facts:
                return known  # its pod was not deleted since, as far as is known
            raise ClusterUnavailable(f"no token can be reviewed: {error}") from error
        identity = self._identity(answer)
        if identity is None:
            self._reviewed.pop(digest, None)
        if identity is not None and not identity.watches_node:
            self._reviewed = {each: one for each, one in self._reviewed.items() if one.host != identity.host}
            self._reviewed[digest] = identity
        return identity

    def _identity(self, answer: dict[str, Any]) -> Identity | None:
        status = answer.get("status") or {}
        if not status.get("authenticated") or self._audience not in (status.get("audiences") or ()):
            return None
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        host, node = _only(extra.get(_POD_NAME)), _only(extra.get(_NODE_NAME))
        parts = str(user.get("username", "")).split(":")
        if parts[:2] != ["system", "serviceaccount"] or len(parts) != 4 or not host or not node:
            return None
        namespace, account = parts[2:]
        watches_node = account == self._watchdog_account if self._watchdog_account else namespace != self._namespace
        if namespace == self._api.access.namespace and watches_node:
            return Identity(host=node, node=node, watches_node=True)
        return Identity(host=host, node=node) if namespace == self._namespace else None

    # -- what the cluster is told -------------------------------------------------------------------------------------

    async def take_out(self, host: str, reason: str, *, is_dead: bool) -> str:
        try:
            pod = await self._present(host)
        except ApiError as error:
            return str(error)
        if pod is None:
            return ""  # it is gone
        node = self._nodes.get(pod.node)
        if pod.is_going and node is not None and node.ready:
            if not node.is_ours:
                logger.info("pod %s was deleted by somebody else; its node %s stays in use", host, pod.node)
            return ""
        if self._dry_run:
            logger.info("dry run: node %s would be cordoned and pod %s deleted (%s)", pod.node, host, reason)
            return ""
        try:
            if pod.node:
                await self._change_node(
                    pod.node, lambda item: cordon_patch(item, reason or "replaced", self._quarantine_s, time.time())
                )
            await self._delete(pod, at_once=is_dead or node is None or not node.ready)
        except ApiError as error:
            return str(error)
        logger.warning("node %s is cordoned and pod %s deleted: %s", pod.node, host, reason or "replaced")
        return ""

    async def _present(self, host: str) -> Pod | None:
        """The host's pod as it is now: the watch may be behind, and a pod that was evicted meanwhile has left a node
        that is well."""
        known = self._pods.get(host)
        if known is None:
            return None
        try:
            pod = pod_of(await self._api.request("GET", f"/api/v1/namespaces/{self._namespace}/pods/{host}"))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return pod if pod is not None and pod.uid == known.uid else None

    async def _change_node(self, name: str, patch: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        path = f"/api/v1/nodes/{name}"
        for left in reversed(range(_TRIES)):
            try:
                changes = patch(await self._api.request("GET", path))
                if changes is not None:
                    await self._api.request("PATCH", path, changes, kind=_MERGE)
                return
            except ApiError as error:
                if error.status == 404:
                    return
                if error.status != 409 or not left:
                    raise
            await asyncio.sleep(random.uniform(0.05, 0.2))

    async def _delete(self, pod: Pod, *, at_once: bool) -> None:
        """Deletes the pod; a newer one of its name stays.

        Args:
            at_once: nobody waits for its kubelet, which may be gone. Otherwise the pod has its own grace.
        """
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}
        if at_once:
            body["gracePeriodSeconds"] = 0
        try:
            await self._api.request("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{pod.name}", body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _give_back_nodes(self) -> None:
        """Uncordons the nodes whose quarantine is over, and that work."""
        while not self._dry_run:
            wall = time.time()
            for node in [node for node in self._nodes.values() if node.may_return(wall)]:
                try:
                    await self._change_node(node.name, lambda item: uncordon_patch(item, time.time()))
                    logger.warning("node %s is given back: its quarantine is over, or was ended by hand", node.name)
                except ApiError as error:
                    logger.error("node %s stays cordoned although its quarantine is over: %s", node.name, error)
            await asyncio.sleep(_LOOK_S)

    async def renew(self, job: str, *, whole: bool, reason: str) -> str:
        jobset = self._jobset(job)
        if jobset is None:
            return f"there is no JobSet {job}"
        try:
            if whole and (problem := await self._renewal.begin(jobset.name, jobset.uid, reason)):
                return f"JobSet {jobset.name} is not made anew: {problem}"
            for pod in [pod for pod in self._pods.values() if pod.jobset == job]:
                node = self._nodes.get(pod.node)
                is_dead = pod.node != "" and (node is None or not node.ready)
                if is_dead or not whole:  # of a JobSet that is deleted the others end by themselves
                    await self._delete(pod, at_once=is_dead)
        except ApiError as error:
            return str(error)
        if not whole:
            logger.error("all pods of JobSet %s are deleted, and made anew: %s", jobset.name, reason)
        return ""

    async def _renew_jobset(self) -> None:
        """Goes on with a JobSet that is to be made anew, also by an earlier leader."""
        is_loaded, said = False, ""
        while not self._dry_run:
            try:
                if not is_loaded:
                    await self._renewal.load()
                is_loaded, said = True, ""
                await self._renewal.go_on()
            except ApiError as error:
                if not said:
                    logger.error("no JobSet can be made anew: %s", error)
                said = str(error)
            await asyncio.sleep(_LOOK_S)

    async def keep(self, job: str, text: str) -> str:
        jobset = self._jobset(job)
        if jobset is None or self._dry_run:
            return ""
        patch = {"metadata": {"uid": jobset.uid, "annotations": {ENDED: text or None}}}
        try:
            await self._api.request("PATCH", f"{self._jobsets_path}/{jobset.name}", patch, kind=_MERGE)
        except ApiError as error:
            return "" if error.status in (404, 422) else str(error)  # it is gone, or another has its name
        return ""

    async def give_up(self, job: str, reason: str) -> str:
        jobs = sorted({pod.job for pod in self._pods.values() if pod.jobset == job and pod.job})
        if not jobs or self._dry_run:
            return ""
        path = f"/apis/batch/v1/namespaces/{self._namespace}/jobs/{jobs[0]}"
        patch = {
            "metadata": {"annotations": {"resiliency/given-up": reason[:_LONGEST_MESSAGE]}},
            "spec": {"activeDeadlineSeconds": 1},
        }
        try:
            await self._api.request("PATCH", path, patch, kind=_MERGE)
        except ApiError as error:
            return "" if error.status == 404 else str(error)
        logger.error("job %s is failed, and with it the JobSet: %s", jobs[0], reason)
        if (jobset := self._jobset(job)) is not None:
            await self._tell(jobset, "GivenUp", reason)
        return ""

    async def _tell(self, jobset: JobSet, what: str, text: str) -> None:
        """An event that `kubectl describe jobset` shows. Where there is no right to make one it is passed over."""
        metadata = {"name": f"{jobset.name}.{what.lower()}.{jobset.uid[:8]}", "namespace": self._namespace}
        of = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": jobset.name, "uid": jobset.uid}
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": {**of, "namespace": self._namespace},
            "reason": what,
            "message": text[:_LONGEST_MESSAGE],
            "type": "Warning",
            "source": {"component": "resiliency-supervisor"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.request("POST", f"/api/v1/namespaces/{self._namespace}/events", event)
        except ApiError as error:
            if error.status != 409:
                logger.info("no event of JobSet %s says so: %s", jobset.name, error)

    async def close(self) -> None:
        await self._api.close()


def _only(values: Any) -> str:
    return values[0] if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str) else ""
