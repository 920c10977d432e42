"""Decides what is done about an incident. Pure: no input, no output, no clock.

:class:`DefaultPolicy` chooses the mildest remedy that can help. From mild to severe: replace the lost ranks, start the
job anew, swap a host, train on with fewer replicas, wait for hosts, have the cluster make hosts or the job anew, stop.
A device that needs a reset gets it before ranks are replaced. A user's class may decide otherwise; :func:`problem_of`
refuses any answer, whoever gives it, that would put ranks on a host that is not available, or fall below the minimum.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from resiliency.errors import ConfigError
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.supervisor.model import (
    LAST_RESORTS,
    Incident,
    Outcome,
    Plan,
    Remedy,
    RemedyKind,
    Workload,
    WorkloadState,
)

__all__ = [
    "DefaultPolicy",
    "Policy",
    "Situation",
    "fails_alike",
    "last_resort",
    "load_policy",
    "places_after",
    "problem_of",
]

#: How many healthy hosts are replaced one after the other before the job is stopped: then hosts are not the cause.
_MOST_SWAPS = 3
#: In how many generations ranks of all hosts must fail alike, without getting further, to find the script guilty.
_STUCK = 3


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a policy decides from.

    Attributes:
        observations: those of the incident that are still true.
        out: hosts with a place that cannot have ranks, or must be emptied.
        spares: ready hosts without a place, the best fit first.
        tried: plans of this incident so far, in order.
        trains: ranks have made a step since they were placed; False after a plan that was given up half-way.
        blocks: failure domains of hosts, where they are known.
        resorts: last resorts that the cluster was found able to and that were not taken, the mildest first.
    """

    workload: Workload
    incident: Incident
    observations: tuple[Observation, ...]
    out: tuple[str, ...]
    spares: tuple[str, ...]
    tried: tuple[Plan, ...] = ()
    trains: bool = True
    blocks: Mapping[str, str] = field(default_factory=dict)
    resorts: tuple[RemedyKind, ...] = ()

    @property
    def failed(self) -> tuple[Plan, ...]:
        """Plans that failed."""
        return tuple(plan for plan in self.tried if plan.outcome is Outcome.FAILED)

    @property
    def is_planned(self) -> bool:
        """Whether the job trains and nothing is broken."""
        return (
            self.trains
            and bool(self.observations)
            and all(one.is_planned for one in self.observations)
            and not self.failed
        )

    def replicas_without(self, out: Sequence[str]) -> int:
        """Number of whole replicas without these hosts and with all spares, at most what the user wants."""
        spec = self.workload.spec
        left = len([host for host in self.workload.places if host not in out]) + len(self.spares)
        return min(spec.replicas, left // spec.hosts_per_replica)


class Policy(Protocol):
    """Decides what is done. Any class with this method is a policy."""

    def event_policy(self, situation: Situation) -> Remedy:
        """Returns the next remedy for an incident. Called again when a remedy has failed; ``situation.tried`` shows
        which.

        Thread: the supervisor's, or one that asks only the policy. It must not block.
        """
        ...


class DefaultPolicy:
    """The policy that is used when the user names none, see the module."""

    def event_policy(self, situation: Situation) -> Remedy:
        workload, spec = situation.workload, situation.workload.spec
        if workload.state is WorkloadState.WAITING or not workload.places:
            if situation.replicas_without(()) < spec.min_replicas:
                return Remedy(
                    kind=RemedyKind.WAIT, reason=f"{len(situation.spares)} of {spec.min_hosts} hosts are ready"
                )
            kind = RemedyKind.START if situation.incident.is_start else RemedyKind.SCALE_UP
            return Remedy(kind=kind, reason="hosts are there")
        if situation.out:
            return self._without(situation, situation.out)
        kinds = {one.kind for one in situation.observations}
        if kinds <= {ObservationKind.CAPACITY} and situation.trains:
            return _grow(situation)
        classes = {one.device_class for one in situation.observations if one.device_class is not None}
        if situation.trains and kinds == {ObservationKind.DEVICE_FAULT} and classes <= {DeviceClass.IGNORE}:
            return Remedy(kind=RemedyKind.NOTHING, reason="the device goes on")
        if situation.trains and kinds <= {ObservationKind.STRAGGLER}:
            return _relieve(situation)
        if DeviceClass.RESET in classes and not any(_is(plan, RemedyKind.RESET_DEVICES) for plan in situation.tried):
            hosts = {one.host for one in situation.observations if one.device_class is DeviceClass.RESET}
            return Remedy(kind=RemedyKind.RESET_DEVICES, out=tuple(sorted(hosts)), reason="a device asks for a reset")
        if len(workload.stuck) > spec.max_in_job_restarts + spec.max_workload_restarts and _is_script_error(situation):
            return self._replace_culprit(situation)  # each time after so long that restarts before did not count
        if spec.max_workload_restarts == 0 and workload.in_job_restarts >= spec.max_in_job_restarts:
            return self._replace_culprit(situation)
        replaced = any(_is(plan, RemedyKind.RESTART_IN_JOB) for plan in situation.failed)
        if workload.in_job_restarts < spec.max_in_job_restarts and not replaced:
            return Remedy(kind=RemedyKind.RESTART_IN_JOB, reason="ranks are lost, and their hosts are well")
        if workload.workload_restarts < spec.max_workload_restarts:
            reason = "replacing ranks did not help" if replaced else "ranks were replaced too often in a row"
            return Remedy(kind=RemedyKind.RESTART_WORKLOAD, reason=reason)
        return self._replace_culprit(situation)

    def _without(self, situation: Situation, out: tuple[str, ...]) -> Remedy:
        spec = situation.workload.spec
        if len(situation.spares) >= len(out):
            return Remedy(kind=RemedyKind.HOT_SWAP, out=out, reason="spares are ready")
        replicas = situation.replicas_without(out)
        if situation.is_planned and replicas < min(situation.workload.replicas, spec.replicas):
            return Remedy(kind=RemedyKind.NOTHING, reason="there is no spare; the host stays until there is one")
        if replicas >= spec.min_replicas:
            count = len(situation.spares)
            return Remedy(
                kind=RemedyKind.SCALE_DOWN,
                out=out,
                reason=f"{_hosts(len(out))} gone, and {count or 'no'} spare{'' if count == 1 else 's'}",
            )
        return Remedy(
            kind=RemedyKind.WAIT,
            out=out,
            reason=f"{replicas} of the {spec.min_replicas} replicas that are needed at least have their hosts",
        )

    def _replace_culprit(self, situation: Situation) -> Remedy:
        """When restarts do not help, the host that fails most often is replaced, unless it is the script that fails."""
        workload, spec, faults = situation.workload, situation.workload.spec, situation.workload.host_faults
        if _is_script_error(situation):
            so_far = f"gets past step {workload.stuck_step}" if workload.stuck else "has made a step"
            reason = f"the ranks of all hosts fail alike, and none {so_far}: it is the script, not a host"
            return Remedy(kind=RemedyKind.STOP, reason=reason)
        worst = sorted((host for host in workload.places if faults.get(host)), key=lambda host: -faults[host])
        tried = {
            host for plan in situation.tried if plan.remedy.kind is RemedyKind.HOT_SWAP for host in plan.remedy.out
        }
        if workload.swaps >= _MOST_SWAPS:
            reason = f"restarts do not help, nor did it help to replace {workload.swaps} hosts one after the other"
            return last_resort(situation, reason)
        culprits = [host for host in worst if host not in tried][:1]
        if culprits and situation.spares:
            return Remedy(kind=RemedyKind.HOT_SWAP, out=tuple(culprits), reason="restarts do not help; it fails most")
        if culprits and situation.replicas_without(culprits) >= spec.min_replicas:
            return Remedy(kind=RemedyKind.SCALE_DOWN, out=tuple(culprits), reason="restarts do not help; it fails most")
        return last_resort(situation, "restarts do not help, and no host can be replaced")


def _is_script_error(situation: Situation) -> bool:
    """Whether ranks of every host have ended with the same status, before any rank of the job has made a step, or again
    and again without getting further. Of a job on one host that is known when its ranks fail on another one, too."""
    workload = situation.workload
    if not (len(workload.places) > 1 or workload.swaps):
        return False
    if workload.trained or situation.trains:
        return len(workload.stuck) >= _STUCK and workload.stuck[-1] == workload.generation
    return fails_alike(situation)


def fails_alike(situation: Situation) -> bool:
    """Whether ranks of every host have ended with the same status in this generation."""
    workload = situation.workload
    codes: dict[str, set[int]] = {host: set() for host in workload.places}
    for one in situation.observations:
        if one.exit_code is not None and one.host in codes:
            codes[one.host].add(one.exit_code)
    return bool(codes) and bool(set.intersection(*codes.values()))


def last_resort(situation: Situation, reason: str) -> Remedy:
    """What is done when neither restarts nor other hosts help: each of the last resorts once, then the job is
    stopped."""
    return Remedy(kind=situation.resorts[0] if situation.resorts else RemedyKind.STOP, reason=reason)


def _relieve(situation: Situation) -> Remedy:
    """Ranks slow down the others: swaps their hosts if the user wants that and spares are ready."""
    slow = sorted({one.host for one in situation.observations})[: len(situation.spares)]
    if not situation.workload.spec.swap_stragglers:
        reason = "a slow host still trains; drain it, or set swap_stragglers, to have it replaced"
        return Remedy(kind=RemedyKind.NOTHING, reason=reason)
    if not slow:
        return Remedy(kind=RemedyKind.NOTHING, reason="a slow host still trains, and there is no spare")
    return Remedy(kind=RemedyKind.HOT_SWAP, out=tuple(slow), reason="it holds up the others, and a spare is ready")


def _grow(situation: Situation) -> Remedy:
    if situation.replicas_without(()) <= situation.workload.replicas:
        return Remedy(kind=RemedyKind.NOTHING, reason="the hosts are gone again")
    return Remedy(kind=RemedyKind.SCALE_UP, reason="hosts are back")


def _is(plan: Plan, kind: RemedyKind) -> bool:
    return plan.remedy.kind is kind


def _hosts(count: int) -> str:
    return "a host is" if count == 1 else f"{count} hosts are"


def places_after(remedy: Remedy, situation: Situation) -> tuple[str, ...]:
    """Hosts by node rank once the remedy is done.

    A host keeps its node rank where possible, and a host that leaves is replaced by a spare of its block if there is
    one. With fewer replicas, those that are whole go on, and hosts left over from broken replicas fill others.
    """
    workload, spec = situation.workload, situation.workload.spec
    spares = list(situation.spares)
    gone = set(situation.out)
    if remedy.kind in (RemedyKind.HOT_SWAP, RemedyKind.SCALE_DOWN):
        gone |= set(remedy.out)
    if remedy.kind in (RemedyKind.START, RemedyKind.HOT_SWAP, RemedyKind.SCALE_UP, RemedyKind.SCALE_DOWN):
        kept = [
            _of_the_same_block(host, spares, situation.blocks) if host in gone else host for host in workload.places
        ]
        filled = [host if host is not None else (spares.pop(0) if spares else None) for host in kept]
        if remedy.kind in (RemedyKind.START, RemedyKind.SCALE_UP):
            filled += spares
        size = spec.hosts_per_replica
        groups = [filled[at : at + size] for at in range(0, len(filled), size)]
        whole = [host for group in groups if len(group) == size and None not in group for host in group]
        broken = [host for group in groups if len(group) != size or None in group for host in group if host]
        places = [host for host in (*whole, *broken) if host is not None]
        return tuple(places[: min(spec.replicas, len(places) // size) * size])
    return workload.places


def _of_the_same_block(host: str, spares: list[str], blocks: Mapping[str, str]) -> str | None:
    """Takes a spare of the same block out of ``spares`` and returns it; None when there is none."""
    block = blocks.get(host)
    found = next((spare for spare in spares if blocks.get(spare) == block), None) if block else None
    if found is not None:
        spares.remove(found)
    return found


def problem_of(remedy: Remedy, situation: Situation) -> str:
    """Why a remedy cannot be carried out, in words; "" when it can."""
    workload, spec = situation.workload, situation.workload.spec
    if remedy.kind in (RemedyKind.STOP, RemedyKind.WAIT):
        return ""
    if remedy.kind in LAST_RESORTS:
        return "" if remedy.kind in situation.resorts else "the cluster cannot do it, or it was done already"
    strangers = [host for host in remedy.out if host not in workload.places]
    if strangers:
        return f"{', '.join(strangers)} has no place in {workload.name}"
    if remedy.kind is RemedyKind.NOTHING:
        if not situation.trains:
            return "no rank trains, so doing nothing is no remedy"
        lost = [one for one in situation.observations if not one.is_planned and not _may_be_left(one)]
        return f"{lost[0].kind} of {lost[0].host}: the job cannot go on without a remedy" if lost else ""
    places = places_after(remedy, situation)
    bad = [host for host in places if host in situation.out]
    if bad:
        return f"{', '.join(bad)} cannot have ranks"
    if len(places) < spec.min_hosts:
        return f"{len(places)} hosts are left, and {spec.min_hosts} are needed"
    if remedy.kind is RemedyKind.HOT_SWAP and len(places) < len(workload.places):
        return f"{len(situation.spares)} spares are ready for {len(remedy.out)} places"
    if remedy.kind in (RemedyKind.START, RemedyKind.SCALE_UP) and len(places) <= len(workload.places):
        return "there are no more hosts than before"
    return ""


def _may_be_left(one: Observation) -> bool:
    return one.kind is ObservationKind.DEVICE_FAULT and one.device_class in (
        DeviceClass.IGNORE,
        DeviceClass.APPLICATION,
        DeviceClass.SOFT,
    )


def load_policy(where: str) -> Policy:
    """Loads the policy of ``path.py:Class``; "" gives the default one.

    Raises:
        ConfigError: there is no such file or class, it cannot be imported or constructed, or has no ``event_policy``.
    """
    if not where:
        return DefaultPolicy()
    path, _, name = where.rpartition(":")
    if not path or not name.isidentifier():
        raise ConfigError(f"policy {where!r}: pass a file and a class in it, as my_policy.py:MyPolicy")
    if not os.path.isfile(path):
        raise ConfigError(f"policy {where!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("resiliency_user_policy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module by name
    try:
        spec.loader.exec_module(module)
        policy: Any = getattr(module, name)()
    except AttributeError as error:
        raise ConfigError(f"policy {where!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"policy {where!r}: {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, "event_policy", None)):
        raise ConfigError(f"policy {where!r}: the class has no method event_policy(situation)")
    checked: Policy = policy
    return checked
