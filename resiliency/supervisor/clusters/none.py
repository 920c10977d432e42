"""The backend for hosts that get work only from the supervisor: no cluster has to be told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from resiliency.supervisor.clusters.base import HostFacts, Identity

__all__ = ["NoCluster"]

logger = logging.getLogger(__name__)


class NoCluster:
    """Only logs, see :class:`~resiliency.supervisor.clusters.base.Cluster`."""

    vouches = False

    async def run(self, changed: Callable[[HostFacts], None]) -> None:
        await asyncio.Event().wait()

    async def identify(self, token: str) -> Identity | None:
        return None

    async def take_out(self, hosts: Sequence[str], reason: str) -> str:
        logger.info("%s out of use: %s", ", ".join(hosts), reason or "replaced")
        return ""

    async def give_up(self, hosts: Sequence[str], reason: str) -> str:
        return ""

    async def close(self) -> None:
        return
