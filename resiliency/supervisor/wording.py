"""Observations, incidents and remedies in words, for logs and reasons."""

from __future__ import annotations

from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.model import Incident, Remedy

__all__ = ["cause", "describe", "hosts_and_reason", "which"]


def describe(one: Observation) -> str:
    """The observation in words."""
    rank = "" if one.rank is None else f" of rank {one.rank}"
    device = f", device {one.device} ({one.device_class})" if one.device else ""
    where = f" on {one.host}" if one.host else ""
    return f"{one.kind}{rank}{where}{device}" + (f": {one.detail}" if one.detail else "")


def cause(incident: Incident) -> str:
    """The last unplanned observation in words, preferably one of a rank, for a reader who sees only the reason; "" when
    there is none."""
    seen = [one for one in incident.observations if not one.is_planned]
    ranks = [one for one in seen if one.kind in (ObservationKind.WORKER_LOST, ObservationKind.WORKER_HUNG)]
    last = (ranks or seen)[-1:]
    return f"; seen last: {describe(last[0])}" if last else ""


def which(incident: Incident) -> str:
    """How a line about the incident begins; a start of a job has no number for people."""
    return "" if incident.is_start else f"incident {incident.number}: "


def hosts_and_reason(remedy: Remedy) -> str:
    hosts = f" {', '.join(remedy.out)}" if remedy.out else ""
    return hosts + (f": {remedy.reason}" if remedy.reason else "")
