"""The place of a host in a workload."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Place", "store_address"]

_ADDRESS = re.compile(r"\[?([A-Za-z0-9._:-]{1,255})\]?:([0-9]{1,5})")
_MOST_PORT = 65535


def store_address(text: str) -> tuple[str, int]:
    """Host and port of a generation's store.

    Raises:
        ValueError: it is not "address:port".
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= _MOST_PORT:
        raise ValueError(f"master={text!r:.80} is no address:port")
    return found[1], int(found[2])


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a host is to do. It is complete, so that receiving it twice changes nothing.

    Attributes:
        generation: of the workload, counted from 1; ranks of another generation are ended.
        node_rank: of the host, below ``nodes``.
        nodes: number of hosts of the workload. Not their names, because each of thousands of hosts would be sent
            thousands.
        master: "address:port" of the generation's store; "": the host of node rank 0 has not reported it yet.
        fresh: interpreters and launchers are started anew as well, not only ranks.
        replace: global ranks of the generation before that hang: they are not asked to leave it, their processes are
            ended.
        replicas: data-parallel replicas.
        replicas_before: those of the generation before; 0: there was none.

    Raises:
        ValueError: there can be no such place; the error names the field.
    """

    workload: str
    generation: int
    node_rank: int
    nodes: int
    master: str = ""
    fresh: bool = False
    replace: tuple[int, ...] = ()
    replicas: int = 1
    replicas_before: int = 0

    def __post_init__(self) -> None:
        for name, least in (("generation", 1), ("node_rank", 0), ("nodes", 1), ("replicas", 0), ("replicas_before", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is less than {least}")
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank={self.node_rank} of nodes={self.nodes}")
        if not self.workload:
            raise ValueError("workload is empty")
        if self.master:
            store_address(self.master)
