"""Lets a supervisor take over ranks that run and that its state does not know. Pure: no input, no output, no clock.

The state of a supervisor can be lost, or be that of an earlier leadership: each replica on Kubernetes has a file of its
own, which dies with its pod. The ranks do not need it, and their hosts know all that matters: their generation, and
their node rank in it. When a whole generation is reported that is newer than the stored one, it becomes the present
one, and training notices nothing.

Until that is clear, for a heartbeat timeout and a period after the supervisor has begun to lead, such hosts are told
nothing, and nothing is decided about their job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resiliency.runtime.messages.monitor import Report

__all__ = ["Adoption", "RunningGeneration"]


@dataclass(frozen=True, kw_only=True)
class RunningGeneration:
    """Ranks that run.

    Attributes:
        places: hosts by node rank.
        replicas: data-parallel replicas; 0: hosts do not say.
    """

    workload: str
    generation: int
    places: tuple[str, ...]
    replicas: int = 0

    def hosts_per_replica(self, usual: int) -> int:
        """Hosts that hold one replica. Args: usual: where hosts do not say; all of them, if they are no multiple."""
        replicas = self.replicas or len(self.places) // usual
        fits = replicas and len(self.places) % replicas == 0
        return len(self.places) // replicas if fits else len(self.places)


@dataclass(frozen=True, kw_only=True)
class _Place:
    workload: str
    generation: int
    node_rank: int
    nodes: int
    replicas: int


class Adoption:
    """Collects what hosts report of generations that are not stored. Thread: one.

    Args:
        generations: the stored generation of each workload; 0: there is none.
        until_s: when it is over, in monotonic seconds.
    """

    def __init__(self, generations: Mapping[str, int], until_s: float) -> None:
        self._generations, self.until_s = dict(generations), until_s
        self._places: dict[str, _Place] = {}
        #: Hosts that have obeyed an earlier supervisor, and have not reported to this one.
        self._mute: set[str] = set()
        self._have_obeyed = False

    def wait_until(self, until_s: float) -> None:
        """Waits longer, if hosts that had ranks may not be heard yet. Whether there are such hosts may be known only
        when the first one connects: where none has obeyed an earlier supervisor, nothing is held by this."""
        if not all(self._generations.values()):
            self.until_s = until_s

    def connected(self, host: str, term: int) -> None:
        """A host has connected that has obeyed a supervisor of this term; 0: none."""
        if term:
            self._have_obeyed = True
            self._mute.add(host)

    def reported(self, host: str, report: Report) -> RunningGeneration | None:
        """Takes a report. Returns the newest generation of its workload once all its hosts have reported it."""
        self._mute.discard(host)
        self._places.pop(host, None)
        if report.node_rank < 0 or report.generation <= self._generations.get(report.workload, report.generation):
            return None
        self._places[host] = _Place(
            workload=report.workload,
            generation=report.generation,
            node_rank=report.node_rank,
            nodes=report.nodes,
            replicas=report.replicas,
        )
        newest = max(one.generation for one in self._places.values() if one.workload == report.workload)
        hosts = {
            one.node_rank: name
            for name, one in self._places.items()
            if (one.workload, one.generation, one.nodes) == (report.workload, newest, report.nodes)
        }
        if report.generation != newest or hosts.keys() != set(range(report.nodes)):
            return None
        return RunningGeneration(
            workload=report.workload,
            generation=newest,
            places=tuple(hosts[each] for each in sorted(hosts)),
            replicas=report.replicas,
        )

    def adopted(self, found: RunningGeneration) -> None:
        """The generation is the workload's now."""
        self._generations[found.workload] = found.generation
        for host in found.places:
            self._places.pop(host, None)

    def holds_host(self, host: str, now_s: float) -> bool:
        """Whether the host must not be told anything yet: it may have ranks that are not known here."""
        return now_s < self.until_s and (host in self._mute or host in self._places)

    def holds_workload(self, name: str, now_s: float) -> bool:
        """Whether nothing may be decided about the workload yet: it may have ranks that are not known here."""
        if now_s >= self.until_s:
            return False
        is_new = not self._generations.get(name, 1)
        return (is_new and self._have_obeyed) or any(one.workload == name for one in self._places.values())
