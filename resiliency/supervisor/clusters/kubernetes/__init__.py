"""The Kubernetes backend: hosts are pods of a JobSet, and the leader holds a Lease. Needs aiohttp."""

from __future__ import annotations

import asyncio
import os
import socket

from resiliency.supervisor.clusters.kubernetes.api import Access, KubernetesApi
from resiliency.supervisor.clusters.kubernetes.checks import ClusterCheck, check_cluster
from resiliency.supervisor.clusters.kubernetes.cluster import KubernetesCluster
from resiliency.supervisor.clusters.kubernetes.lease import KubernetesLease
from resiliency.supervisor.settings import SupervisorSettings

__all__ = ["KubernetesCluster", "KubernetesLease", "check", "connect"]


def _api(settings: SupervisorSettings) -> tuple[KubernetesApi, str]:
    """The client, and the namespace of the workloads."""
    own = settings.kubernetes
    access = Access.of_pod(server=own.server, token_file=own.token_file, ca_file=own.ca_file, namespace=own.namespace)
    return KubernetesApi(access), own.workload_namespace or access.namespace


def connect(settings: SupervisorSettings) -> tuple[KubernetesCluster, KubernetesLease]:
    """The backend and the lease that the settings name. To be called on the event loop that uses them.

    Raises:
        ConfigError: this process runs in no pod, and the settings do not say where the API server is.
    """
    api, namespace = _api(settings)
    own = settings.kubernetes
    cluster = KubernetesCluster(
        api,
        namespace=namespace,
        audience=own.audience,
        watchdog_account=own.watchdog_account,
        lease=own.lease,
        block_label=own.block_label,
        quarantine_s=own.quarantine_s,
        dry_run=settings.dry_run,
    )
    me = f"{socket.gethostname()} (process {os.getpid()})"
    loop = asyncio.get_running_loop()
    return cluster, KubernetesLease(api, name=own.lease, me=me, lease_s=settings.lease_s, loop=loop)


async def check(settings: SupervisorSettings) -> list[ClusterCheck]:
    """Looks at what the supervisor needs of the cluster.

    Raises:
        ConfigError: as :func:`connect`.
    """
    api, namespace = _api(settings)
    try:
        return await check_cluster(api, namespace=namespace, lease=settings.kubernetes.lease)
    finally:
        await api.close()
