"""Turns a remedy into steps, each with a deadline. Pure: no input, no output, no clock."""

from __future__ import annotations

import math

from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import ObservationKind
from resiliency.supervisor.model import Plan, Remedy, RemedyKind, Step
from resiliency.supervisor.policy import Situation, places_after

__all__ = ["make_plan", "save_step", "steps_of"]

#: Seconds that hosts have to confirm their places: that takes one message each way.
_PLACE_TIMEOUT_S = 15.0
#: Seconds that hosts have to send a signal to their ranks. Hosts that are gone are not asked.
_SIGNAL_TIMEOUT_S = 5.0
#: Margin for all ranks to learn after which step they save: this many seconds of steps, and this many steps more.
_TELL_S, _TELL_STEPS = 1.0, 2


def steps_of(
    remedy: Remedy, situation: Situation, *, hook_timeout_s: float = 0.0, hook_signal: int = 0
) -> tuple[Step, ...]:
    """The steps of a remedy that can be carried out.

    Args:
        hook_timeout_s: seconds for the user's program; 0: there is none.
        hook_signal: number of the signal for ranks that still run; 0: none.
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
    reached = tuple(host for host in workload.places if host not in situation.out or situation.is_planned)
    if hook_signal and reached:
        steps.append(
            Step(kind=StepKind.SIGNAL, hosts=reached, timeout_s=_SIGNAL_TIMEOUT_S, required=False, signal=hook_signal)
        )
    if hook_timeout_s:
        steps.append(Step(kind=StepKind.HOOK, timeout_s=hook_timeout_s, required=False))
    steps.append(Step(kind=StepKind.PLACE, timeout_s=spec.stop_timeout_s + _PLACE_TIMEOUT_S))
    steps.append(Step(kind=StepKind.PROGRESS, timeout_s=spec.start_timeout_s))
    return tuple(steps)


def make_plan(
    remedy: Remedy,
    situation: Situation,
    *,
    number: int,
    generation: int,
    now_s: float,
    hook_timeout_s: float = 0.0,
    hook_signal: int = 0,
) -> Plan:
    """The plan of a remedy that can be carried out, see :func:`~resiliency.supervisor.policy.problem_of`.

    Args:
        generation: one that no host has had yet.
    """
    hung = [one for one in situation.observations if one.kind is ObservationKind.WORKER_HUNG and one.rank is not None]
    return Plan(
        number=number,
        incident=situation.incident.number,
        workload=situation.workload.name,
        remedy=remedy,
        generation=generation,
        places=places_after(remedy, situation),
        steps=steps_of(remedy, situation, hook_timeout_s=hook_timeout_s, hook_signal=hook_signal),
        fresh=remedy.kind is RemedyKind.RESTART_WORKLOAD,
        replace=tuple(sorted({one.rank for one in hung if one.rank is not None})),
        replace_on=tuple(sorted({one.host for one in hung})),
        step_since_s=now_s,
    )


def save_step(step: int, *, age_s: float, steps_per_s: float) -> int:
    """Returns an optimizer step that no rank will have done yet when it is told to save after it.

    All ranks must be told before they reach that step, because a rank that is past it does not save.

    Args:
        step: the furthest that was reported.
        age_s: seconds since then.
        steps_per_s: recent steps per second.
    """
    return step + math.ceil((age_s + _TELL_S) * steps_per_s) + _TELL_STEPS
