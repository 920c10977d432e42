"""The place of a host in a workload."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a host is to do. It is complete, so that receiving it twice changes nothing.

    Attributes:
        epoch: of the workload; ranks of another epoch are ended.
        node_rank: of the host, below ``nodes``.
        nodes: number of hosts of the workload. Not their names, because each of thousands of hosts would be sent
            thousands.
        fresh: interpreters and launchers are started anew as well, not only ranks.
        replace: global ranks of the epoch before that hang: they are not asked to leave it, their processes are ended.
        replicas: data-parallel replicas.
        replicas_before: those of the epoch before; 0: there was none.
    """

    workload: str
    epoch: int
    node_rank: int
    nodes: int
    fresh: bool = False
    replace: tuple[int, ...] = ()
    replicas: int = 1
    replicas_before: int = 0
