"""A whole supervisor, its journal, and hosts that remember what they were asked, on a clock that the test turns.

Real are: the service with its controller and actuator, and what a monitor carries out asks with. Hosts, the disk, the
cluster and the user's program are scripted. A step of a host takes ``SLOW_S`` where it is slow, and never ends where it
hangs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from resiliency.monitor.asks import Asks
from resiliency.monitor.state import MonitorState
from resiliency.runtime.messages.monitor import (
    NO_PLAN,
    Ask,
    Desired,
    Observed,
    RankReport,
    Report,
    StepEnded,
    StepKind,
    pack,
    unpack,
)
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.runtime.messages.places import Place
from resiliency.supervisor.claims import Forged
from resiliency.supervisor.clusters.base import HostFacts
from resiliency.supervisor.clusters.none import NoCluster
from resiliency.supervisor.model import Outcome, Plan, RemedyKind, WorkloadSpec
from resiliency.supervisor.records import Changes
from resiliency.supervisor.sensor import SensorSettings
from resiliency.supervisor.service import Service
from resiliency.supervisor.settings import HookSettings, SupervisorSettings
from resiliency.supervisor.store import Stored

from .manual_loop import Inline, ManualLoop

__all__ = ["BEHAVIOURS", "Whole"]

PERIOD_S, TIMEOUT_S, LATENCY_S = 0.5, 2.0, 0.01
SLOW_S = 1.0
BEHAVIOURS = ("works", "fails", "slow", "hangs", "late", "twice")


class Killed(Exception):
    """Of the supervisor, by the test."""


class Journal:
    """The disk. Attributes: dies: "before" or "after" a transaction the supervisor is killed, the next one or, with
    ``dies_at`` = N, the Nth."""

    path = "journal"

    def __init__(self) -> None:
        self.workloads: dict[str, Any] = {}
        self.incidents: dict[int, Any] = {}
        self.plans: dict[int, Plan] = {}
        self.hosts: dict[str, Any] = {}
        self.dies, self.dies_at = "", 0
        self.transitions: list[tuple[Plan, Plan]] = []

    def fence(self, term: int) -> None:
        return

    def load(self) -> Stored:
        return Stored(
            workloads=list(self.workloads.values()),
            incidents=list(self.incidents.values()),
            plans=list(self.plans.values()),
            hosts=list(self.hosts.values()),
        )

    def commit(self, term: int, changes: Changes, hosts: Any = None, events: Any = ()) -> None:
        self.dies_at -= 1
        if self.dies == "before" and self.dies_at <= 0:
            raise Killed
        for number, plan in changes.plans.items():
            if number in self.plans:
                self.transitions.append((self.plans[number], plan))
        for name in ("workloads", "incidents", "plans"):
            getattr(self, name).update(getattr(changes, name))
        for name, host in (hosts or {}).items():
            self.hosts.pop(name, None)
            if host is not None:
                self.hosts[name] = host
        self.check()
        if self.dies == "after" and self.dies_at <= 0:
            raise Killed

    def check(self) -> None:
        """At most one live plan of each workload, and it is the one that the workload names."""
        for workload in self.workloads.values():
            live = [
                plan.number
                for plan in self.plans.values()
                if plan.workload == workload.name and plan.outcome is Outcome.ACTIVE
            ]
            assert live == ([] if workload.plan is None else [workload.plan]), f"{live} live, {workload}"
            opened = [each.number for each in self.incidents.values() if each.is_open]
            assert opened == ([] if workload.incident is None else [workload.incident]), f"{opened} open"


class Leads:
    looks_every_s = 1.0
    is_out_of_reach = False

    def is_held(self) -> bool:
        return True

    def renew(self) -> None:
        return


@dataclass
class HostLink:
    host: str
    incarnation: str
    of: SimHost
    closed: bool = False

    def offer(self, text: str) -> None:
        if not self.closed:
            self.of.whole.loop.call_later(LATENCY_S, self.of.hear, self, text)

    def close(self, reason: str) -> None:
        self.closed = True


@dataclass
class SimHost:
    """Attributes: behaves: of each kind of step, what happens the next time it is carried out."""

    whole: Whole
    name: str
    up: bool = True
    incarnation: int = 0
    devices: int = 0
    behaves: dict[StepKind, str] = field(default_factory=dict)
    effects: Counter[tuple[int, int, int, StepKind]] = field(default_factory=Counter)
    done: set[tuple[int, int, StepKind]] = field(default_factory=set)
    place: Place | None = None
    step: int = 0
    began: int = 0
    term: int = 0
    #: Places that it was told, in order; None: to leave.
    told: list[Place | None] = field(default_factory=list)
    link: HostLink | None = None

    def __post_init__(self) -> None:
        self.state = MonitorState()
        self.restart()

    def restart(self) -> None:
        """Of the monitor: what it has begun ends with it, and what it has written down stays."""
        self.incarnation += 1
        self.link = None
        kinds = {kind: self._carry_out for kind in (StepKind.VERIFY, StepKind.CHECKPOINT, StepKind.RESET_DEVICES)}
        self.asks = Asks(self.state, lambda: True, {**kinds, StepKind.SIGNAL: self._carry_out}, self._answer)

    async def restarted(self) -> None:
        await self.asks.close()
        self.restart()

    async def _carry_out(self, ask: Ask, within_s: float) -> str:
        if ask.plan != NO_PLAN:
            plan, must = self.whole.journal.plans.get(ask.plan), self.whole.must
            must(plan is not None and plan.generation == ask.generation, f"{ask} is not in the journal")
            must(plan is None or plan.steps[ask.at].kind is ask.kind and plan.at >= ask.at, f"{ask} is ahead of it")
            self.effects[ask.plan, ask.at, ask.generation, ask.kind] += 1
        how = self.behaves.pop(ask.kind, "works") if ask.plan != NO_PLAN else "works"
        if how == "hangs":
            await asyncio.Event().wait()
        if how == "slow":
            await asyncio.sleep(SLOW_S)
        if how == "fails":
            return "it failed"
        if how in ("late", "twice"):
            self.whole.tricks[ask.plan, ask.at, self.name] = how
        self.done.add((ask.plan, ask.at, ask.kind))
        return ""

    def _answer(self, ended: StepEnded) -> None:
        self.whole.said.append((self.name, ended))
        trick = self.whole.tricks.pop((ended.plan, ended.at, self.name), "")
        self.say(ended, after_s=SLOW_S * 6 if trick == "late" else LATENCY_S)
        if trick == "twice":
            self.say(ended)

    def say(self, message: Any, after_s: float = LATENCY_S) -> None:
        if self.link is not None and self.up:
            self.whole.loop.call_later(after_s, self.whole.take, self.link, pack(message))

    def hear(self, link: HostLink, text: str) -> None:
        if not self.up or link is not self.link or link.closed:
            return
        desired = unpack(text)
        assert isinstance(desired, Desired)
        self.term = desired.term
        if desired.place is None or self.place is None or desired.place.generation != self.place.generation:
            if desired.place != self.place:
                self.told.append(desired.place)
            self.place, self.began = desired.place, self.step
            self.whole.check_owners()
        self.asks.wanted(desired.asks)
        self.report()

    def report(self) -> None:
        service = self.whole.service
        if not self.up or service is None:
            return
        if self.link is None or self.link.closed:
            self.link = HostLink(self.name, str(self.incarnation), self)
            try:
                service.connect(self.link, address="10.0.0.1", block="", term=self.term)
            except Forged:
                self.link = None
                return
        place, ranks = self.place, ()
        if place is not None and self.whole.trains(place):
            self.step = self.began = max(self.step, self.began) + 1
            ranks = (RankReport(rank=place.node_rank, beats=1, step=self.step, watched=True),)
        self.say(
            Report(
                number=0,
                workload=place.workload if place else "",
                generation=place.generation if place else 0,
                master="10.0.0.1:2000" if place and place.node_rank == 0 else "",
                ranks=ranks,
                devices=self.devices,
                node_rank=place.node_rank if place else -1,
                nodes=place.nodes if place else 0,
                replicas=place.replicas if place else 0,
            )
        )


class _AsCluster(NoCluster):
    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    async def run(self, changed: Any) -> None:
        self._whole.is_of(self._whole.submitted)
        await super().run(changed)

    def wants_hosts(self, job: str) -> bool:
        return job in self._whole.wants_hosts

    async def take_out(self, host: str, reason: str, *, is_dead: bool) -> str:
        return await self._whole.take_out(host)

    @property
    def can(self) -> Any:  # type: ignore[override]
        return self._whole.can

    async def renew(self, job: str, *, whole: bool, reason: str) -> str:
        self._whole.told_last.append((job, "renew job" if whole else "renew hosts", reason))
        return ""

    async def give_up(self, job: str, reason: str) -> str:
        self._whole.told_last.append((job, "give up", reason))
        return ""

    async def keep(self, job: str, text: str) -> str:
        if job in self._whole.others.values():
            self._whole.kept_with_others[job] = text
        else:
            self._whole.kept = text
        self._whole.is_of(self._whole.submitted)
        return ""


class Whole:
    def __init__(self, spec: WorkloadSpec, hosts: int) -> None:
        self.loop = ManualLoop()
        self.spec, self.journal = spec, Journal()
        self.service: Service | None = None
        self.hook_behaves, self.cluster_behaves = "works", "works"
        self.tricks: dict[tuple[int, int, str], str] = {}
        #: Answers of hosts so far, to be said again.
        self.said: list[tuple[str, StepEnded]] = []
        #: Of this supervisor's life: what it has carried out itself, by plan and step.
        self.own: Counter[tuple[int, int]] = Counter()
        #: Hosts that the cluster was told to take out.
        self.taken_out: set[str] = set()
        #: Those of all lives, and those that are in hand.
        self.own_ever: set[tuple[int, int]] = set()
        self.own_now: set[tuple[int, int]] = set()
        self.broken: list[str] = []
        self._running: asyncio.Task[None] | None = None
        self._steps_since: dict[tuple[int, int], float] = {}
        self.hosts = {f"h-{number}": SimHost(self, f"h-{number}") for number in range(hosts)}
        #: What the cluster keeps with the job.
        self.kept = ""
        #: Last resorts that the cluster is able to, and what it was told to do when nothing helped.
        self.can: tuple[RemedyKind, ...] = ()
        self.told_last: list[tuple[str, str, str]] = []
        #: What the hosts are of, as the cluster says.
        self.submitted = ""
        #: Hosts that are of another job than the rest.
        self.others: dict[str, str] = {}
        self.kept_with_others: dict[str, str] = {}
        #: When each job was submitted, and the jobs that the cluster makes hosts for.
        self.created: dict[str, str] = {}
        self.wants_hosts: set[str] = set()
        self.start()

    def is_of(self, job: str) -> None:
        """The cluster says that all hosts are of this job, but for ``others``."""
        self.submitted = job
        assert self.service is not None
        for name in self.hosts:
            of = self.others.get(name, job)
            ended = self.kept if of == job else self.kept_with_others.get(of, "")
            self.service.cluster_says(
                HostFacts(host=name, node=f"n-{name}", job=of, job_created=self.created.get(of, ""), ended=ended)
            )

    # -- the supervisor -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        async def begin() -> Service:
            settings = SupervisorSettings(
                state="unused",
                workloads=[self.spec],
                sensor=SensorSettings(period_s=PERIOD_S, timeout_s=TIMEOUT_S, quarantine_s=4.0, thaw_s=1.0),
                insecure_no_authentication=True,
                hook=HookSettings(command=["unused"], signal="SIGUSR1", timeout_s=6.0),
            )
            made = Service(settings, self.journal, Leads(), 1, cluster=_AsCluster(self), clock=self.loop.time)
            made.journal._executor.shutdown()
            made.journal._executor = Inline()  # type: ignore[assignment]
            made._actuator._run_hook = self._run_hook  # type: ignore[method-assign]
            return made

        self.own, self.journal.dies, self.journal.dies_at = Counter(), "", 0
        self._steps_since.clear()
        self.service = self.loop.complete(begin())
        self._running = self.loop.create_task(self.service.run())

    def kill(self) -> None:
        """In this moment, and all it does with it."""
        service, running = self.service, self._running
        self.service = None
        assert service is not None and running is not None
        for host in self.hosts.values():
            host.link = None
        running.cancel()
        with suppress(asyncio.CancelledError, Killed):
            self.loop.complete(running)

    async def _run_hook(self, plan: Plan, workload: Any) -> str:
        stored, how = self.journal.plans[plan.number], self.hook_behaves
        is_due = stored.at == plan.at and stored.steps[plan.at].kind is StepKind.HOOK
        self.must(is_due, "the hook is not what the journal says")
        self.own[plan.number, plan.at] += 1
        self.must(self.own[plan.number, plan.at] == 1, f"the hook of plan {plan.number} was begun twice")
        self.own_ever.add((plan.number, plan.at))
        self.own_now.add((plan.number, plan.at))
        try:
            return await self._does(how)
        finally:
            self.own_now.discard((plan.number, plan.at))

    async def take_out(self, host: str) -> str:
        """Of the cluster. No host with a place is ever taken out."""
        has_place = host in self.job.places and not self.job.state.has_ended
        self.must(not has_place, f"{host} is taken out, and has a place")
        self.taken_out.add(host)
        return await self._does(self.cluster_behaves)

    async def _does(self, how: str) -> str:
        if how == "hangs":
            await asyncio.Event().wait()
        if how in ("slow", "late"):
            await asyncio.sleep(SLOW_S)
        if how == "throws":
            raise ValueError("the backend is broken")
        return "it failed" if how == "fails" else ""

    def take(self, link: HostLink, text: str) -> None:
        """What a monitor has sent."""
        service, message = self.service, unpack(text)
        if service is None or link.closed or not service.is_current(link):
            return
        if isinstance(message, Report):
            service.report(link, message)
        elif isinstance(message, Observed):
            service.observed(link, message)
        elif isinstance(message, StepEnded):
            service.step_ended(link, message)

    # -- time ---------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / PERIOD_S))):
            for host in self.hosts.values():
                host.report()
            self.loop.pass_time(PERIOD_S)
            if self._running is not None and self._running.done() and self.service is not None:
                error = self._running.exception()
                assert isinstance(error, Killed), error
                self.kill()
                self.start()
            self.check()

    def until(self, is_so: Any, within_s: float = 600.0) -> None:
        end_s = self.loop.now_s + within_s
        while not is_so():
            assert self.loop.now_s < end_s, f"not within {within_s} s: {self.job}"
            self.pass_time(PERIOD_S)

    @property
    def job(self) -> Any:
        return self.journal.workloads.get(self.spec.name)

    def trains(self, place: Place) -> bool:
        return sum(
            each.up and each.place is not None and each.place.generation == place.generation
            for each in self.hosts.values()
        ) == (place.nodes)

    # -- what must always hold ----------------------------------------------------------------------------------------

    def check_owners(self) -> None:
        owners: dict[tuple[int, int], str] = {}
        for host in self.hosts.values():
            if host.up and host.place is not None:
                key = host.place.generation, host.place.node_rank
                assert key not in owners, f"{host.name} and {owners[key]} both have rank {key}"
                owners[key] = host.name

    def must(self, holds: bool, what: str) -> None:
        """What is looked at where an exception would be taken for one of a host or a backend."""
        if not holds:
            self.broken.append(what)

    def check(self) -> None:
        assert self.broken == []
        self.check_owners()
        assert not self.job or not self.job.places or len(self.job.places) >= self.job.spec.min_hosts
        for host in self.hosts.values():
            for (plan, at, _, kind), count in host.effects.items():
                if kind is not StepKind.VERIFY:  # a check leaves nothing behind, and may be made again
                    assert count <= 1, f"{host.name}: {kind}, step {at} of plan {plan}, was carried out {count} times"
        active = {(plan.number, plan.at) for plan in self.journal.plans.values() if plan.step is not None}
        assert self.service is None or self.own_now <= active, "what is over is still being done"
        self._check_transitions()
        self._check_deadlines()

    def _check_transitions(self) -> None:
        """No plan goes beyond a step that was not begun, or not done where it is required; none goes back."""
        for before, after in self.journal.transitions:
            assert after.at >= before.at and (before.outcome is Outcome.ACTIVE or after == before), (before, after)
            for at in range(before.at, after.at):
                step = before.steps[at]
                if step.required and step.kind in (StepKind.VERIFY, StepKind.RESET_DEVICES):
                    for name in step.hosts:
                        assert (before.number, at, step.kind) in self.hosts[name].done, f"{name}: {step.kind}"
                if step.kind is StepKind.HOOK:
                    assert (before.number, at) in self.own_ever, f"{step.kind} of plan {before.number} was left out"
        self.journal.transitions.clear()

    def _check_deadlines(self) -> None:
        service = self.service
        if service is None or service.sensor.frozen:
            self._steps_since.clear()
            return
        active = {(plan.number, plan.at): plan.step for plan in service.controller.active_plans()}
        self._steps_since = {key: self._steps_since.get(key, self.loop.now_s) for key in active}
        for key, step in active.items():
            took_s = self.loop.now_s - self._steps_since[key]
            assert step is None or took_s <= step.timeout_s + 2 * PERIOD_S, f"{step} of plan {key} takes {took_s} s"

    # -- faults -------------------------------------------------------------------------------------------------------

    def observed(self, name: str, kind: ObservationKind, **fields: Any) -> None:
        host = self.hosts[name]
        if host.place is not None:
            fields |= {"workload": host.place.workload, "generation": host.place.generation}
        host.say(Observed(observations=(Observation(kind=kind, host=name, **fields),)))

    def lose_host(self, name: str) -> None:
        host = self.hosts[name]
        host.up, host.place = False, None

    def add_host(self, name: str, *, of: str) -> None:
        """Another job has one more host."""
        self.others[name] = of
        self.hosts[name] = SimHost(self, name)
        self.is_of(self.submitted)

    def bring_back(self, name: str) -> None:
        host = self.hosts[name]
        host.up = True
        self.loop.complete(host.restarted())

    def close(self) -> None:
        if self.service is not None:
            self.kill()
        for host in self.hosts.values():
            self.loop.complete(host.asks.close())
        self.loop.close()
