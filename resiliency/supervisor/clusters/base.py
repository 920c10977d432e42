"""The protocol of a cluster backend: the one thing that the supervisor asks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Cluster"]


class Cluster(Protocol):
    """A backend. Thread: the event loop's."""

    async def take_out(self, hosts: Sequence[str], reason: str) -> str:
        """Tells the cluster not to use hosts: cordon them, delete their pods. It may be called again with the same
        hosts, and is cancelled when its deadline has passed.

        Returns:
            What went wrong; "" when it is done.
        """
        ...
