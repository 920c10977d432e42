"""The workloads, incidents and plans, and which of them have changed since they were stored. Pure: no input, no output,
no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from resiliency.runtime.messages.observations import Observation
from resiliency.supervisor.model import Incident, Plan, Workload

__all__ = ["Changes", "Records"]

#: Most observations that are kept of one incident, and of one host within it. Thousands of ranks can be lost at once
#: with a rack, but not with one host.
_MOST_OBSERVATIONS, _MOST_OF_A_HOST = 8192, 256
#: How many closed incidents stay in memory, and how many more there may be before the oldest are dropped together.
_MOST_CLOSED, _SLACK = 2000, 200


@dataclass(kw_only=True)
class Changes:
    """What has changed, and must be stored before anything is done about it."""

    workloads: dict[str, Workload] = field(default_factory=dict)
    incidents: dict[int, Incident] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.workloads or self.incidents or self.plans)


@dataclass(kw_only=True)
class _Noted:
    """What an open incident holds already, and how many observations of each host."""

    seen: set[tuple[object, int]]
    of_hosts: Counter[str]


class Records:
    """Thread: one.

    Attributes:
        version: grows when other hosts are taken.
    """

    def __init__(self) -> None:
        self.workloads: dict[str, Workload] = {}
        self.incidents: dict[int, Incident] = {}
        self.plans: dict[int, Plan] = {}
        self.version = 0
        self._changes = Changes()
        self._last_number = 0
        self._noted: dict[int, _Noted] = {}

    def restore(self, workloads: Iterable[Workload], incidents: Iterable[Incident], plans: Iterable[Plan]) -> None:
        """Takes over what was stored."""
        self.workloads.update((each.name, each) for each in workloads)
        self.incidents.update((each.number, each) for each in incidents)
        self.plans.update((each.number, each) for each in plans)
        self._last_number = max([0, *self.incidents, *self.plans])
        self.version += 1

    def take_changes(self) -> Changes:
        """Returns, and resets, what has changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def next_number(self) -> int:
        """Of an incident or a plan."""
        self._last_number += 1
        return self._last_number

    def set_workload(self, workload: Workload) -> None:
        known = self.workloads.get(workload.name)
        self.workloads[workload.name] = self._changes.workloads[workload.name] = workload
        if known is None or _takes(known) != _takes(workload):
            self.version += 1

    def set_incident(self, incident: Incident) -> None:
        self.incidents[incident.number] = self._changes.incidents[incident.number] = incident
        if not incident.is_open:
            self._noted.pop(incident.number, None)
            if len(self.incidents) > _MOST_CLOSED + _SLACK:
                self._forget_oldest()

    def set_plan(self, plan: Plan) -> None:
        known = self.plans.get(plan.number)
        self.plans[plan.number] = self._changes.plans[plan.number] = plan
        if known is None or known.places != plan.places:
            self.version += 1

    def _forget_oldest(self) -> None:
        """Drops the oldest closed incidents from memory, as the store does on disk."""
        closed = sorted(number for number, one in self.incidents.items() if not one.is_open)
        gone = set(closed[: len(self.incidents) - _MOST_CLOSED])
        for number in gone:
            del self.incidents[number]
        for number in [number for number, plan in self.plans.items() if plan.incident in gone]:
            del self.plans[number]

    def is_known(self, incident: Incident, one: Observation) -> bool:
        """Whether the open incident holds the observation."""
        return (one.identity, one.generation) in self._noted_of(incident).seen

    def is_full(self, incident: Incident, host: str) -> bool:
        """Whether the open incident holds too many observations, or too many of the host."""
        noted = self._noted_of(incident)
        return len(noted.seen) >= _MOST_OBSERVATIONS or noted.of_hosts[host] >= _MOST_OF_A_HOST

    def note(self, incident: Incident, one: Observation) -> None:
        """The open incident holds the observation from now on."""
        noted = self._noted_of(incident)
        noted.seen.add((one.identity, one.generation))
        noted.of_hosts[one.host] += 1

    def _noted_of(self, incident: Incident) -> _Noted:
        noted = self._noted.get(incident.number)
        if noted is None:
            noted = self._noted[incident.number] = _Noted(
                seen={(each.identity, each.generation) for each in incident.observations},
                of_hosts=Counter(each.host for each in incident.observations),
            )
        return noted


def _takes(workload: Workload) -> tuple[object, ...]:
    """The fields that decide which hosts are taken."""
    return workload.places, workload.plan, workload.state.has_ended
