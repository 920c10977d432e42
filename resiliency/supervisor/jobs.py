"""Which job each host belongs to: what the user has submitted, as the cluster says."""

from __future__ import annotations

from collections.abc import Mapping

from resiliency.supervisor.clusters.base import Cluster, HostFacts
from resiliency.supervisor.clusters.none import NoCluster

__all__ = ["Jobs"]


class Jobs:
    """The hosts and jobs that the cluster has named so far. Thread: the event loop's. Blocks: never."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self._cluster = cluster or NoCluster()
        self._facts: dict[str, HostFacts] = {}
        #: By job: what people call it, and when it was submitted.
        self._known: dict[str, tuple[str, str]] = {}

    @property
    def facts(self) -> Mapping[str, HostFacts]:
        """What the cluster says about hosts, by name; also about those that have not connected."""
        return self._facts

    def take(self, facts: HostFacts) -> None:
        """The cluster says something about a host."""
        if facts.is_gone:
            self._facts.pop(facts.host, None)
            return
        self._facts[facts.host] = facts
        self._known[facts.job] = facts.job_name, facts.job_created

    def of(self, host: str) -> str:
        """The host's job; "": the cluster does not say, or has not said yet (:meth:`is_unnamed`)."""
        facts = self._facts.get(host)
        return "" if facts is None else facts.job

    def is_unnamed(self, host: str) -> bool:
        """Whether the cluster will say what the host belongs to, and has not yet. Its watch may be behind."""
        return self._cluster.vouches and host not in self._facts

    def name(self, job: str) -> str:
        """What people call a job; with a part of its identity, because the next one may have the same name."""
        name = self._known.get(job, ("", ""))[0] or job
        return name if name == job else f"{name} ({job[:8]})"

    def have_hosts(self, job: str) -> bool:
        """Whether the cluster has hosts of the job, or is to make some."""
        return any(facts.job == job for facts in self._facts.values()) or self._cluster.wants_hosts(job)

    def first(self, hosts: Mapping[str, int], wanted: int) -> str:
        """The job whose turn it is; "": there is none. Those that have enough hosts come before the others, of which
        those with more hosts do, and then those that were submitted earlier.

        Args:
            hosts: how many ready hosts each job has.
            wanted: how many hosts are enough.
        """
        return min(
            hosts, key=lambda job: (-min(hosts[job], wanted), self._known.get(job, ("", ""))[1], job), default=""
        )
