"""The backend for hosts that get work only from the supervisor: no cluster has to be told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from resiliency.supervisor.clusters.base import HostFacts, Identity
from resiliency.supervisor.model import RemedyKind

__all__ = ["NoCluster"]


class NoCluster:
    """Does nothing, see :class:`~resiliency.supervisor.clusters.base.Cluster`."""

    can: Collection[RemedyKind] = ()
    vouches = False

    async def run(self, changed: Callable[[HostFacts], None]) -> None:
        await asyncio.Event().wait()

    def wants_hosts(self, job: str) -> bool:
        return False

    async def identify(self, token: str) -> Identity | None:
        return None

    async def take_out(self, host: str, reason: str, *, is_dead: bool) -> str:
        return ""

    async def give_up(self, job: str, reason: str) -> str:
        return ""

    async def renew(self, job: str, *, whole: bool, reason: str) -> str:
        return ""

    async def keep(self, job: str, text: str) -> str:
        return ""

    async def close(self) -> None:
        return
