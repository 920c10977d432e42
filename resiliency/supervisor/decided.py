"""The decisions that are stored, and may therefore be acted upon: the place of each host, the steps each host is asked
for, and the hosts that are taken out. Pure: no input, no output, no clock."""

from __future__ import annotations

from resiliency.runtime.messages.monitor import Ask, StepKind
from resiliency.supervisor.model import Plan, RemedyKind, Workload, WorkloadState
from resiliency.supervisor.records import Changes

__all__ = ["ASKED", "Decided"]

_TAKES_OUT = (RemedyKind.HOT_SWAP, RemedyKind.SCALE_DOWN)
#: Kinds of steps that hosts carry out.
ASKED = (StepKind.CHECKPOINT, StepKind.VERIFY, StepKind.RESET_DEVICES, StepKind.SIGNAL)


class Decided:
    """What was stored last. Thread: one."""

    def __init__(self) -> None:
        self.workloads: dict[str, Workload] = {}
        #: Plans that are being carried out, by number.
        self.plans: dict[int, Plan] = {}
        #: Hosts that have lost their places to others, as the plan says that has taken them out.
        self.out: dict[str, Plan] = {}
        #: By host with a place: the workload's name, and the host's node rank.
        self._places: dict[str, tuple[str, int]] = {}

    def apply(self, changes: Changes) -> set[str]:
        """Takes over what was stored. Returns the hosts whose place or asks may have changed."""
        concerned: set[str] = set()
        for workload in changes.workloads.values():
            before = self.workloads.get(workload.name)
            if before is None or _placed(before) != _placed(workload):
                concerned |= self._place(before, workload)
            self.workloads[workload.name] = workload
        for plan in changes.plans.values():
            known = self.plans.get(plan.number)
            if known is not None and known.step is not None:
                concerned.update(self.asked(known))
            if plan.remedy.kind in _TAKES_OUT and (plan.step is None or plan.step.kind is StepKind.PROGRESS):
                self.out.update(dict.fromkeys(plan.remedy.out, plan))
            if plan.step is None:
                self.plans.pop(plan.number, None)
            else:
                self.plans[plan.number] = plan
                concerned.update(self.asked(plan))
        return concerned

    def _place(self, before: Workload | None, workload: Workload) -> set[str]:
        concerned = set(workload.places)
        for host in before.places if before is not None else ():
            concerned.add(host)
            if self._places.get(host, ("",))[0] == workload.name:
                del self._places[host]
        if not workload.state.has_ended:
            for node_rank, host in enumerate(workload.places):
                self._places[host] = workload.name, node_rank
        return concerned

    # -- places -------------------------------------------------------------------------------------------------------

    def place(self, host: str) -> tuple[Workload, int] | None:
        """The workload in which the host has a place, and its node rank there; None when it has none."""
        found = self._places.get(host)
        return None if found is None else (self.workloads[found[0]], found[1])

    @property
    def all_is_done(self) -> bool:
        """No host is needed any more: all workloads have ended, and at least one was completed (not stopped). While a
        workload runs, any host may be needed as its spare."""
        states = [each.state for each in self.workloads.values()]
        return all(state.has_ended for state in states) and WorkloadState.COMPLETED in states

    # -- asks ---------------------------------------------------------------------------------------------------------

    def asked(self, plan: Plan) -> tuple[str, ...]:
        """Hosts that carry out the plan's present step; empty when hosts do not carry it out."""
        step = plan.step
        if step is None or step.kind not in ASKED:
            return ()
        if step.hosts:
            return step.hosts
        workload = self.workloads.get(plan.workload)
        return () if workload is None else workload.places

    def asks(self) -> dict[str, list[Ask]]:
        """The asks of each host now."""
        found: dict[str, list[Ask]] = {}
        for plan in self.plans.values():
            step = plan.step
            if step is not None:
                for host in self.asked(plan):
                    ask = Ask(
                        plan=plan.number,
                        at=plan.at,
                        generation=plan.generation,
                        kind=step.kind,
                        timeout_s=step.timeout_s,
                        step=plan.save_step,
                        signal=step.signal,
                    )
                    found.setdefault(host, []).append(ask)
        return found


def _placed(workload: Workload) -> tuple[object, ...]:
    """The fields of a workload that its hosts are told."""
    ended = workload.state if workload.state.has_ended else None
    replaced = workload.replace, workload.replace_on
    return workload.generation, workload.places, workload.fresh, replaced, workload.replicas_before, ended
