"""What is stored, and therefore may be acted upon: which host has which place, and what is asked of whom. Pure."""

from __future__ import annotations

import json

from resiliency.storage.typed_json import to_jsonable
from resiliency.supervisor.controller import Changes
from resiliency.supervisor.messages import Ask
from resiliency.supervisor.model import Plan, StepKind, Workload, WorkloadState

__all__ = ["ASKED", "Decided"]

#: Steps that hosts carry out.
ASKED = (StepKind.CHECKPOINT, StepKind.VERIFY, StepKind.RESET_DEVICES, StepKind.SIGNAL)


class Decided:
    """See the module. Thread: one."""

    def __init__(self) -> None:
        self.workloads: dict[str, Workload] = {}
        #: Those that are being carried out.
        self.plans: dict[int, Plan] = {}
        #: Of each host with a place: the workload, and its node rank.
        self._places: dict[str, tuple[str, int]] = {}
        self._texts: dict[str, tuple[str, str]] = {}

    def apply(self, changes: Changes) -> set[str]:
        """Takes over what was stored. Returns: hosts that this is news for."""
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
        self._texts.pop(workload.name, None)
        if not workload.state.has_ended:
            for node_rank, host in enumerate(workload.places):
                self._places[host] = workload.name, node_rank
        return concerned

    # -- places -------------------------------------------------------------------------------------------------------

    def place(self, host: str) -> tuple[Workload, int] | None:
        """The workload that the host has a place in, and its node rank there."""
        found = self._places.get(host)
        return None if found is None else (self.workloads[found[0]], found[1])

    def place_text(self, host: str) -> str:
        """The host's place as JSON. All hosts of a workload share all but one number of it, its node rank, except those
        of which ranks are to be replaced."""
        found = self._places.get(host)
        if found is None:
            return "null"
        name, node_rank = found
        if host in self.workloads[name].replace_on:
            return json.dumps(to_jsonable(self.workloads[name].place_of(host)), separators=(",", ":"))
        texts = self._texts.get(name)
        if texts is None:
            place = self.workloads[name].place_of(host)
            assert place is not None
            fields = to_jsonable(place)
            del fields["node_rank"]
            texts = self._texts[name] = '{"node_rank":', "," + json.dumps(fields, separators=(",", ":"))[1:]
        return f"{texts[0]}{node_rank}{texts[1]}"

    @property
    def all_is_done(self) -> bool:
        """There is nothing more for any host: all workloads have ended, and not all of them because they were stopped.
        Where one goes on, each host may be needed as its spare."""
        states = [each.state for each in self.workloads.values()]
        return all(state.has_ended for state in states) and WorkloadState.COMPLETED in states

    # -- asks ---------------------------------------------------------------------------------------------------------

    def asked(self, plan: Plan) -> tuple[str, ...]:
        """Hosts that carry out the plan's present step."""
        step = plan.step
        if step is None or step.kind not in ASKED:
            return ()
        if step.hosts:
            return step.hosts
        workload = self.workloads.get(plan.workload)
        return () if workload is None else workload.places

    def asks(self) -> dict[str, list[Ask]]:
        """What is asked of each host now."""
        found: dict[str, list[Ask]] = {}
        for plan in self.plans.values():
            step = plan.step
            if step is not None:
                for host in self.asked(plan):
                    ask = Ask(
                        plan=plan.number,
                        at=plan.at,
                        epoch=plan.epoch,
                        kind=step.kind,
                        timeout_s=step.timeout_s,
                        step=plan.save_step,
                        signal=step.signal,
                    )
                    found.setdefault(host, []).append(ask)
        return found


def _placed(workload: Workload) -> tuple[object, ...]:
    """What a host is told of it."""
    ended = workload.state if workload.state.has_ended else None
    replaced = workload.replace, workload.replace_on
    return workload.epoch, workload.places, workload.fresh, replaced, workload.replicas_before, ended
