"""A remedy as steps, each with a deadline. Pure."""

from __future__ import annotations

from resiliency.supervisor.model import ObservationKind, Plan, Remedy, RemedyKind, Step, StepKind
from resiliency.supervisor.policy import Situation, places_after

__all__ = ["make_plan", "steps_of"]

#: For hosts to be told their places: it is a message, answered at once.
_PLACE_TIMEOUT_S = 15.0
_CLUSTER_TIMEOUT_S = 60.0


def steps_of(remedy: Remedy, situation: Situation, *, hook_timeout_s: float = 0.0) -> tuple[Step, ...]:
    """The steps of a remedy that can be carried out.

    Args:
        hook_timeout_s: of the user's program; 0: there is none.
    """
    workload, spec = situation.workload, situation.workload.spec
    new = tuple(host for host in places_after(remedy, situation) if host not in workload.places)
    steps = []
    if new:
        steps.append(Step(kind=StepKind.VERIFY, hosts=new, timeout_s=spec.verify_timeout_s))
    if situation.is_planned and workload.places:
        steps.append(Step(kind=StepKind.CHECKPOINT, timeout_s=spec.checkpoint_timeout_s, required=False))
    if remedy.kind is RemedyKind.RESET_DEVICES:
        steps.append(Step(kind=StepKind.RESET_DEVICES, hosts=remedy.out, timeout_s=spec.reset_timeout_s))
    if hook_timeout_s:
        steps.append(Step(kind=StepKind.HOOK, timeout_s=hook_timeout_s, required=False))
    steps.append(Step(kind=StepKind.PLACE, timeout_s=spec.stop_timeout_s + _PLACE_TIMEOUT_S))
    if remedy.out and remedy.kind in (RemedyKind.HOT_SWAP, RemedyKind.SCALE_DOWN):
        steps.append(Step(kind=StepKind.CLUSTER_OUT, hosts=remedy.out, timeout_s=_CLUSTER_TIMEOUT_S, required=False))
    steps.append(Step(kind=StepKind.PROGRESS, timeout_s=spec.start_timeout_s))
    return tuple(steps)


def make_plan(remedy: Remedy, situation: Situation, *, number: int, now_s: float, hook_timeout_s: float = 0.0) -> Plan:
    """The plan of a remedy that can be carried out: see :func:`~resiliency.supervisor.policy.problem_of`."""
    hung = {one.rank for one in situation.observations if one.kind is ObservationKind.WORKER_HUNG}
    return Plan(
        number=number,
        incident=situation.incident.number,
        workload=situation.workload.name,
        remedy=remedy,
        epoch=situation.workload.epoch + 1,
        places=places_after(remedy, situation),
        steps=steps_of(remedy, situation, hook_timeout_s=hook_timeout_s),
        fresh=remedy.kind is RemedyKind.RESTART_WORKLOAD,
        replace=tuple(sorted(rank for rank in hung if rank is not None)),
        step_since_s=now_s,
    )
