"""Hosts that nobody but the supervisor gives work to: there is nobody to tell."""

from __future__ import annotations

import logging
from collections.abc import Sequence

__all__ = ["LocalCluster"]

logger = logging.getLogger(__name__)


class LocalCluster:
    """See :class:`~resiliency.supervisor.clusters.base.Cluster`."""

    async def take_out(self, hosts: Sequence[str], reason: str) -> str:
        logger.info("%s out of use: %s", ", ".join(hosts), reason or "replaced")
        return ""
