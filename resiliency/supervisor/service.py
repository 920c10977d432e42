"""The supervisor that leads: it handles messages of monitors and operators, decides, stores, and only then tells hosts
what to do.

Everything here runs on one event loop and never blocks. The store writes on a thread of its own: while a disk is slow,
messages are handled all the same, and hosts are told of decisions once they are on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from resiliency.events import EventKind
from resiliency.faultpoints import hit
from resiliency.runtime.messages.monitor import (
    MONITOR_ENDS,
    NO_PLAN,
    Ask,
    Desired,
    Message,
    Observed,
    Report,
    StepEnded,
    StepKind,
    pack,
)
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.runtime.messages.places import store_address
from resiliency.runtime.tasks import end_tasks
from resiliency.supervisor.actuator import Actuator
from resiliency.supervisor.adoption import Adoption
from resiliency.supervisor.claims import Forged, check_host, check_node, of_host
from resiliency.supervisor.clusters.base import Cluster, HostFacts
from resiliency.supervisor.clusters.none import NoCluster
from resiliency.supervisor.controller import Controller, ControllerSettings
from resiliency.supervisor.decided import ASKED, Decided
from resiliency.supervisor.ends import ends_of, ends_text
from resiliency.supervisor.hang_watch import HangWatch
from resiliency.supervisor.jobs import Jobs
from resiliency.supervisor.journal import Journal
from resiliency.supervisor.lease import Lease
from resiliency.supervisor.model import HostState, Plan, RemedyKind, Workload, WorkloadSpec, WorkloadState
from resiliency.supervisor.policy import load_policy
from resiliency.supervisor.policy_guard import GuardedPolicy
from resiliency.supervisor.records import Changes
from resiliency.supervisor.sensor import Sensor
from resiliency.supervisor.settings import SupervisorSettings
from resiliency.supervisor.store import HistoryEvent, LeadershipLost, StateStore, StateUnavailable
from resiliency.supervisor.straggler_watch import StragglerWatch
from resiliency.supervisor.waiting import names, waits_for
from resiliency.telemetry.plain_text import plain_line

__all__ = ["Link", "Service"]

logger = logging.getLogger(__name__)

#: Longest time, in seconds, between two looks at what is due.
_TICK_S = 0.1
#: A look is followed by a rest of this many times its duration (up to a tick): in a burst of messages each one asks for
#: a look, and with thousands of hosts a look takes some time.
_REST = 9
#: Seconds that hosts have to disconnect when all workloads have ended.
_HANG_UP_S = 5.0
#: Seconds for the check of a host that joins.
_VERIFY_TIMEOUT_S = 30.0
_MOST_TEXT = 2000
#: Highest step that is believed when a rank reports it. A higher one is no step, and sums must stay exact.
_MOST_STEP = 1 << 53
#: A host without ranks is taken out of the cluster when it has been silent for this many heartbeat timeouts.
_LEFT_BEHIND = 3
#: Seconds in which hosts that have not connected may have all ranks of a job that is not known here: it is not begun on
#: others. A kubelet takes up to two minutes to give a pod the supervisor's new certificate.
_UNHEARD_S = 300.0
#: When no look took place for this many seconds, or a transaction takes longer, deadlines of steps are moved.
_AWAY_S = 1.0
#: How the reason of a cordon begins that is the cluster's, and ends with what the cluster wants. It is stored with it.
_BY_CLUSTER = "out of use: "


class Link(Protocol):
    """The connection of a monitor."""

    host: str
    incarnation: str

    def offer(self, text: str) -> None:
        """Queues a message in place of any that is not being sent yet. Blocks: never."""
        ...

    def close(self, reason: str) -> None: ...


@dataclass(kw_only=True)
class _Heard:
    """What was heard from a host. Not stored, because the host reports it again."""

    link: Link | None = None
    offered: str = ""
    at_s: float = -1.0
    place: tuple[str, int] = ("", 0)
    step: int = -1
    ended: bool = False
    problem: str = ""
    elsewhere_since_s: float | None = None
    has_reported: bool = False
    devices: tuple[str, int] | None = None


@dataclass(kw_only=True)
class _Check:
    """The check of a host that joins.

    Attributes:
        at: number that no other check has.
        asked_s: when it was asked for.
    """

    at: int
    asked_s: float


@dataclass(kw_only=True)
class Counts:
    """Counters for the metrics."""

    messages: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    plans: Counter[tuple[str, str]] = field(default_factory=Counter)
    incidents: int = 0


class Service:
    """Leads in one term. Thread: the event loop's.

    Args:
        log: called with every line of the history, and its workload's generation, once it is stored.
        watch_handled, watch_commit: called with the seconds that a message, or a transaction, took.
        begin_again: workloads of the file that have ended are started again.

    Raises:
        ConfigError: the policy or the stored state cannot be used.
        LeadershipLost: a higher term has begun.
        StateUnavailable: the state cannot be read or written now.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        store: StateStore,
        lease: Lease,
        term: int,
        *,
        cluster: Cluster | None = None,
        log: Callable[[HistoryEvent, int], None] = lambda event, generation: None,
        watch_handled: Callable[[float], None] = lambda seconds: None,
        watch_commit: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        until_ended: bool = False,
        begin_again: bool = False,
    ) -> None:
        self._begin_again = begin_again
        self.settings, self.term = settings, term
        self._until_ended, self._ended_s = until_ended, clock()
        self._store, self._lease, self._clock = store, lease, clock
        self._log, self.watch_handled = log, watch_handled
        now_s = clock()
        self._cluster = cluster or NoCluster()
        self.jobs = Jobs(self._cluster)
        self.sensor = Sensor(settings.sensor, now_s)
        hook = settings.hook
        self.controller = Controller(
            self.sensor,
            policy=GuardedPolicy(load_policy(settings.policy)) if settings.policy else None,
            settings=ControllerSettings(
                most_plans=settings.most_plans,
                hook_timeout_s=0.0 if hook is None or not hook.command else hook.timeout_s,
                hook_signal=0 if hook is None else hook.number,
                dry_run=settings.dry_run,
            ),
            period_s=settings.sensor.period_s,
            machine_of=self.machine_of,
            jobs=self.jobs,
            resorts=self._resorts,
        )
        self.decided = Decided()
        self.counts = Counts()
        self.began_s = now_s
        self._hangs = HangWatch(steps=settings.hang.hang_steps, floor_s=settings.hang.hang_floor_s)
        self._stragglers = StragglerWatch(
            factor=settings.straggler.straggler_factor, window_s=settings.straggler.straggler_window_s
        )
        #: Hosts that are no more, as the cluster says. They are forgotten when their places are given to others.
        self._gone: set[str] = set()
        #: Since when the machines of hosts that were never heard of are down.
        self._down_s: dict[str, float] = {}
        #: Why hosts on a machine cannot have ranks, as its watchdogs say; "": they can.
        self._node_problems: dict[str, str] = {}
        #: What the cluster keeps with each job about the ends of its workloads.
        self._kept: dict[str, str] = {}
        self._actuator = Actuator(
            hook=() if hook is None else tuple(hook.command),
            cluster=self._cluster,
            ended=self._carried_out,
        )
        self._heard: dict[str, _Heard] = {}
        #: How many hosts of a job have so many devices.
        self._devices: Counter[tuple[str, int]] = Counter()
        self._masters: dict[str, tuple[int, str]] = {}
        self._checks: dict[str, _Check] = {}
        #: Answers of hosts, by plan number and step index.
        self._answers: dict[tuple[int, int], dict[str, str]] = {}
        self._asks: dict[str, list[Ask]] = {}
        self._due, self._stopped = asyncio.Event(), asyncio.Event()
        self.journal = Journal(store, term, stopped=self._stopped, clock=clock, watch_commit=watch_commit)
        self._swept_s = self._looked_s = now_s
        self._inject_at_s = now_s + settings.fault_injection_period_s
        #: When it was counted whether most hosts are connected, and whether they were.
        self._counted_s, self._has_most = float("-inf"), False
        #: Whether hosts were told nothing because they may have ranks that are not known here.
        self._offers_held = False
        #: Whether something was not sent or not started because the lease had run out.
        self._held_back = False
        #: Apart from the store's: a lease that is slow to be renewed must not hold up what is written.
        self._lease_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="supervisor-lease")
        self._restore(now_s)

    def _restore(self, now_s: float) -> None:
        stored = self.journal.load()
        needed = {host for each in stored.workloads if not each.state.has_ended for host in each.places}
        gone = {host.name for host in stored.hosts if host.state is HostState.SILENT} - needed
        self.sensor.restore(stored.hosts, now_s, given_up=gone)
        self.controller.restore(stored.workloads, stored.incidents, stored.plans, now_s, time.time())
        self.decided.apply(
            Changes(
                workloads={each.name: each for each in stored.workloads},
                plans={each.number: each for each in stored.plans},
            )
        )
        self._asks = self.decided.asks()
        generations = {spec.name: 0 for spec in self.settings.workloads if not self._begin_again}
        known = {**generations, **{each.name: each.generation for each in stored.workloads}}
        self._adoption = Adoption(known, now_s + self._adopts_s)
        wanted = {spec.name for spec in self.settings.workloads}
        for spec in self.settings.workloads:
            self._add(spec, now_s)
        for workload in stored.workloads:
            if workload.name not in wanted and not workload.state.has_ended:
                logger.warning(
                    "workload %s is not in the file any more, and goes on; `resiliency supervisor stop %s` ends it",
                    workload.name,
                    workload.name,
                )
        self._note_event(EventKind.SUPERVISOR_LEADS, f"a supervisor leads, in term {self.term}", term=self.term)

    def _add(self, spec: WorkloadSpec, now_s: float) -> None:
        known = self.controller.workloads.get(spec.name)
        if known is not None and known.state.has_ended and not self._begin_again:
            logger.warning(
                "workload %s is %s (%s), and is not begun again; `resiliency supervisor start %s` begins it",
                spec.name,
                known.state,
                known.reason,
                spec.name,
            )
            return
        self.controller.add(spec, now_s)
        self._say_other_size(spec.name)

    def _say_other_size(self, name: str) -> None:
        if problem := self.other_size_of(self.controller.workloads[name]):
            logger.error("workload %s %s", name, problem)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Leads until :meth:`stop`.

        Raises:
            LeadershipLost: another supervisor leads, and this one must send nothing more.
        """
        works = (
            self._keep_lease(),
            self._keep_looking(),
            self._keep_storing(),
            self._cluster.run(self.cluster_says),
            self._stopped.wait(),
        )
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self.journal.has_more:
                with contextlib.suppress(LeadershipLost, StateUnavailable):
                    await self._store_pending()
        finally:
            await end_tasks(tasks)
            await self._actuator.close()
            for heard in self._heard.values():
                if heard.link is not None:
                    heard.link.close("the supervisor ends")
            self.journal.close()
            self._lease_executor.shutdown(wait=False)

    def stop(self) -> None:
        self._stopped.set()

    def may_lead(self) -> bool:
        """Whether hosts may connect: no other supervisor is known to lead. It needs them to know that it does."""
        return self._lease.is_held() or self._lease.is_out_of_reach

    def leads(self) -> bool:
        """Whether this supervisor may act: no other one has taken over. To be asked right before something is sent.

        While a lease cannot be reached, the supervisor goes on that most hosts are connected to, spares too: another
        one acts through hosts alone, and a host is connected to one.
        """
        if self._lease.is_held():
            return True
        if not self._lease.is_out_of_reach:
            return False
        now_s = self._clock()
        if now_s - self._counted_s < _TICK_S / 2:
            return self._has_most
        placed = {host for each in self.decided.workloads.values() if not each.state.has_ended for host in each.places}
        hosts = placed | self.jobs.facts.keys()
        since_s = now_s - self.settings.sensor.timeout_s
        here = sum(
            heard.link is not None and heard.at_s > since_s
            for host in hosts
            if (heard := self._heard.get(host)) is not None
        )
        self._counted_s, self._has_most = now_s, 2 * here > len(hosts)
        return self._has_most

    async def _keep_lease(self) -> None:
        """Renews the lease. While it cannot be renewed in time, hosts are heard, and nothing is decided, sent or
        started: another supervisor may lead. What was held back is done when it is renewed."""
        loop, problem = asyncio.get_running_loop(), ""
        while True:
            try:
                await loop.run_in_executor(self._lease_executor, self._lease.renew)
            except StateUnavailable as error:
                if not problem:
                    logger.error(
                        "the lease cannot be renewed: %s; nothing is done once it has run out%s",
                        error,
                        ", unless most hosts stay connected" if self._lease.is_out_of_reach else "",
                    )
                problem = str(error)
            else:
                problem = ""
                if self._held_back:
                    self._held_back = False
                    self._act(self._heard)
            await asyncio.sleep(self._lease.looks_every_s)

    async def _keep_looking(self) -> None:
        while True:
            self._due.clear()
            began_s = time.monotonic()
            self._look()
            await asyncio.sleep(min(_REST * (time.monotonic() - began_s), _TICK_S))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._due.wait(), _TICK_S)

    def _look(self) -> None:
        now_s, wall = self._clock(), time.time()
        if not self.leads():
            self._held_back = True
            self._actuator.carry_out({}, {})  # what it has begun is for the next leader to begin
            return
        self._forgive_own_absence(now_s)
        self._give_up_late_steps(now_s, wall)
        if self.settings.enable_fault_injection and now_s >= self._inject_at_s:
            self._inject_at_s = now_s + self.settings.fault_injection_period_s
            self._inject(now_s, wall)
        nothing_was_adopted = self._offers_held and now_s >= self._adoption.until_s
        if nothing_was_adopted:
            for host, heard in self._heard.items():  # once they are told to end those ranks they report them no more
                self.controller.heard_of_generation(host, *heard.place)
        self._wait_for_submission(now_s)
        if now_s < self._adoption.until_s and now_s - self.began_s < _UNHEARD_S and self._has_unheard():
            self._adoption.wait_until(now_s + self._adopts_s)
        self.controller.look(now_s, wall, held=lambda name: self._adoption.holds_workload(name, now_s))
        if nothing_was_adopted:
            self._offers_held = False
            self._offer(self._heard)
        if now_s - self._swept_s >= 1.0:
            self._swept_s = now_s
            self._sweep(now_s)
        self._collect()

    @property
    def _adopts_s(self) -> float:
        return self.settings.sensor.timeout_s + self.settings.sensor.period_s

    def _has_unheard(self) -> bool:
        """Whether there are hosts on machines that work and that have not connected yet: they may have ranks, unless
        all workloads are begun."""
        if all(each.generation for each in self.controller.workloads.values()):
            return False
        facts = self.jobs.facts.values()
        if not facts:
            return self._cluster.vouches  # it has said nothing yet
        return any(not one.is_down and self.sensor.host(one.host) is None for one in facts)

    def _wait_for_submission(self, now_s: float) -> None:
        """Where a cluster starts the hosts, the time to wait for them begins when one of the job has a machine. Before
        that, the job is not submitted, suspended, or queued."""
        for name, workload in self.controller.workloads.items() if self._cluster.vouches else ():
            waits = workload.state is WorkloadState.WAITING
            if waits and not any(self._may_be_of(workload, host) for host in self.jobs.facts):
                self.controller.waits_anew(name, now_s)

    def _forgive_own_absence(self, now_s: float) -> None:
        """Moves deadlines of steps by the time in which this process did not run and could hear no host, or in which
        the disk was slow and no host could be told."""
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        since_s = self.journal.writes_since_s
        is_behind = since_s is not None and now_s - since_s > _AWAY_S
        if gap_s > _AWAY_S:
            for heard in self._heard.values():
                heard.elsewhere_since_s = None
        if gap_s > _AWAY_S or is_behind:
            self.controller.pause(gap_s)

    @property
    def ended(self) -> tuple[Workload, ...] | None:
        """All workloads, if all of them have ended and that is stored; else None."""
        known = tuple(self.decided.workloads.values())
        return known if known and all(each.state.has_ended for each in known) else None

    def _end_with_workloads(self, now_s: float) -> None:
        """Stops once the hosts of ended workloads have disconnected, or after ``_HANG_UP_S``."""
        ended = self.ended
        if ended is None:
            self._ended_s = now_s
            return
        hosts = {host for each in ended for host in each.places}
        if now_s - self._ended_s > _HANG_UP_S or not any(self._heard[host].link for host in hosts & self._heard.keys()):
            self.stop()

    def _sweep(self, now_s: float) -> None:
        """Work that is not needed at every look; runs once a second."""
        if self._until_ended:
            self._end_with_workloads(now_s)
        for straggler in self._stragglers.look(now_s):
            self._observe(straggler)
        for name in self.sensor.to_check(now_s):
            self._check(name, now_s)
        placed = self.decided.place
        self._take_out(now_s)
        if self.leads():
            self._tell_of_ends(now_s)
            self._begin_submitted()
        ended = [name for name in self._gone if (one := self._heard.get(name)) is None or one.link is None]
        for name in [*self.sensor.forgotten(now_s), *ended]:
            if placed(name) is None:
                self._gone.discard(name)
                self.sensor.forget(name)
                if (gone := self._heard.pop(name, None)) is not None:
                    self._count_devices(gone, None)
        for name, heard in self._heard.items():
            if heard.link is not None and self.sensor.state_of(name) is HostState.SILENT:
                # If the monitor lives, it connects again.
                heard.link.close("not heard of for too long")

    def _take_out(self, now_s: float) -> None:
        """Tells the cluster of hosts that were replaced, and of others without a place that have died, until it has
        taken them out."""
        self.decided.out = {name: plan for name, plan in self.decided.out.items() if not self._is_back(name)}
        if not self.leads() or self.sensor.frozen:
            return
        wanted = {name: self._why(name, plan) for name, plan in self.decided.out.items() if name in self.jobs.facts}
        for name in self.sensor.silent_for(_LEFT_BEHIND * self.settings.sensor.timeout_s, now_s):
            if name in self.jobs.facts and self.decided.place(name) is None:
                wanted.setdefault(name, "it is not heard of any more")
        # A host that has died with the leader before was never heard of here. On a machine that works it may be one
        # that still starts.
        down = [one.host for one in self.jobs.facts.values() if one.is_down and self.sensor.host(one.host) is None]
        self._down_s = {name: self._down_s.get(name, now_s) for name in down}
        for name, since_s in self._down_s.items():
            if now_s - since_s > _LEFT_BEHIND * self.settings.sensor.timeout_s:
                wanted.setdefault(name, "its node is down, and it was not heard of")
        for name, reason in wanted.items():
            known = self.sensor.host(name)
            is_dead = known is None or now_s - known.heard_s > self.settings.sensor.timeout_s
            self._actuator.take_out(name, reason, now_s, is_dead=is_dead)

    def _tell_of_ends(self, now_s: float) -> None:
        """Has the cluster keep which workloads were stopped, and fail the jobs that were given up, until it has."""
        workloads, jobs = self.controller.workloads.values(), {each.job for each in self.jobs.facts.values()}
        for job in jobs & self._kept.keys() & {each.job for each in workloads}:  # of others it stays
            if (text := ends_text(each for each in workloads if each.job == job)) != self._kept[job]:
                self._actuator.keep(job, text, now_s)
        if self.ended is None or self.decided.all_is_done:
            return  # another workload may need the hosts, or they are told that the job is completed
        given_up = [each for each in self.ended if each.state is WorkloadState.STOPPED and not each.by_hand]
        for job in {each.job for each in given_up if each.job} & jobs:
            self._actuator.give_up(job, "; ".join(each.reason for each in given_up if each.job == job), now_s)

    def _is_back(self, host: str) -> bool:
        return self.decided.place(host) is not None or self.sensor.state_of(host) is HostState.READY

    def _collect(self) -> None:
        self.journal.add(self.controller.take_changes(), self.sensor.take_changed())

    # -- storing ------------------------------------------------------------------------------------------------------

    async def _keep_storing(self) -> None:
        while True:
            await self.journal.dirty.wait()
            self.journal.dirty.clear()
            if self.journal.has_more:
                await self._store_pending()

    async def _store_pending(self) -> None:
        changes, events = await self.journal.write(self.sensor.host)
        self._count(events)
        was_over = {name: each.state.has_ended for name, each in self.decided.workloads.items()}
        was_done = self.decided.all_is_done
        taken = {name: len(one.resorts) for name, one in self.decided.workloads.items()}
        renewed = [one for name, one in changes.workloads.items() if len(one.resorts) > taken.get(name, 0)]
        concerned = self.decided.apply(changes)
        for name, workload in changes.workloads.items():
            if workload.state.has_ended and not was_over.get(name, False):
                self._hangs.forget(name)
                self._stragglers.forget(name)
                if not workload.job and len(jobs := {each.job for each in self.jobs.facts.values()}) == 1:
                    self.controller.note_job(name, *jobs)  # it never had hosts, and these were there for it
        if self.decided.all_is_done != was_done:
            concerned.update(self._heard)  # hosts without a place may end too, or are wanted again
        self._asks = self.decided.asks()
        self._answers = {
            key: value
            for key, value in self._answers.items()
            if key[0] in self.decided.plans and self.decided.plans[key[0]].at == key[1]
        }
        for event in events:
            at = self.decided.workloads.get(event.workload)
            self._log(event, 0 if at is None else at.generation)
        self._act(concerned)
        for workload in renewed:
            if self.leads():
                self._actuator.renew(workload, self._clock())

    def _resorts(self, workload: Workload) -> Collection[RemedyKind]:
        """Last resorts that are possible: hosts that another workload may use are not made anew, nor is a job for whose
        end another one waits."""
        is_alone = all(one.name == workload.name or one.state.has_ended for one in self.controller.workloads.values())
        if not workload.job or not is_alone:
            return ()
        others_wait = any(facts.job not in ("", workload.job) for facts in self.jobs.facts.values())
        return [kind for kind in self._cluster.can if kind is not RemedyKind.RENEW_JOB or not others_wait]

    def _act(self, concerned: Iterable[str]) -> None:
        """Tells hosts, and does itself, what is decided."""
        self._offer(concerned)
        if self.leads():
            self._actuator.carry_out(self.decided.plans, self.decided.workloads)
        else:
            self._held_back = True

    def _count(self, events: Iterable[HistoryEvent]) -> None:
        for event in events:
            if event.kind == EventKind.INCIDENT_OPENED:
                self.counts.incidents += 1
            elif event.kind == EventKind.PLAN_ENDED:
                self.counts.plans[event.fields["remedy"], event.fields["outcome"]] += 1

    # -- what monitors are told ---------------------------------------------------------------------------------------

    def _desired(self, host: str) -> str:
        """What is wanted of a host, as text."""
        placed = self.decided.place(host)
        place = None
        if placed is not None:
            workload, node_rank = placed
            generation, address = self._masters.get(workload.name, (0, ""))
            place = workload.place_at(node_rank, address if generation == workload.generation else "")
        asks = [ask for ask in self._asks.get(host, ()) if host not in self._answers.get((ask.plan, ask.at), {})]
        check = self._checks.get(host)
        if check is not None:
            asks.append(Ask(plan=NO_PLAN, at=check.at, kind=StepKind.VERIFY, timeout_s=_VERIFY_TIMEOUT_S))
        return pack(
            Desired(
                term=self.term,
                place=place,
                asks=tuple(asks),
                completed=self._all_is_done() and self._is_of_what_has_ended(host),
            )
        )

    def _is_of_what_has_ended(self, host: str) -> bool:
        """Whether a host belongs to the job of a workload, all of which have ended. Not before the cluster has said to
        which it belongs: it may be a new one."""
        if not self._cluster.vouches:
            return True
        jobs = {each.job for each in self.decided.workloads.values()}
        return host in self.jobs.facts and (self.jobs.of(host) in jobs or "" in jobs)

    def _all_is_done(self) -> bool:
        """Whether all workloads have ended, as stored, and none was started again that is not stored yet."""
        return self.decided.all_is_done and all(each.state.has_ended for each in self.controller.workloads.values())

    def _offer(self, hosts: Iterable[str], *, again: bool = False) -> None:
        """Sends hosts what is wanted of them, if that has changed.

        Args:
            again: sends it also if it has not changed.
        """
        if not self.leads():
            self._held_back = True
            return
        for host in hosts:
            heard = self._heard.get(host)
            if heard is None or heard.link is None:
                continue
            if self._is_unknown(host, self._clock()):
                self._offers_held = True
                continue
            if self.settings.dry_run and self.decided.place(host) is None and not self._is_known_idle(heard):
                continue  # it may have ranks that this supervisor does not know, and a dry run leaves them alone
            text = self._desired(host)
            if again or text != heard.offered:
                hit("supervisor.send")
                heard.offered = text
                heard.link.offer(text)

    @staticmethod
    def _is_known_idle(heard: _Heard) -> bool:
        return heard.has_reported and heard.place == ("", 0)

    # -- monitors -----------------------------------------------------------------------------------------------------

    def connect(self, link: Link, *, address: str, block: str, term: int = 0) -> None:
        """A monitor has sent its Hello.

        Args:
            term: the highest one that it has obeyed; 0: none.

        Raises:
            Forged: another monitor is connected for this host, or too many hosts are known.
        """
        now_s = self._clock()
        most = self.settings.most_connections
        if self.sensor.host(link.host) is None and self.sensor.count >= most:
            raise Forged(f"{most} hosts are known already; raise `most_connections` if there are to be more")
        heard = self._heard.setdefault(link.host, _Heard())
        if heard.link is not None:
            lives = now_s - heard.at_s < 2 * self.settings.sensor.period_s
            if lives and heard.link.incarnation != link.incarnation:
                raise Forged(
                    f"a monitor of {link.host} is connected, and was heard of {now_s - heard.at_s:.1f} s ago; a host"
                    " has one monitor: end the other one, or give this host a name of its own"
                )
            heard.link.close("replaced by a newer connection of its host")
        heard.link, heard.offered, heard.at_s, heard.has_reported = link, "", now_s, False
        self._adoption.connected(link.host, term)
        facts = self.jobs.facts.get(link.host)
        block = facts.block if facts is not None and facts.block else block
        self._hear(link, now_s, address=plain_line(address), block=plain_line(block))
        if facts is not None:
            self._heed(facts)
        self._offer([link.host])

    def disconnect(self, link: Link) -> None:
        heard = self._heard.get(link.host)
        if heard is not None and heard.link is link:
            heard.link = None  # the host becomes silent after the timeout, not by this

    def _hear(self, link: Link, now_s: float, *, address: str = "", block: str = "") -> None:
        self.sensor.heard(link.host, link.incarnation, now_s, address=address, block=block)
        self._heard[link.host].at_s = now_s
        if self.sensor.state_of(link.host) is HostState.JOINING and link.host not in self._checks:
            self._check(link.host, now_s)
            self._due.set()

    def is_current(self, link: Link) -> bool:
        heard = self._heard.get(link.host)
        return heard is not None and heard.link is link

    def report(self, link: Link, report: Report) -> None:
        """Handles a heartbeat."""
        now_s = self._clock()
        host = link.host
        self._hear(link, now_s)
        heard = self._heard[host]
        placed = self.decided.place(host)
        lacks = self._lacks_devices(host, heard, report.devices)
        facts = self.jobs.facts.get(host)
        of_node = "" if facts is None else self._node_problems.get(facts.node, "")
        self._take_problem(host, heard, report.problem or of_node or ("" if placed else lacks), now_s)
        reported = report.workload, report.generation
        news = reported != heard.place
        heard.place = reported
        if now_s < self._adoption.until_s:
            self._adopt(host, report, now_s)
        if not heard.has_reported:
            heard.has_reported = True
            if self.settings.dry_run:
                self._offer([host])
        if placed is None or reported != (placed[0].name, placed[0].generation):
            if report.workload and not self._is_unknown(host, now_s):
                self.controller.refused["generation"] += 1
                self.controller.heard_of_generation(host, report.workload, report.generation)
            self._miss(heard, placed, host, now_s)
            if placed is not None or report.workload:
                self._offer([host], again=True)
        else:
            heard.elsewhere_since_s = None
            if facts is not None and facts.job != placed[0].job:
                self.controller.note_job(placed[0].name, facts.job)
            news |= self._take_progress(host, heard, report, placed, now_s)
        if news:
            self._due.set()

    def _adopt(self, host: str, report: Report, now_s: float) -> None:
        held = self._is_unknown(host, now_s)
        found = self._adoption.reported(host, report)
        if found is not None and self.controller.adopt(found, now_s, time.time()):
            self._adoption.adopted(found)
            self._say_other_size(found.workload)
            self._note_event(
                EventKind.GENERATION_ADOPTED,
                f"generation {found.generation} of {found.workload} is taken over: {', '.join(found.places)}",
                workload=found.workload,
                generation=found.generation,
            )
        if held and not self._is_unknown(host, now_s):
            self._offer([host])

    def _is_unknown(self, host: str, now_s: float) -> bool:
        """Whether the host may have ranks that are not stored, and must not be told anything: it would end them."""
        if self._adoption.holds_host(host, now_s):
            return True
        name, generation = self._heard[host].place
        present, stored = self.controller.workloads.get(name), self.decided.workloads.get(name)
        adopted = present is not None and present.generation == generation and host in present.places
        return adopted and (stored is None or stored.generation < generation)

    def _take_progress(
        self, host: str, heard: _Heard, report: Report, placed: tuple[Workload, int], now_s: float
    ) -> bool:
        """Takes the progress of a host at its place. Returns whether a look is due."""
        workload, node_rank = placed
        furthest = max(report.ranks, key=_progress, default=None)
        step, age_s = (_progress(furthest), furthest.quiet_s) if furthest is not None else (-1, 0.0)
        ended = report.ended and not report.preempted
        news = ended != heard.ended or (step >= 0) != (heard.step >= 0) or report.preempted
        heard.step, heard.ended = step, ended
        counts = any(rank.step >= 0 for rank in report.ranks)
        self.controller.reported(
            host, workload.name, workload.generation, now_s, step=step, age_s=age_s, counts_steps=counts, ended=ended
        )
        if node_rank == 0 and _is_address(report.master):
            if self._masters.get(workload.name) != (workload.generation, report.master):
                self._masters[workload.name] = workload.generation, report.master
                self._offer(workload.places)
        if report.preempted:
            self._observe(
                Observation(
                    kind=ObservationKind.WORKER_LOST,
                    host=host,
                    workload=workload.name,
                    generation=workload.generation,
                    detail="its ranks were told to go, have saved and left",
                )
            )
        elif report.ended:
            self._hangs.left(workload.name, workload.generation, host)
        elif report.ranks:
            self._stragglers.reported(workload.name, workload.generation, host, report.ranks, now_s)
            hang = self._hangs.reported(workload.name, workload.generation, host, report.ranks, now_s)
            if hang is not None:
                self._observe(hang)
        return news

    def _miss(self, heard: _Heard, placed: tuple[Workload, int] | None, host: str, now_s: float) -> None:
        """A host no longer has the place that it had (it was restarted). If no loss of ranks is reported within the
        heartbeat timeout, they are taken as lost."""
        if placed is None or placed[0].state is not WorkloadState.RUNNING:
            heard.elsewhere_since_s = None
            return
        if heard.elsewhere_since_s is None:
            heard.elsewhere_since_s = now_s
        elif now_s - heard.elsewhere_since_s >= self.settings.sensor.timeout_s:
            heard.elsewhere_since_s = None
            workload = placed[0]
            self._observe(
                Observation(
                    kind=ObservationKind.WORKER_LOST,
                    host=host,
                    workload=workload.name,
                    generation=workload.generation,
                    detail=f"the host has no ranks of generation {workload.generation} any more",
                )
            )

    def _lacks_devices(self, host: str, heard: _Heard, devices: int) -> str:
        """Why a host cannot have ranks that has fewer devices than most hosts of its job: one may be lost without a
        trace on a host that has just been started. A host that has ranks already is judged by them."""
        job = self.jobs.of(host)
        self._count_devices(heard, (job, devices))
        usual = max((number, count) for (of, count), number in self._devices.items() if of == job)[1]
        return f"it has {devices} devices, and most hosts have {usual}" if devices < usual else ""

    def _count_devices(self, heard: _Heard, devices: tuple[str, int] | None) -> None:
        if devices == heard.devices:
            return
        if heard.devices is not None:
            self._devices[heard.devices] -= 1
        if devices is not None:
            self._devices[devices] += 1
        heard.devices = devices
        self._devices = +self._devices  # without those that no host has any more

    def _take_problem(self, host: str, heard: _Heard, problem: str, now_s: float) -> None:
        problem = plain_line(problem)
        if problem == heard.problem:
            return
        heard.problem = problem
        if not problem:
            return
        if problem == MONITOR_ENDS:
            self.sensor.left(host, now_s)
        self._observe(Observation(kind=ObservationKind.HOST_UNHEALTHY, host=host, detail=heard.problem))

    def observed(self, link: Link, message: Observed) -> None:
        """Handles observations of a monitor.

        Raises:
            Forged: they are about another host, or of a kind that a monitor cannot see.
        """
        self._hear(link, self._clock())
        check_host(link.host, message)
        for one in message.observations:
            if one.kind is ObservationKind.DRAIN:
                self.sensor.cordon(link.host, plain_line(one.detail) or "its monitor wants it empty", self._clock())
            self._observe(of_host(one, link.host))

    def node_says(self, node: str, message: Message) -> None:
        """Handles what the watchdogs of a machine report: it concerns all hosts that run there.

        Raises:
            Forged: it is nothing that watchdogs see.
        """
        if isinstance(message, Report):
            self._node_problems[node] = message.problem  # taken with the next report of each host
            return
        seen = check_node(node, message)
        hosts = [each.host for each in self.jobs.facts.values() if each.node == node and each.host in self._heard]
        for one in seen:
            for host in hosts:
                if one.kind is ObservationKind.DRAIN:
                    self.sensor.cordon(host, plain_line(one.detail) or f"node {node} is to be empty", self._clock())
                self._observe(of_host(one, host))

    def _observe(self, one: Observation) -> None:
        self.controller.observe(one, self._clock(), time.time())
        self._due.set()

    def cluster_says(self, facts: HostFacts) -> None:
        """Handles what the cluster says about a host: that it is to be emptied, or is no more."""
        self.jobs.take(facts)
        if facts.is_gone:
            self.decided.out.pop(facts.host, None)
            self._gone.add(facts.host)
        elif facts.job and facts.ended is not None:
            self._heed_ends(facts.job, facts.ended)
        if self.sensor.host(facts.host) is not None:
            self._heed(facts)

    def _heed_ends(self, job: str, text: str) -> None:
        """Takes over, when a job is first heard of, which of its workloads were stopped: the state may not know it."""
        is_first, self._kept[job] = job not in self._kept, text
        if not is_first:
            return  # the leader's own words
        try:
            ends = ends_of(text)
        except ValueError as error:
            logger.error(
                "what is kept with job %s about stopped workloads cannot be read (%s), and is replaced", job, error
            )
            return
        for end in ends:
            now_s, reason = self._clock(), plain_line(end.reason)
            if self.controller.stop(
                end.workload, reason, now_s, time.time(), by_hand=end.by_hand, generation=max(1, end.generation)
            ):
                logger.warning("workload %s stays stopped, as is kept with job %s", end.workload, job)
                self.controller.note_job(end.workload, job)
                self._due.set()

    def _heed(self, facts: HostFacts) -> None:
        host, now_s = facts.host, self._clock()
        known = self.sensor.host(host)
        is_cordoned = known is not None and known.state is HostState.CORDONED
        if facts.is_gone:
            detail = f"its pod was deleted (node {facts.node})"
            self._observe(Observation(kind=ObservationKind.HOST_UNHEALTHY, host=host, detail=detail))
            return
        if facts.unwanted and not is_cordoned:
            self.sensor.cordon(host, _BY_CLUSTER + facts.unwanted, now_s)
            self._observe(Observation(kind=ObservationKind.DRAIN, host=host, detail=facts.unwanted))
        elif not facts.unwanted and is_cordoned and known is not None and known.reason.startswith(_BY_CLUSTER):
            self.sensor.uncordon(host, now_s)
            self._check(host, now_s)
        self._due.set()

    def _begin_submitted(self) -> None:
        """Begins ended workloads again for hosts of another job than theirs, which the user has submitted since; once
        the hosts of the one before have been told of their end, and have left. A workload whose job was deleted while
        it waited for hosts has ended by that."""
        for spec in self.settings.workloads:
            known = self.controller.workloads.get(spec.name)
            if known is None or not known.job or not (known.state.has_ended or self._was_deleted(known)):
                continue
            there = [facts for facts in self.jobs.facts.values() if self._is_connected(facts.host) and facts.job]
            is_over = all(facts.job != known.job for facts in there)
            if not is_over and not (known.by_hand and self._was_stopped(known.job, spec.name)):
                continue
            submitted = Counter(each.job for each in there if each.job != known.job and not each.unwanted)
            job = self.jobs.first(
                {one: count for one, count in submitted.items() if not self._was_stopped(one, spec.name)}, spec.hosts
            )
            if job:
                if not known.state.has_ended:
                    reason = f"all hosts of job {self.jobs.name(known.job)} were deleted"
                    self.controller.stop(spec.name, reason, self._clock(), time.time())
                new = self.jobs.name(job)
                logger.warning("%s was %s, and is begun again: job %s is a new one", spec.name, known.state, new)
                self.controller.add(spec, self._clock())
                self.controller.note_job(spec.name, job)
                self._due.set()

    def _was_deleted(self, workload: Workload) -> bool:
        """Whether a job waits because of an incident, and the cluster has no host of it any more and makes none."""
        waits = workload.state is WorkloadState.WAITING and workload.incident in self.controller.incidents
        return waits and not self.jobs.have_hosts(workload.job)

    def _is_connected(self, host: str) -> bool:
        heard = self._heard.get(host)
        return heard is not None and heard.link is not None

    def _was_stopped(self, job: str, workload: str) -> bool:
        """Whether the cluster keeps with a job that a workload was stopped there."""
        try:
            return any(end.workload == workload for end in ends_of(self._kept.get(job, "")))
        except ValueError:  # not our words; it was logged, and is replaced
            return False

    # -- steps --------------------------------------------------------------------------------------------------------

    def _check(self, host: str, now_s: float) -> None:
        """Asks a host for a check, if none is under way, after which it can be ready."""
        known = self._checks.get(host)
        heard = self._heard.get(host)
        if heard is None or heard.link is None or heard.problem:
            self._checks.pop(host, None)
            return
        if known is not None and now_s - known.asked_s <= _VERIFY_TIMEOUT_S + self.settings.sensor.period_s:
            return
        # The number is random, because monitors remember their answers, also those to an earlier supervisor.
        self._checks[host] = _Check(at=random.getrandbits(48), asked_s=now_s)
        self._offer([host])

    def step_ended(self, link: Link, message: StepEnded) -> None:
        """Handles a monitor's answer to an ask."""
        now_s = self._clock()
        self._hear(link, now_s)
        problem = plain_line(message.problem)
        check = self._checks.get(link.host)
        if message.plan == NO_PLAN:
            if check is not None and check.at == message.at:
                del self._checks[link.host]
                self.sensor.checked(link.host, problem, now_s)
                self._due.set()
                self._offer([link.host])
            return
        plan = self.decided.plans.get(message.plan)
        if (
            plan is None
            or (plan.at, plan.generation) != (message.at, message.generation)
            or link.host not in self.decided.asked(plan)
        ):
            return  # of a plan that is over or of another state file, or a second answer
        hit("supervisor.step.ended")
        answers = self._answers.setdefault((plan.number, plan.at), {})
        answers.setdefault(link.host, problem)
        asked = self.decided.asked(plan)
        if answers.keys() >= set(asked):
            bad = [host for host in asked if answers[host]]
            said = "; ".join(f"{host}: {answers[host]}" for host in bad[:3])
            self._end_step(plan.number, plan.at, said, bad)
        self._offer([link.host])

    def _end_step(self, number: int, at: int, problem: str, hosts: Sequence[str] = ()) -> None:
        self.controller.step_ended(number, at, self._clock(), time.time(), problem=problem, hosts=hosts)
        self._due.set()

    def _why(self, host: str, plan: Plan) -> str:
        """What was seen of a host that the plan takes out."""
        incident = self.controller.incidents.get(plan.incident)
        seen = [one for one in incident.observations if one.host == host] if incident is not None else []
        return f"{seen[-1].kind}: {seen[-1].detail}" if seen and seen[-1].detail else plan.remedy.reason

    def _carried_out(self, number: int, at: int, problem: str) -> None:
        self._end_step(number, at, problem)

    def _give_up_late_steps(self, now_s: float, wall: float) -> None:
        """Fails steps that hosts were asked for and that are late; hosts without an answer are the ones it failed
        because of."""
        for plan in self.controller.active_plans():
            step = plan.step
            if step is None or step.kind not in ASKED or now_s - plan.step_since_s <= step.timeout_s:
                continue
            answers = self._answers.get((plan.number, plan.at), {})
            asked = step.hosts or self.controller.workloads[plan.workload].places
            late = [host for host in asked if answers.get(host, "late")]
            problem = f"{step.kind} was not done within {step.timeout_s:.0f} s by {', '.join(late[:3])}"
            self.controller.step_ended(plan.number, plan.at, now_s, wall, problem=problem, hosts=late)

    def _inject(self, now_s: float, wall: float) -> None:
        running = [each for each in self.decided.workloads.values() if each.state is WorkloadState.RUNNING]
        if not running:
            return
        workload = random.choice(running)
        node_rank = random.randrange(len(workload.places))
        rank = node_rank * workload.spec.ranks_per_host + random.randrange(workload.spec.ranks_per_host)
        one = Observation(
            kind=ObservationKind.WORKER_HUNG,  # a hung rank is killed; a lost one would not run any more
            host=workload.places[node_rank],
            workload=workload.name,
            generation=workload.generation,
            rank=rank,
            detail="injected, because of enable_fault_injection",
        )
        self.controller.observe(one, now_s, wall)

    # -- operators ----------------------------------------------------------------------------------------------------

    def drain(self, host: str, reason: str) -> bool:
        """Cordons a host for an operator. Returns False when the host is unknown."""
        reason = plain_line(reason)
        done = self.sensor.cordon(host, reason or "drained by an operator", self._clock())
        if done:
            self._note_event(EventKind.OPERATOR, f"drain {host}: {reason or 'no reason given'}", host=host)
        return done

    def uncordon(self, host: str) -> bool:
        """Ends a host's cordon and has it checked. Returns False when it is unknown or not cordoned."""
        done = self.sensor.uncordon(host, self._clock())
        if done:
            self._note_event(EventKind.OPERATOR, f"uncordon {host}", host=host)
            self._check(host, self._clock())
        return done

    def stop_workload(self, name: str, reason: str) -> bool:
        """Stops a workload for good, for an operator. Returns False when no workload of this name runs."""
        reason = plain_line(reason)
        why = reason or "stopped by an operator"
        done = self.controller.stop(name, why, self._clock(), time.time(), by_hand=True)
        if done:
            self._note_event(EventKind.OPERATOR, f"stop {name}: {reason or 'no reason given'}", workload=name)
        return done

    def start_workload(self, name: str) -> bool:
        """Starts an ended workload again. Returns False when the file has none of this name, or it runs."""
        known = self.controller.workloads.get(name)
        specs = [spec for spec in self.settings.workloads if spec.name == name]
        if not specs or (known is not None and not known.state.has_ended):
            return False
        self.controller.add(specs[0], self._clock())
        self._note_event(EventKind.OPERATOR, f"start {name}", workload=name)
        return True

    def _note_event(self, kind: str, text: str, **fields: Any) -> None:
        self.journal.say(kind, text, **fields)
        self._due.set()

    # -- reading the state --------------------------------------------------------------------------------------------

    def other_size_of(self, workload: Workload) -> str:
        """What to do about a workload that runs with other sizes than the settings say, in words; "": it does not."""
        wanted = next((spec for spec in self.settings.workloads if spec.name == workload.name), workload.spec)
        runs, spec = workload.spec.hosts_per_replica, wanted.hosts_per_replica
        if workload.state.has_ended or runs == spec:
            return ""
        return (
            f"runs as {workload.spec.replicas} replicas of {runs} hosts, and the settings say {wanted.replicas} of"
            f" {spec}: its ranks are left alone, and it keeps its size until it is begun anew; set the sizes back, or"
            " stop this job and begin one of the new size"
        )

    def waits_for(self, workload: Workload) -> str:
        """What a workload waits for, and who waits for it, in words; "": nobody waits."""
        now_s = self._clock()
        ready = self.controller.ready_for(workload, now_s)
        others = Counter(self.jobs.of(host) for host in self.controller.free() - set(ready)) if workload.job else {}
        of_others = {self.jobs.name(job): count for job, count in others.items() if job not in ("", workload.job)}
        if workload.state is WorkloadState.WAITING:
            mine = [host for host in self.sensor.hosts() if self._may_be_of(workload, host.name)]
            return waits_for(
                workload.spec,
                ready=ready,
                hosts=[host for host in mine if self.controller.place_of(host.name) is None],
                unheard=[
                    name
                    for name in self.jobs.facts
                    if self.sensor.host(name) is None and self._may_be_of(workload, name)
                ],
                has_pods=self._cluster.vouches,
                of_others=of_others,
                unnamed=[host for host in self.controller.free() if self.jobs.is_unnamed(host)],
            )
        if not of_others:
            return ""
        left = [host for host in self.jobs.facts if self.jobs.of(host) == workload.job and self._is_connected(host)]
        until = f" and for {names(left)} to leave" if workload.state.has_ended and left else ""
        return f"hosts of {', '.join(of_others)} wait for the end of {self.jobs.name(workload.job)}{until}"

    def _may_be_of(self, workload: Workload, host: str) -> bool:
        return not workload.job or self.jobs.of(host) in ("", workload.job)

    def step_of(self, workload: Workload) -> int:
        """The largest step that the workload's hosts have reported; -1: none."""
        found = (self._heard.get(host) for host in workload.places)
        return max((heard.step for heard in found if heard is not None), default=-1)

    def connected(self) -> int:
        return sum(heard.link is not None for heard in self._heard.values())

    def heard_ago_s(self, host: str) -> float | None:
        heard = self._heard.get(host)
        return None if heard is None or heard.at_s < 0 else self._clock() - heard.at_s

    def machine_of(self, host: str) -> str:
        """The machine that the cluster runs the host on; "" when it does not say."""
        facts = self.jobs.facts.get(host)
        return "" if facts is None else facts.node

    def now_s(self) -> float:
        return self._clock()


def _progress(rank: Any) -> int:
    """A number that grows with each step of the rank; -1: it has made none since its generation began."""
    if rank.beats <= 0:
        return -1
    return min(_MOST_STEP, int(rank.step if rank.step >= 0 else rank.beats))


def _is_address(text: str) -> bool:
    try:
        store_address(text)
    except ValueError:
        return False
    return True
