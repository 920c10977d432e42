"""The cluster backends that ``cluster:`` in supervisor.yaml chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from resiliency.supervisor.clusters.base import Cluster
from resiliency.supervisor.clusters.none import NoCluster

if TYPE_CHECKING:
    from resiliency.supervisor.lease import Lease
    from resiliency.supervisor.settings import SupervisorSettings

__all__ = ["CLUSTERS"]


def _none(settings: SupervisorSettings) -> tuple[Cluster, Lease | None]:
    return NoCluster(), None


def _kubernetes(settings: SupervisorSettings) -> tuple[Cluster, Lease | None]:
    from resiliency.supervisor.clusters import kubernetes  # where nobody needs it, it is not imported

    return kubernetes.connect(settings)


#: Name -> what makes the backend, and the lease that goes with it (None: that of the state file). Called on the event
#: loop.
CLUSTERS: Mapping[str, Callable[[SupervisorSettings], tuple[Cluster, Lease | None]]] = {
    "none": _none,
    "kubernetes": _kubernetes,
}
