"""The backend for hosts that get work only from the supervisor: no cluster has to be told."""

from __future__ import annotations

import logging
from collections.abc import Sequence

__all__ = ["NoCluster"]

logger = logging.getLogger(__name__)


class NoCluster:
    """Only logs, see :class:`~resiliency.supervisor.clusters.base.Cluster`."""

    async def take_out(self, hosts: Sequence[str], reason: str) -> str:
        logger.info("%s out of use: %s", ", ".join(hosts), reason or "replaced")
        return ""
