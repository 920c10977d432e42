"""The cluster backends that ``cluster:`` in supervisor.yaml chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resiliency.supervisor.clusters.base import Cluster
from resiliency.supervisor.clusters.none import NoCluster

__all__ = ["CLUSTERS"]

CLUSTERS: Mapping[str, Callable[[], Cluster]] = {"none": NoCluster}
