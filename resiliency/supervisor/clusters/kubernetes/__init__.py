"""The Kubernetes backend: hosts are pods of a JobSet, and the leader holds a Lease. Needs aiohttp."""

from resiliency.supervisor.clusters.kubernetes.cluster import KubernetesCluster
from resiliency.supervisor.clusters.kubernetes.lease import KubernetesLease

__all__ = ["KubernetesCluster", "KubernetesLease"]
