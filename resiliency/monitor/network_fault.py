"""How a test cuts a host off from all others."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NetworkFault"]


class NetworkFault(Protocol):
    """The link of a host whose network can be cut on purpose. Thread: one. Blocks: no."""

    def pull(self) -> None:
        """Cuts the host off. Raises: OSError: it cannot; the error says why."""

    def plug_in(self) -> None:
        """Connects the host again. Idempotent. Raises: OSError: as :meth:`pull`."""

    def close(self) -> None:
        """Leaves the link as it is. Idempotent."""
