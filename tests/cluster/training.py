"""The training that simulated hosts do together, and what may never happen in it. Pure: no input, no output."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Training"]


@dataclass(kw_only=True)
class _Generation:
    nodes: int
    #: Hosts by node rank, and those of them that no rank of another host can reach.
    hosts: dict[int, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    steps: int = 0


class Training:
    """Who holds which place, and which steps were made. Thread: any, one at a time.

    A step is made only while all places of a generation are held by hosts that live and reach each other, as a
    collective is.

    Attributes:
        step: of the optimizer; each generation goes on from the last.
        problems: what no supervisor may ever bring about.
    """

    def __init__(self) -> None:
        self.step = 0
        self.problems: list[str] = []
        self._generations: dict[int, _Generation] = {}
        self._newest_with_steps = 0

    def takes(self, host: str, generation: int, node_rank: int, nodes: int) -> None:
        """A host's ranks of a place begin."""
        known = self._generations.setdefault(generation, _Generation(nodes=nodes))
        other = known.hosts.get(node_rank)
        if other not in (None, host):
            self.problems.append(f"node rank {node_rank} of generation {generation} is held by {other} and {host}")
        if nodes != known.nodes:
            self.problems.append(f"generation {generation} has {known.nodes} nodes and {nodes}")
        known.hosts[node_rank] = host

    def leaves(self, host: str, generation: int, node_rank: int) -> None:
        """A host's ranks of a place have ended."""
        known = self._generations[generation]
        if known.hosts.get(node_rank) == host:
            del known.hosts[node_rank]
        known.away.discard(host)

    def is_away(self, host: str, generation: int, away: bool) -> None:
        """No rank of another host can reach this one, or they can again."""
        known = self._generations[generation]
        known.away.add(host) if away else known.away.discard(host)

    def makes_step(self, generation: int) -> None:
        """The first rank of a generation tries to make a step."""
        known = self._generations[generation]
        if len(known.hosts) < known.nodes or known.away:
            return
        if generation < self._newest_with_steps:
            self.problems.append(f"generation {generation} makes a step after {self._newest_with_steps}")
        self._newest_with_steps = generation
        self.step += 1
        known.steps += 1

    def steps_of(self, generation: int) -> int:
        known = self._generations.get(generation)
        return 0 if known is None else known.steps

    @property
    def newest(self) -> int:
        """The newest generation that has made a step; 0: none has."""
        return self._newest_with_steps

    def hosts_of(self, generation: int) -> dict[int, str]:
        """By node rank."""
        known = self._generations.get(generation)
        return {} if known is None else dict(known.hosts)
