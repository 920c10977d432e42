"""The one thing that the supervisor asks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Cluster"]


class Cluster(Protocol):
    """A backend. Thread: the event loop's."""

    async def take_out(self, hosts: Sequence[str], reason: str) -> str:
        """Tells the cluster that hosts are not to be used: cordon them, delete their pods. Asked again, it does no
        harm. It is cancelled when its deadline is over.

        Returns:
            What went wrong; "": it is done.
        """
        ...
