"""Turns changes into lines of the history and the event log. Pure: no input, no output, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resiliency.events import EventKind
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.model import Host, HostState, Incident, Outcome, Plan, Workload
from resiliency.supervisor.records import Changes
from resiliency.supervisor.store import HistoryEvent
from resiliency.supervisor.wording import describe

__all__ = ["History"]

_OF_OBSERVATIONS = {
    ObservationKind.HOST_SILENT: EventKind.HOST_LOST,
    ObservationKind.HOST_LOST: EventKind.HOST_LOST,
    ObservationKind.WORKER_LOST: EventKind.WORKER_LOST,
    ObservationKind.WORKER_HUNG: EventKind.HANG_DETECTED,
}


class History:
    """Compares each change with the state before it. Thread: one."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}
        self._incidents: dict[int, Incident] = {}
        self._plans: dict[int, Plan] = {}
        self._hosts: dict[str, HostState] = {}

    def begin(self, workloads: Iterable[Workload], incidents: Iterable[Incident], hosts: Iterable[Host]) -> None:
        """Takes what an earlier supervisor stored as known, so that no lines are made of it."""
        self._workloads = {each.name: each for each in workloads}
        self._incidents = {each.number: each for each in incidents if each.is_open}
        self._hosts = {each.name: each.state for each in hosts}

    def of(self, changes: Changes, hosts: Mapping[str, Host | None], at: float) -> list[HistoryEvent]:
        """Returns the lines for these changes, causes before effects."""
        found: list[HistoryEvent] = []
        for name, host in hosts.items():
            found += self._host(name, host, at)
        for incident in changes.incidents.values():
            found += self._observations(incident, at)
        for plan in changes.plans.values():
            found += self._plan(plan, at)
        for workload in changes.workloads.values():
            found += self._workload(workload, at)
        for incident in changes.incidents.values():
            found += self._closed(incident, at)
        return found

    def _host(self, name: str, host: Host | None, at: float) -> list[HistoryEvent]:
        before = self._hosts.get(name)
        if host is None:
            self._hosts.pop(name, None)
            return [HistoryEvent(at=at, kind=EventKind.HOST_STATE, host=name, text=f"{name} is forgotten")]
        if host.state is before:
            return []
        self._hosts[name] = host.state
        why = f": {host.reason}" if host.reason else ""
        was = f" (was {before})" if before else ""
        text = f"{name} is {host.state}{was}{why}"
        fields = {"state": str(host.state), "reason": host.reason, "changed_host": name}
        return [HistoryEvent(at=at, kind=EventKind.HOST_STATE, host=name, text=text, fields=fields)]

    def _observations(self, incident: Incident, at: float) -> list[HistoryEvent]:
        before = self._incidents.get(incident.number)
        known = () if before is None else before.told
        self._incidents[incident.number] = incident
        found: list[HistoryEvent] = []
        if incident.is_start:
            return found
        if before is None or before.is_start:
            text = f"incident {incident.number} of {incident.workload} is open"
            found.append(self._line(EventKind.INCIDENT_OPENED, incident, text, at))
        for one in incident.told[len(known) :]:
            kind = _OF_OBSERVATIONS.get(one.kind, EventKind.OBSERVED)
            found.append(self._line(kind, incident, describe(one), at, one))
        return found

    def _line(
        self, kind: str, incident: Incident, text: str, at: float, one: Observation | None = None
    ) -> HistoryEvent:
        fields: dict[str, object] = {"incident": incident.number}
        if one is not None:
            fields.update(reason=one.detail or str(one.kind), observation=str(one.kind))
            if kind == EventKind.HOST_LOST:
                fields["lost_host"] = one.host
            if one.rank is not None:
                fields["worker"] = one.rank
        return HistoryEvent(
            at=at,
            kind=kind,
            workload=incident.workload,
            host="" if one is None else one.host,
            incident=incident.number,
            text=text,
            fields=fields,
        )

    def _closed(self, incident: Incident, at: float) -> list[HistoryEvent]:
        if incident.is_open:
            return []
        self._incidents.pop(incident.number, None)
        if incident.is_start:
            return []
        text = f"incident {incident.number} of {incident.workload} is over: {incident.outcome}"
        return [self._line(EventKind.INCIDENT_CLOSED, incident, text, at)]

    def _plan(self, plan: Plan, at: float) -> list[HistoryEvent]:
        before = self._plans.get(plan.number)
        self._plans[plan.number] = plan
        found: list[HistoryEvent] = []
        if self._is_start(plan.incident):  # its beginning and its end show in the states of the job
            return found
        about = {"incident": plan.incident, "plan": plan.number, "remedy": str(plan.remedy.kind)}
        if before is None and plan.at == 0 and plan.outcome is Outcome.ACTIVE:
            out = f" without {', '.join(plan.remedy.out)}" if plan.remedy.out else ""
            why = f": {plan.remedy.reason}" if plan.remedy.reason else ""
            found.append(
                HistoryEvent(
                    at=at,
                    kind=EventKind.RESTART_REQUESTED,
                    workload=plan.workload,
                    incident=plan.incident,
                    text=f"plan {plan.number}: {plan.remedy.kind} of {plan.workload}{out}{why}",
                    fields={**about, "reason": plan.remedy.reason, "next_generation": plan.generation},
                )
            )
        if plan.outcome is not Outcome.ACTIVE:
            self._plans.pop(plan.number, None)
            why = f": {plan.reason}" if plan.reason else ""
            found.append(
                HistoryEvent(
                    at=at,
                    kind=EventKind.PLAN_ENDED,
                    workload=plan.workload,
                    incident=plan.incident,
                    text=f"plan {plan.number} ({plan.remedy.kind}) is {plan.outcome}{why}",
                    fields={**about, "outcome": str(plan.outcome), "reason": plan.reason},
                )
            )
        return found

    def _is_start(self, number: int | None) -> bool:
        incident = None if number is None else self._incidents.get(number)
        return incident is not None and incident.is_start

    def _workload(self, workload: Workload, at: float) -> list[HistoryEvent]:
        before = self._workloads.get(workload.name)
        self._workloads[workload.name] = workload
        found = []
        about = None if self._is_start(workload.incident) else workload.incident

        def say(kind: str, text: str, **fields: object) -> None:
            found.append(
                HistoryEvent(at=at, kind=kind, workload=workload.name, incident=about, text=text, fields=fields)
            )

        if before is None or before.state is not workload.state:
            why = f": {workload.reason}" if workload.reason else ""
            text = f"{workload.name} is {workload.state}{why}"
            say(EventKind.WORKLOAD_STATE, text, state=str(workload.state), reason=workload.reason)
        if before is None or before.generation == workload.generation:
            return found
        if before.places and workload.places:
            gone = [host for host in before.places if host not in workload.places]
            new = [host for host in workload.places if host not in before.places]
            for old, other in zip(gone, new, strict=False):
                say(EventKind.HOST_SWAPPED, f"{other} takes the place of {old} in {workload.name}", old=old, new=other)
        old_size, size = len(before.places), len(workload.places)
        if old_size != size and (before.places or workload.replicas_before):
            text = f"{workload.name} has {size} hosts, and had {old_size}"
            say(EventKind.WORLD_RESIZED, text, old=old_size, new=size)
        return found
