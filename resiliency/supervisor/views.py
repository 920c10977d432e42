"""The supervisor's state as plain values, for JSON, the status page and the command line."""

from __future__ import annotations

from typing import Any

from resiliency.runtime.messages.monitor import StepKind
from resiliency.supervisor.model import Host, HostState, Incident, Plan, Workload
from resiliency.supervisor.service import Service
from resiliency.supervisor.store import HistoryEvent
from resiliency.supervisor.wording import describe

__all__ = ["event_view", "explain_view", "now_of", "status_view"]

#: How many closed incidents are shown.
_RECENT = 20
_STEP_WORDS = {
    StepKind.CHECKPOINT: "ranks save a checkpoint",
    StepKind.VERIFY: "hosts check themselves",
    StepKind.RESET_DEVICES: "devices are reset",
    StepKind.SIGNAL: "ranks get a signal",
    StepKind.HOOK: "the hook runs",
    StepKind.CLUSTER_OUT: "the cluster is told that hosts are out",
    StepKind.PLACE: "hosts take their places",
    StepKind.PROGRESS: "ranks make their first step",
}


def status_view(service: Service, *, with_hosts: bool = True) -> dict[str, Any]:
    """The whole present state."""
    incidents = sorted(service.controller.incidents.values(), key=lambda one: -one.number)
    shown = [one for number, one in enumerate(incidents) if one.is_open or number < _RECENT]
    return {
        "leads": True,
        "term": service.term,
        "up_s": round(service.now_s() - service.began_s, 1),
        "dry_run": service.settings.dry_run,
        "frozen": service.sensor.frozen,
        "store_problem": service.journal.problem,
        "host_states": {str(state): count for state, count in service.sensor.states().items()},
        "workloads": [_workload(service, one) for one in service.controller.workloads.values()],
        "hosts": [_host(service, host) for host in service.sensor.hosts()] if with_hosts else [],
        "incidents": [_incident(service, one) for one in shown],
    }


def explain_view(service: Service, number: int) -> dict[str, Any] | None:
    """An incident and the plans that were tried; None when the number is unknown."""
    incident = service.controller.incidents.get(number)
    return None if incident is None else _incident(service, incident)


def now_of(service: Service, name: str) -> str:
    """A workload's state and the reason for it, in words."""
    workload = service.controller.workloads.get(name)
    reason = "" if workload is None else _reason(service, workload)
    return "" if workload is None else f"{name} is {workload.state}" + (f": {reason}" if reason else "")


def event_view(event: HistoryEvent) -> dict[str, Any]:
    return {
        "number": event.number,
        "at": event.at,
        "kind": event.kind,
        "workload": event.workload,
        "host": event.host,
        "incident": event.incident,
        "text": event.text,
        "fields": dict(event.fields),
    }


def _workload(service: Service, workload: Workload) -> dict[str, Any]:
    spec, goodput = workload.spec, service.controller.goodput_of(workload.name).share
    plan = None if workload.plan is None else service.controller.plans.get(workload.plan)
    return {
        "name": workload.name,
        "state": str(workload.state),
        "for_s": round(service.now_s() - workload.since_s, 1),
        "reason": _reason(service, workload),
        "job": service.jobs.name(workload.job),
        "generation": workload.generation,
        "step": service.step_of(workload),
        "goodput": None if goodput is None else round(goodput, 4),
        "replicas": workload.replicas,
        "wanted_replicas": spec.replicas,
        "min_replicas": spec.min_replicas,
        "hosts_per_replica": spec.hosts_per_replica,
        "hosts": list(workload.places),
        "in_job_restarts": workload.in_job_restarts,
        "max_in_job_restarts": spec.max_in_job_restarts,
        "workload_restarts": workload.workload_restarts,
        "max_workload_restarts": spec.max_workload_restarts,
        "incident": workload.incident if workload.incident in service.controller.incidents else None,
        "plan": None if plan is None else _plan(service, plan),
    }


def _reason(service: Service, workload: Workload) -> str:
    said = (workload.reason, service.other_size_of(workload), service.waits_for(workload))
    return "; ".join(filter(None, said))


def _host(service: Service, host: Host) -> dict[str, Any]:
    placed = service.decided.place(host.name)
    ago = service.heard_ago_s(host.name)
    is_free = host.state is HostState.READY and not placed
    job, jobs = service.jobs.of(host.name), {each.job for each in service.controller.workloads.values()}
    waits = is_free and job != "" and not jobs & {job, ""}
    return {
        "name": host.name,
        "state": str(host.state),
        "reason": f"of {service.jobs.name(job)}, which waits" if waits else host.reason,
        "spare": is_free and not waits,
        "for_s": round(service.now_s() - host.since_s, 1),
        "heard_ago_s": None if ago is None else round(ago, 1),
        "address": host.address,
        "block": host.block,
        "machine": service.machine_of(host.name),
        "job": service.jobs.name(job),
        "falls": host.falls,
        "free_in_s": (
            round(max(0.0, host.free_at_s - service.now_s()), 1) if host.state is HostState.QUARANTINED else None
        ),
        "workload": placed[0].name if placed else "",
        "node_rank": placed[1] if placed else None,
    }


def _incident(service: Service, incident: Incident) -> dict[str, Any]:
    plans = [service.controller.plans[number] for number in incident.tried if number in service.controller.plans]
    return {
        "number": incident.number,
        "workload": incident.workload,
        "open": incident.is_open,
        "opened_at": incident.opened_at,
        "closed_at": incident.closed_at,
        "outcome": incident.outcome,
        "now": now_of(service, incident.workload) if incident.is_open else "",
        "observations": [
            {
                "kind": str(one.kind),
                "host": one.host,
                "rank": one.rank,
                "generation": one.generation,
                "text": describe(one),
            }
            for one in incident.told
        ],
        "plans": [_plan(service, plan) for plan in plans],
    }


def _plan(service: Service, plan: Plan) -> dict[str, Any]:
    return {
        "number": plan.number,
        "remedy": str(plan.remedy.kind),
        "out": list(plan.remedy.out),
        "why": plan.remedy.reason,
        "generation": plan.generation,
        "hosts": len(plan.places),
        "outcome": str(plan.outcome),
        "reason": plan.reason,
        "failed": list(plan.failed),
        "at": plan.at,
        "step_for_s": round(service.now_s() - plan.step_since_s, 1) if plan.step is not None else None,
        "steps": [
            {
                "kind": str(step.kind),
                "text": _STEP_WORDS[step.kind],
                "hosts": list(step.hosts),
                "timeout_s": step.timeout_s,
                "required": step.required,
                "state": "done" if number < plan.at else "now" if plan.step is not None and number == plan.at else "",
            }
            for number, step in enumerate(plan.steps)
        ],
    }
