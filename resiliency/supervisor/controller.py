"""Decides what is done about failures: observations become incidents, incidents become plans, and plans give hosts
their places. Pure: no input, no output, no clock.

Everything is decided from what is true now (which hosts are ready, which generation a host reports), never from what a
message said once, so that a supervisor that was killed goes on by looking. A workload has at most one plan at a time.
Each set of places has a generation of its own, and reports of another generation are ignored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from resiliency.runtime.messages.launcher import REPORT_S, ended_early_text
from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.runtime.messages.places import Place
from resiliency.supervisor.adoption import RunningGeneration
from resiliency.supervisor.jobs import Jobs
from resiliency.supervisor.model import (
    LAST_RESORTS,
    HostState,
    Incident,
    Outcome,
    Plan,
    Remedy,
    RemedyKind,
    Workload,
    WorkloadSpec,
    WorkloadState,
)
from resiliency.supervisor.plans import make_plan, save_step
from resiliency.supervisor.policy import DefaultPolicy, Policy, Situation, fails_alike, last_resort, problem_of
from resiliency.supervisor.progress import Progress
from resiliency.supervisor.records import Changes, Records
from resiliency.supervisor.running_goodput import GoodputWatch, RunningGoodput
from resiliency.supervisor.sensor import Sensor
from resiliency.supervisor.wording import cause, describe, hosts_and_reason, which
from resiliency.telemetry.plain_text import plain_line

__all__ = ["Controller", "ControllerSettings"]

logger = logging.getLogger(__name__)

#: A host that reports a larger generation than this is not believed.
_MOST_GENERATION = 1 << 30
#: The running goodput is stored with every other change of the workload, and at least this often, in seconds.
_GOODPUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """How the controller decides.

    Attributes:
        most_plans: a workload is stopped after this many failed plans for one incident, or after five times as many
            plans of any outcome. A plan may be overtaken (a spare fails its check, another host is lost) without
            failing.
        hook_timeout_s: seconds that the user's hook may take in each plan; 0: there is no hook.
        hook_signal: number of the signal that ranks get in each plan; 0: none.
        dry_run: remedies are logged and not carried out.
    """

    most_plans: int = 12
    hook_timeout_s: float = 0.0
    hook_signal: int = 0
    dry_run: bool = False


class Controller:
    """Decides for all workloads. Thread: one. Blocks: never. Times ending in ``_s`` are monotonic seconds; ``wall`` is
    UTC seconds.

    Args:
        sensor: the states of the hosts.
        period_s: seconds between two reports of a host.
        jobs: what the cluster says that hosts belong to.
        resorts: returns the last resorts that the cluster was found able to for a workload.
    """

    def __init__(
        self,
        sensor: Sensor,
        *,
        policy: Policy | None = None,
        settings: ControllerSettings = ControllerSettings(),  # noqa: B008 - frozen
        period_s: float = 5.0,
        machine_of: Callable[[str], str] = lambda host: "",
        jobs: Jobs | None = None,
        resorts: Callable[[Workload], Collection[RemedyKind]] = lambda workload: (),
    ) -> None:
        self._resorts = resorts
        self._sensor = sensor
        self._machine_of = machine_of
        self._jobs = jobs or Jobs()
        #: Hosts of another job that were ready for a workload, by both jobs; each pair is logged once.
        self._foreign: set[tuple[str, str]] = set()
        self._policy = policy or DefaultPolicy()
        self._settings = settings
        self._period_s = period_s
        self._records = records = Records()
        self._workloads, self._incidents, self._plans = records.workloads, records.incidents, records.plans
        self._seen: dict[str, Progress] = {}
        self._goodput = GoodputWatch()
        self._restored_s = -1e9
        #: Highest generation that hosts report, by workload, where it is higher than the stored one: the state file
        #: was lost or an old copy was put back. Not stored, because hosts report it again.
        self._had: dict[str, int] = {}
        #: Hosts that are ready and have no place, and the versions that this list was computed from.
        self._free: list[str] = []
        self._free_of: tuple[int, int] = (-1, -1)
        #: When the latest plan of each workload failed.
        self._failed_s: dict[str, float] = {}
        #: The chances of each workload that the policy chose to leave alone. They are ignored until they change.
        self._declined: dict[str, object] = {}
        #: How many reports were ignored, by reason.
        self.refused: Counter[str] = Counter()

    # -- reading the state --------------------------------------------------------------------------------------------

    @property
    def workloads(self) -> Mapping[str, Workload]:
        return self._workloads

    @property
    def incidents(self) -> Mapping[int, Incident]:
        """By number; without starts of jobs in which nothing has gone wrong."""
        return {number: one for number, one in self._incidents.items() if not one.is_start}

    @property
    def plans(self) -> Mapping[int, Plan]:
        return self._plans

    def place_of(self, host: str) -> Place | None:
        """The present place of a host; None when it has no ranks."""
        for workload in self._workloads.values():
            place = workload.place_of(host)
            if place is not None:
                return place
        return None

    def ready_for(self, workload: Workload, now_s: float) -> list[str]:
        """Hosts that are ready, have no place, and may work for the workload; by name."""
        return self._spares(workload, now_s, dwell_s=0.0)

    def free(self) -> set[str]:
        """Hosts that are ready and have no place, of all jobs."""
        return set(self._sensor.ready - self._taken())

    def active_plans(self) -> list[Plan]:
        found = (workload.plan for workload in self._workloads.values())
        return [self._plans[number] for number in found if number is not None]

    def goodput_of(self, workload: str) -> RunningGoodput:
        """How much of the workload's time so far made steps that were kept."""
        return self._goodput.of(workload)

    def take_changes(self) -> Changes:
        """Returns, and resets, what has changed since the last call."""
        return self._records.take_changes()

    def restore(
        self,
        workloads: Iterable[Workload],
        incidents: Iterable[Incident],
        plans: Iterable[Plan],
        now_s: float,
        wall: float = 0.0,
    ) -> None:
        """Takes over what an earlier supervisor has stored. Deadlines start anew, because the monotonic clock may
        have."""
        self._records.restore(
            (replace(each, since_s=now_s) for each in workloads),
            (replace(each, opened_at_s=now_s) for each in incidents),
            (replace(each, step_since_s=now_s) for each in plans),
        )
        for each in self._workloads.values():
            self._goodput.restore(each.name, each.goodput, each.goodput.at if each.state.has_ended else wall)
        self._restored_s = now_s

    def add(self, spec: WorkloadSpec, now_s: float) -> None:
        """Adds a workload that is to run, or changes the specification of a known one. While it runs its hosts per
        replica cannot change: then it keeps its size until it is begun anew."""
        known = self._workloads.get(spec.name)
        if known is None or known.state.has_ended:
            generation = 0 if known is None else known.generation
            self._set(Workload(spec=spec, generation=generation, since_s=now_s))
            return
        if known.places and spec.hosts_per_replica != known.spec.hosts_per_replica:
            spec = spec.of_size(known.spec.replicas, known.spec.hosts_per_replica)
        if known.spec != spec:
            self._set(replace(known, spec=spec))

    def adopt(self, found: RunningGeneration, now_s: float, wall: float) -> bool:
        """Takes ranks that run for those of the workload, which keeps their size. Returns False when they are older
        than what is known."""
        workload = self._workloads.get(found.workload)
        if workload is None or not workload.generation < found.generation <= _MOST_GENERATION:
            return False
        if not found.places:
            return False
        if workload.plan is not None:
            self._end_plan(self._plans[workload.plan], Outcome.OVERTAKEN, "ranks of a later generation run", now_s)
        self._close(self._workloads[found.workload], "ranks of a later generation run", now_s, wall)
        logger.warning(
            "%s: generation %d runs on %s, and is taken over; the state here had generation %d",
            found.workload,
            found.generation,
            ", ".join(found.places),
            workload.generation,
        )
        spec, size = workload.spec, found.hosts_per_replica(workload.spec.hosts_per_replica)
        replicas = len(found.places) // size
        self._set(
            replace(
                self._workloads[found.workload],
                spec=spec if size == spec.hosts_per_replica else spec.of_size(replicas, size),
                state=WorkloadState.RUNNING,
                generation=found.generation,
                places=found.places,
                fresh=False,
                replace=(),
                replace_on=(),
                replicas_before=replicas,
                since_s=now_s,
                reason="",
                by_hand=False,
            )
        )
        return True

    def note_job(self, name: str, job: str) -> None:
        """The cluster says what the hosts of a workload belong to."""
        workload = self._workloads[name]
        if workload.job != job:
            self._set(replace(workload, job=job))

    def waits_anew(self, name: str, now_s: float) -> None:
        """The time to wait for enough hosts begins now. Not stored, because it begins anew with each supervisor."""
        self._workloads[name] = replace(self._workloads[name], since_s=now_s)

    def stop(
        self, name: str, reason: str, now_s: float, wall: float, *, by_hand: bool = False, generation: int = 0
    ) -> bool:
        """Ends a workload for good. Returns False when no workload of this name runs, or it had a later generation.

        Args:
            by_hand: an operator wants it.
            generation: the one that was stopped by an earlier supervisor; 0: this one stops the present one.
        """
        workload = self._workloads.get(name)
        if workload is None or workload.state.has_ended or workload.generation > (generation or _MOST_GENERATION):
            return False
        self._set(replace(workload, generation=max(workload.generation, generation), by_hand=by_hand))
        self._end(workload, WorkloadState.STOPPED, reason, now_s, wall)
        return True

    def pause(self, seconds: float) -> None:
        """Moves the deadlines of all present steps by ``seconds``, in which nothing could be done or seen. Not
        stored."""
        for plan in self.active_plans():
            self._plans[plan.number] = replace(plan, step_since_s=plan.step_since_s + seconds)

    # -- reports ------------------------------------------------------------------------------------------------------

    def heard_of_generation(self, host: str, name: str, generation: int) -> None:
        """A host has had ranks of a higher generation than is known here: the state file was lost, or an older copy of
        it was put back. Later generations are numbered above it, because monitors do not obey a lower one."""
        workload = self._workloads.get(name)
        if workload is None or generation <= max(workload.generation, self._had.get(name, 0)):
            return
        if generation > _MOST_GENERATION or (workload.places and host not in workload.places):
            self.refused["generation"] += 1
            return
        logger.warning(
            "%s: %s has had generation %d, and %d is the last one known here: the state file is a new one, or an old"
            " copy. The next generation will be above it",
            name,
            host,
            generation,
            workload.generation,
        )
        self._had[name] = generation

    def reported(
        self,
        host: str,
        workload: str,
        generation: int,
        now_s: float,
        *,
        step: int = -1,
        age_s: float = 0.0,
        counts_steps: bool = True,
        ended: bool = False,
    ) -> None:
        """A host knows its place, its ranks have reached a step (-1: none yet), or they have all finished (``ended``).

        Args:
            age_s: age of the step when the host's launcher looked, which may have been up to ``REPORT_S`` ago.
            counts_steps: ``step`` is the optimizer's, which a generation continues from the last saved step of the one
                before.
        """
        known = self._workloads.get(workload)
        if known is None or known.generation != generation:
            self.refused["generation"] += 1
            return
        seen = self._seen_of(known)
        if host not in seen.placed and host not in known.places:
            self.refused["generation"] += 1
            return
        if seen.reported(host, step, age_s, ended, now_s):
            self._goodput.progressed(workload, generation, step if counts_steps else -1, now_s)
            if not known.trained:
                self._set(replace(known, trained=True))

    def observe(self, one: Observation, now_s: float, wall: float) -> None:
        """Takes an observation into an incident. Ignores (and counts) those of generations that are over, and of
        unknown hosts."""
        if one.host and self._sensor.host(one.host) is None:
            self.refused["host"] += 1
            return
        machine = self._machine_of(one.host)
        if machine and machine not in one.detail:  # by which people know it: a pod's name is soon another one's
            one = replace(one, detail=f"{one.detail} (node {machine})".lstrip())
        if one.takes_host_out and self._sensor.state_of(one.host) is not HostState.QUARANTINED:
            # Also when it has no place: no ranks may be moved to it. Silent and cordoned hosts keep their state.
            self._sensor.quarantine(one.host, describe(one), now_s)
        concerned = [each for each in self._workloads.values() if not each.state.has_ended]
        if one.workload:
            concerned = [each for each in concerned if each.name == one.workload and each.generation == one.generation]
            if one.host:
                concerned = [each for each in concerned if one.host in each.places]
            if not concerned:
                self.refused["generation"] += 1
                return
        else:
            concerned = [each for each in concerned if one.host in each.places or self._is_to_come(each, one.host)]
        for workload in concerned:
            seen = replace(one, workload=workload.name, generation=workload.generation)
            if one.kind in _ENDS_A_GENERATION and (early := self._ended_early(workload)):
                seen = replace(seen, detail="; ".join(filter(None, (one.detail, early))))
            self._note(workload, seen, now_s, wall)

    def _ended_early(self, workload: Workload) -> str:
        """Which ranks have ended with status 0 while others have not, in words; "": none."""
        ended, count = self._seen_of(workload).ended, workload.spec.ranks_per_host
        at = [node_rank for node_rank, host in enumerate(workload.places) if host in ended]
        return ended_early_text([node_rank * count + rank for node_rank in at for rank in range(count)])

    def step_ended(
        self, plan_number: int, at: int, now_s: float, wall: float, *, problem: str = "", hosts: Sequence[str] = ()
    ) -> None:
        """A step that a host or the actuator carries out has ended. Ignored when it was reported before or its plan is
        over.

        Args:
            problem: why the step failed; "": it was done.
            hosts: the hosts that it failed because of.
        """
        plan = self._plans.get(plan_number)
        if plan is None or plan.step is None or plan.at != at:
            return
        if plan.step.kind in (StepKind.PLACE, StepKind.PROGRESS):
            return  # these steps end when reports of hosts show it
        if not problem:
            self._advance(plan, now_s)
            return
        self._step_failed(plan, problem, tuple(hosts), now_s, wall)

    # -- time ---------------------------------------------------------------------------------------------------------

    def look(self, now_s: float, wall: float, *, held: Callable[[str], bool] = lambda name: False) -> None:
        """Does what is due now. To be called after every report, and several times a second.

        Args:
            held: whether nothing may be decided about a workload yet.
        """
        for one in self._sensor.look(now_s):
            self.observe(one, now_s, wall)
        self._give_up_lasting(now_s)
        for name in list(self._workloads):
            workload = self._workloads[name]
            if not workload.state.has_ended and not self._is_placed(workload):
                self._complete(workload, now_s, wall)  # while a plan is prepared; it is not needed then
                workload = self._workloads[name]
            if workload.state.has_ended or held(name):
                continue
            if workload.generation:
                self._goodput.look(name, now_s, wall)
                if wall - workload.goodput.at >= _GOODPUT_S:
                    self._set(workload)
                    workload = self._workloads[name]
            if self._sensor.frozen:
                if workload.state is WorkloadState.RUNNING:
                    self._set(replace(workload, state=WorkloadState.FROZEN, since_s=now_s))
                elif workload.plan is not None:  # its deadline stands still, which needs no storing
                    self._plans[workload.plan] = replace(self._plans[workload.plan], step_since_s=now_s)
                continue
            if workload.state is WorkloadState.FROZEN:
                workload = replace(workload, state=WorkloadState.RUNNING, since_s=now_s)
                self._set(workload)
            self._overtake_silent(workload, now_s)
            workload = self._workloads[name]
            if workload.plan is not None and self._plans[workload.plan].generation <= self._had.get(name, 0):
                reason = f"hosts have had generation {self._had[name]} already"
                self._end_plan(self._plans[workload.plan], Outcome.OVERTAKEN, reason, now_s)
                workload = self._workloads[name]
            if workload.plan is not None:
                self._follow(self._plans[workload.plan], now_s, wall)
            workload = self._workloads[name]
            if workload.plan is None and not workload.state.has_ended:
                self._decide(workload, now_s, wall)

    def _overtake_silent(self, workload: Workload, now_s: float) -> None:
        """Ends the plan if one of its hosts is silent: while many hosts were silent at once, no plan was ended for
        it."""
        if workload.plan is None:
            return
        plan = self._plans[workload.plan]
        silent = [host for host in plan.places if self._sensor.state_of(host) is HostState.SILENT]
        if silent:
            self._end_plan(plan, Outcome.OVERTAKEN, f"{', '.join(silent[:3])} not heard of", now_s)

    def _give_up_lasting(self, now_s: float) -> None:
        """Gives up spares that have been silent for long: they may be away for good, and say nothing about what happens
        now."""
        if self._sensor.frozen:
            return
        lasting = self._sensor.long_silent(now_s)
        taken = self._taken() if lasting else set()
        for host in lasting:
            if host not in taken:
                self._sensor.give_up(host)

    def _is_placed(self, workload: Workload) -> bool:
        """Whether the workload's plan has given out its places already: its generation is the workload's."""
        return workload.plan is not None and self._plans[workload.plan].generation == workload.generation

    # -- incidents ----------------------------------------------------------------------------------------------------

    def _note(self, workload: Workload, one: Observation, now_s: float, wall: float) -> None:
        workload = self._workloads[workload.name]  # an earlier observation may have opened an incident
        plan = None if workload.plan is None else self._plans[workload.plan]
        incident = self._open_incident(workload, now_s, wall)
        if self._is_news(incident, one):
            incident = replace(incident, observations=(*incident.observations, one))
            self._records.set_incident(incident)
            if incident.is_start:
                logger.info("%s: enough hosts are ready to start it", workload.name)
            else:
                logger.warning("%s: %s (incident %d)", workload.name, describe(one), incident.number)
            if one.host and not one.is_planned:
                workload = self._workloads[workload.name]
                faults = {**workload.host_faults, one.host: workload.host_faults.get(one.host, 0) + 1}
                self._set(replace(workload, host_faults=faults))
        if plan is not None and not (self._sensor.frozen and one.kind is ObservationKind.HOST_SILENT):
            self._disturb(plan, one, now_s, wall)

    def _is_news(self, incident: Incident, one: Observation) -> bool:
        if self._records.is_known(incident, one):
            return False
        if self._records.is_full(incident, one.host):
            self.refused["too many"] += 1
            return False
        self._records.note(incident, one)
        return True

    def _disturb(self, plan: Plan, one: Observation, now_s: float, wall: float) -> None:
        """Ends the plan that is being carried out if this observation makes it wrong."""
        placed = self._workloads[plan.workload].generation == plan.generation
        if one.is_planned:
            return  # it can wait for the end of the plan
        if one.takes_host_out and one.host in plan.places:
            self._end_plan(plan, Outcome.OVERTAKEN, describe(one), now_s)
        elif placed and one.kind in _ENDS_A_GENERATION:
            self._end_plan(plan, Outcome.FAILED, describe(one), now_s)
        elif not placed and self._situation_was_planned(plan):
            self._end_plan(plan, Outcome.OVERTAKEN, describe(one), now_s)

    def _situation_was_planned(self, plan: Plan) -> bool:
        return any(step.kind is StepKind.CHECKPOINT for step in plan.steps)

    def _open_incident(self, workload: Workload, now_s: float, wall: float) -> Incident:
        if workload.incident is not None:
            return self._incidents[workload.incident]
        incident = Incident(
            number=self._records.next_number(),
            workload=workload.name,
            opened_at_s=now_s,
            opened_at=wall,
            begins_job=workload.state is WorkloadState.WAITING,
        )
        self._records.set_incident(incident)
        self._set(replace(self._workloads[workload.name], incident=incident.number))
        return incident

    def _close(self, workload: Workload, outcome: str, now_s: float, wall: float) -> None:
        if workload.incident is None:
            return
        incident = self._incidents[workload.incident]
        which = "the start" if incident.is_start else f"incident {incident.number}"
        logger.info("%s: %s is over: %s", workload.name, which, outcome)
        self._records.set_incident(replace(incident, closed_at_s=now_s, closed_at=wall, outcome=outcome))
        self._set(replace(self._workloads[workload.name], incident=None))

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self, workload: Workload, now_s: float, wall: float) -> None:
        """Without a plan: decides whether one is needed, and begins it."""
        self._notice_chances(workload, now_s, wall)
        workload = self._workloads[workload.name]
        self._complete(workload, now_s, wall)
        workload = self._workloads[workload.name]
        if workload.incident is None or workload.state.has_ended:
            self._forgive(workload, now_s)
            return
        incident = self._incidents[workload.incident]
        if now_s - incident.opened_at_s < workload.spec.correlate_s:
            return
        seen = self._seen_of(workload)
        if now_s - self._restored_s < 2 * self._period_s and not seen.placed.issuperset(workload.places):
            return  # what hosts do has not been reported yet
        situation = self._situation(workload, incident, now_s)
        if workload.state is WorkloadState.WAITING:
            self._wait_or_start(situation, now_s, wall)
            return
        if not situation.observations:
            if not situation.trains:
                situation = replace(situation, observations=incident.observations[-1:])
            else:
                self._close(workload, "no fault is observed any more, and the job trains", now_s, wall)
                self._set(replace(self._workloads[workload.name], state=WorkloadState.RUNNING, since_s=now_s))
                return
        if self._trains_on(situation, now_s):
            return
        failed = sum(plan.outcome is not Outcome.OVERTAKEN for plan in situation.tried)
        most = self._settings.most_plans
        if failed >= most or len(incident.tried) >= _OVERTAKEN_COUNT * most:
            reason = f"{len(incident.tried)} plans did not end incident {incident.number}"
            self._carry_out(last_resort(situation, reason), situation, now_s, wall)
            return
        if not situation.out and now_s - self._failed_s.get(workload.name, -1e9) < pause_s(len(situation.failed)):
            return  # what kills the ranks may pass: a file system that is away, a preemption notice
        situation = self._noted_stuck(situation)
        self._carry_out(self._ask(situation), situation, now_s, wall)

    def _noted_stuck(self, situation: Situation) -> Situation:
        """Notes on the workload whether this generation has failed alike on all hosts, and got no further than those
        before."""
        workload, step = situation.workload, self._seen_of(situation.workload).step
        if step < 0 or workload.generation in workload.stuck[-1:] or not fails_alike(situation):
            return situation
        before = workload.stuck if step <= workload.stuck_step else ()
        workload = replace(
            workload, stuck=(*before[-_MOST_STUCK:], workload.generation), stuck_step=max(step, workload.stuck_step)
        )
        self._set(workload)
        return replace(situation, workload=workload)

    def _ask(self, situation: Situation) -> Remedy:
        name = situation.workload.name
        try:
            answer = self._policy.event_policy(situation)
            remedy = _checked(answer)
            problem = f"it answered {answer!r:.300}" if remedy is None else problem_of(remedy, situation)
        except Exception as error:
            logger.exception("%s: the policy failed", name)
            problem = f"it raised {type(error).__name__}: {error}"
        if not problem and remedy is not None:
            return remedy
        logger.error("%s: the policy's answer cannot be carried out: %s; the default policy decides", name, problem)
        remedy = DefaultPolicy().event_policy(situation)
        problem = problem_of(remedy, situation)
        if problem and situation.is_planned:
            return Remedy(kind=RemedyKind.NOTHING, reason=problem)
        if problem:  # the user may want another size than before, which the default policy does not know
            return Remedy(kind=RemedyKind.WAIT, out=situation.out, reason=f"nothing else can be done: {problem}")
        return remedy

    def _carry_out(self, remedy: Remedy, situation: Situation, now_s: float, wall: float) -> None:
        workload, incident = situation.workload, situation.incident
        if self._settings.dry_run:
            outcome = f"dry run: would {remedy.kind}{hosts_and_reason(remedy)}"
            if incident.outcome != outcome:  # the incident stays open, because nothing is mended; this is logged once
                logger.warning("%s: %s%s", workload.name, which(incident), outcome)
                self._records.set_incident(replace(incident, outcome=outcome))
                if incident.is_start:
                    self._set(replace(workload, reason=outcome))
            return
        if remedy.kind is RemedyKind.NOTHING:
            self._declined[workload.name] = self._chances(workload, now_s)
            if workload.state is WorkloadState.REMEDYING:  # by a plan that was overtaken; nobody else would end that
                workload = replace(workload, state=WorkloadState.RUNNING, since_s=now_s)
                self._set(workload)
            self._close(workload, remedy.reason or "nothing is done", now_s, wall)
            return
        if remedy.kind is RemedyKind.STOP:
            self._end(workload, WorkloadState.STOPPED, remedy.reason + cause(incident), now_s, wall)
            return
        if remedy.kind is RemedyKind.WAIT and workload.state is WorkloadState.WAITING and not workload.places:
            return
        if remedy.kind is RemedyKind.WAIT:
            logger.error("%s waits for hosts: %s", workload.name, remedy.reason)
            self._give_up_silent(situation.out)
            self._wait(workload, remedy.reason, now_s)
            return
        if remedy.kind in LAST_RESORTS:
            reason = remedy.reason + cause(incident)
            logger.error("%s: %s, which is a last resort: %s", workload.name, remedy.kind, reason)
            for host in (*workload.places, *situation.spares):  # no ranks may come to what is about to go
                if self._sensor.state_of(host) is HostState.READY:
                    self._sensor.quarantine(host, reason, now_s)
            self._close(workload, f"{remedy.kind}: {reason}", now_s, wall)
            workload = replace(self._workloads[workload.name], resorts=(*workload.resorts, remedy.kind))
            self._wait(workload, reason, now_s)
            return
        plan = make_plan(
            remedy,
            situation,
            number=self._records.next_number(),
            generation=self._next_generation(workload),
            now_s=now_s,
            hook_timeout_s=self._settings.hook_timeout_s,
            hook_signal=self._settings.hook_signal,
        )
        logger.log(
            logging.INFO if incident.is_start else logging.WARNING,
            "%s: %s%s%s (plan %d, generation %d, %d hosts)",
            workload.name,
            which(incident),
            remedy.kind,
            hosts_and_reason(remedy),
            plan.number,
            plan.generation,
            len(plan.places),
        )
        self._records.set_plan(plan)
        self._records.set_incident(replace(incident, tried=(*incident.tried, plan.number)))
        in_job = workload.in_job_restarts + (remedy.kind is RemedyKind.RESTART_IN_JOB)
        restarts = workload.workload_restarts + (remedy.kind is RemedyKind.RESTART_WORKLOAD)
        if remedy.kind in _OTHER_HOSTS:
            in_job = restarts = 0  # counted anew, because other hosts take part
        swaps = workload.swaps + (remedy.kind in _OTHER_HOSTS and not set(remedy.out) & set(situation.out))
        self._set(
            replace(
                workload,
                state=WorkloadState.STARTING if incident.is_start else WorkloadState.REMEDYING,
                plan=plan.number,
                since_s=now_s,
                in_job_restarts=in_job,
                workload_restarts=restarts,
                swaps=swaps,
                reason="",
            )
        )
        self._begin_step(plan, now_s)

    def _wait(self, workload: Workload, reason: str, now_s: float) -> None:
        """Takes all places away, until enough hosts are ready."""
        self._set(
            replace(
                workload,
                state=WorkloadState.WAITING,
                places=(),
                replace=(),
                replace_on=(),
                generation=self._next_generation(workload),
                replicas_before=workload.replicas or workload.replicas_before,
                since_s=now_s,
                reason=reason,
            )
        )

    def _wait_or_start(self, situation: Situation, now_s: float, wall: float) -> None:
        workload, spec = situation.workload, situation.workload.spec
        ready = len(situation.spares)
        waited_s = now_s - workload.since_s
        settled = waited_s >= spec.dwell_s and len(self._spares(workload, now_s, dwell_s=spec.dwell_s)) == ready
        if ready >= spec.hosts or (
            ready >= spec.min_hosts and settled
        ):  # hosts that start together are not equally fast
            self._carry_out(self._ask(situation), situation, now_s, wall)
        still_waits = self._workloads[workload.name].state is WorkloadState.WAITING
        if still_waits and waited_s >= spec.wait_timeout_s and not self._settings.dry_run:
            reason = f"{ready} of {spec.min_hosts} hosts are ready after {waited_s:.0f} s"
            self._end(self._workloads[workload.name], WorkloadState.STOPPED, reason, now_s, wall)

    def _next_generation(self, workload: Workload) -> int:
        return max(workload.generation, self._had.get(workload.name, 0)) + 1

    def _notice_chances(self, workload: Workload, now_s: float, wall: float) -> None:
        """Notes what no host reports: ready hosts that a job could use."""
        if workload.incident is not None:
            return
        ready = self._spares(workload, now_s, dwell_s=0.0)
        if workload.state is WorkloadState.WAITING:
            if len(ready) >= workload.spec.min_hosts:
                self._note(
                    workload,
                    Observation(kind=ObservationKind.CAPACITY, workload=workload.name, generation=workload.generation),
                    now_s,
                    wall,
                )
            elif now_s - workload.since_s >= workload.spec.wait_timeout_s and not self._settings.dry_run:
                reason = f"{len(ready)} of {workload.spec.min_hosts} hosts are ready"
                self._end(workload, WorkloadState.STOPPED, reason, now_s, wall)
            return
        if workload.state is not WorkloadState.RUNNING or not ready:
            return
        if self._declined.get(workload.name) == self._chances(workload, now_s):
            return
        spec = workload.spec
        for host in self._cordoned(workload):
            self._note(
                workload,
                Observation(
                    kind=ObservationKind.DRAIN, host=host, workload=workload.name, generation=workload.generation
                ),
                now_s,
                wall,
            )
        steady = self._spares(workload, now_s, dwell_s=spec.dwell_s)
        missing = spec.replicas - workload.replicas
        if spec.scale_up and missing > 0 and now_s - workload.since_s >= spec.dwell_s:
            if len(steady) >= spec.hosts_per_replica and self._seen_of(workload).began:
                self._note(
                    workload,
                    Observation(kind=ObservationKind.CAPACITY, workload=workload.name, generation=workload.generation),
                    now_s,
                    wall,
                )

    def _chances(self, workload: Workload, now_s: float) -> object:
        cordoned = self._cordoned(workload)
        is_small = workload.replicas < workload.spec.replicas
        steady = self._spares(workload, now_s, dwell_s=workload.spec.dwell_s) if is_small else ()
        return workload.generation, workload.spec, cordoned, list(self._free), len(steady)

    def _cordoned(self, workload: Workload) -> list[str]:
        """Cordoned hosts of the workload. Called at every look; there are hardly ever any."""
        cordoned = self._sensor.cordoned
        return [host for host in workload.places if host in cordoned] if cordoned else []

    def _complete(self, workload: Workload, now_s: float, wall: float) -> None:
        seen = self._seen_of(workload)
        if not workload.places or not seen.ended or not seen.ended.issuperset(workload.places):
            return
        self._end(workload, WorkloadState.COMPLETED, "every rank has finished", now_s, wall)

    def _forgive(self, workload: Workload, now_s: float) -> None:
        restarts = workload.in_job_restarts or workload.workload_restarts or workload.swaps
        spoiled = restarts or workload.host_faults or workload.resorts
        if spoiled and workload.state is WorkloadState.RUNNING and now_s - workload.since_s >= workload.spec.healthy_s:
            self._set(replace(workload, in_job_restarts=0, workload_restarts=0, swaps=0, host_faults={}, resorts=()))

    def _trains_on(self, situation: Situation, now_s: float) -> bool:
        """Hosts are silent, but training goes on, which it cannot do without them: they are unheard, not lost."""
        if any(one.kind is not ObservationKind.HOST_SILENT for one in situation.observations):
            return False
        if situation.workload.state is not WorkloadState.RUNNING:
            return False
        silent = [self._sensor.host(one.host) for one in situation.observations]
        since_s = max((host.heard_s for host in silent if host is not None), default=now_s)
        seen = self._seen_of(situation.workload)
        # A host may die just before its next report. The reports of other hosts come a period apart, and each tells
        # what a launcher saw up to REPORT_S before.
        return seen.made_s > since_s + self._period_s and now_s - seen.progressed_s < 2 * self._period_s + REPORT_S

    # -- the situation ------------------------------------------------------------------------------------------------

    def _situation(self, workload: Workload, incident: Incident, now_s: float) -> Situation:
        plans = tuple(self._plans[number] for number in incident.tried)
        held = tuple(one for one in incident.observations if self._holds(one, workload, plans))
        gone = {one.host for one in held if one.takes_host_out and one.host in workload.places}
        unready = {host for host in workload.places if self._sensor.state_of(host) in (HostState.SILENT, None)}
        out = tuple(host for host in workload.places if host in gone | unready)
        spares = self._spares(workload, now_s, dwell_s=0.0)
        blocks = {name: self._block(name) for name in (*workload.places, *spares)}
        lost = {blocks[name] for name in out if blocks[name]}
        return Situation(
            workload=workload,
            incident=incident,
            observations=held,
            out=out,
            spares=tuple(sorted(spares, key=lambda name: blocks[name] not in lost)),
            tried=plans,
            trains=self._seen_of(workload).began,
            blocks=blocks,
            resorts=tuple(
                kind for kind in LAST_RESORTS if kind in self._resorts(workload) and kind not in workload.resorts
            ),
        )

    def _block(self, name: str) -> str:
        host = self._sensor.host(name)
        return "" if host is None else host.block

    def _holds(self, one: Observation, workload: Workload, tried: Sequence[Plan]) -> bool:
        """Whether the observation is still true, or nothing has been done about it yet."""
        if one.kind is ObservationKind.HOST_SILENT:
            return self._sensor.state_of(one.host) is HostState.SILENT and one.host in workload.places
        if one.kind is ObservationKind.DRAIN:
            return self._sensor.state_of(one.host) is HostState.CORDONED and one.host in workload.places
        if one.host and one.host not in workload.places:
            return False
        if one.kind in (ObservationKind.HOST_UNHEALTHY, ObservationKind.HOST_LOST, ObservationKind.DEVICE_FAULT):
            return not any(plan.outcome is Outcome.DONE for plan in tried)
        return one.generation == workload.generation

    def _spares(self, workload: Workload, now_s: float, *, dwell_s: float) -> list[str]:
        """Hosts that are ready (for at least ``dwell_s``), have no place, and may work for the workload; by name."""
        present = self._sensor.ready_version, self._records.version
        if self._free_of != present:
            self._free_of, self._free = present, sorted(self._sensor.ready - self._taken())
        free = self._of_one_job(workload, self._free)
        if not dwell_s:
            return free
        hosts = (self._sensor.host(name) for name in free)
        return [host.name for host in hosts if host is not None and now_s - host.since_s >= dwell_s]

    def _of_one_job(self, workload: Workload, hosts: list[str]) -> list[str]:
        """Those of one job that the user has submitted: another one has other data, and maybe another script."""
        jobs = {host: self._jobs.of(host) for host in hosts if not self._jobs.is_unnamed(host)}
        hosts = list(jobs)
        counts = Counter(filter(None, jobs.values()))
        if not counts or counts.keys() == {workload.job}:
            return hosts
        # Not noted yet in the moment after the start.
        job = workload.job or next(filter(None, map(self._jobs.of, workload.places)), "")
        if not job or not self._jobs.have_hosts(job):
            others = {
                each.job for each in self._workloads.values() if each is not workload and not each.state.has_ended
            }
            free = {one: number for one, number in counts.items() if one not in others}
            job = self._jobs.first(free, workload.spec.hosts) or job
        for other in counts.keys() - {job}:
            if (job, other) not in self._foreign:
                self._foreign.add((job, other))
                logger.warning(
                    "%d ready hosts belong to job %s, and are not given to workload %s, which is job %s: a supervisor"
                    " runs one job at a time; the other waits for its end, or for a supervisor of its own",
                    counts[other],
                    self._jobs.name(other),
                    workload.name,
                    self._jobs.name(job),
                )
        return [host for host in hosts if jobs[host] in ("", job)]

    def _taken(self) -> set[str]:
        taken: set[str] = set()
        for workload in self._workloads.values():
            if not workload.state.has_ended:
                taken.update(workload.places)
                if workload.plan is not None:
                    taken.update(self._plans[workload.plan].places)
        return taken

    def _is_to_come(self, workload: Workload, host: str) -> bool:
        return workload.plan is not None and host in self._plans[workload.plan].places

    # -- plans --------------------------------------------------------------------------------------------------------

    def _follow(self, plan: Plan, now_s: float, wall: float) -> None:
        """Advances past steps that hosts are seen to have done, and fails the present step when it is late."""
        while (step := plan.step) is not None:
            workload = self._workloads[plan.workload]
            seen = self._seen_of(workload)
            if (
                step.kind is StepKind.PLACE
                and workload.generation == plan.generation
                and seen.placed.issuperset(plan.places)
            ):
                plan = self._advance(plan, now_s)
                continue
            is_late = now_s - plan.step_since_s > step.timeout_s
            if step.kind is StepKind.PROGRESS and (seen.has_started(plan.places) or (is_late and seen.began)):
                plan = self._advance(plan, now_s)
                continue
            if is_late:
                late = tuple(host for host in plan.places if host not in seen.placed)
                problem = f"{step.kind} was not done within {step.timeout_s:.0f} s"
                self._step_failed(plan, problem, late if step.kind is StepKind.PLACE else (), now_s, wall)
            return
        workload = self._workloads[plan.workload]
        if plan.outcome is Outcome.ACTIVE:
            self._end_plan(plan, Outcome.DONE, "", now_s)
            self._set(replace(self._workloads[workload.name], state=WorkloadState.RUNNING, since_s=now_s))
            left = self._not_seen_to(workload)
            outcome = "its ranks train" if plan.remedy.kind is RemedyKind.START else f"{plan.remedy.kind} helped"
            self._close(self._workloads[workload.name], outcome, now_s, wall)
            for one in left:
                self._note(self._workloads[workload.name], replace(one, generation=workload.generation), now_s, wall)

    def _not_seen_to(self, workload: Workload) -> list[Observation]:
        """Device observations that ask for a reset, where no plan of the incident has reset that host's devices."""
        if workload.incident is None:
            return []
        incident = self._incidents[workload.incident]
        resets = [self._plans[number].remedy for number in incident.tried]
        done = {host for remedy in resets if remedy.kind is RemedyKind.RESET_DEVICES for host in remedy.out}
        asked = [one for one in incident.observations if one.device_class is DeviceClass.RESET]
        return [one for one in asked if one.host in workload.places and one.host not in done]

    def _advance(self, plan: Plan, now_s: float) -> Plan:
        self._records.set_plan(replace(plan, at=plan.at + 1, step_since_s=now_s))
        self._begin_step(self._plans[plan.number], now_s)
        return self._plans[plan.number]

    def _begin_step(self, plan: Plan, now_s: float) -> None:
        workload = self._workloads[plan.workload]
        if plan.step is not None and plan.step.kind is StepKind.CHECKPOINT:
            seen = self._seen_of(workload)
            step = save_step(seen.step, age_s=now_s - seen.progressed_s, steps_per_s=seen.steps_per_s)
            self._records.set_plan(replace(plan, save_step=step))
        if plan.step is None or plan.step.kind is not StepKind.PLACE:
            return
        left = [host for host in workload.places if host not in plan.places]
        self._give_up_silent(left)
        for host in set(left) & set(plan.remedy.out):
            if self._sensor.state_of(host) is HostState.READY:
                self._sensor.quarantine(host, plan.remedy.reason, now_s)
        self._set(
            replace(
                workload,
                generation=plan.generation,
                places=plan.places,
                fresh=plan.fresh,
                replace=plan.replace,
                replace_on=plan.replace_on,
                replicas_before=workload.replicas or workload.replicas_before,
            )
        )

    def _give_up_silent(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            if self._sensor.state_of(host) is HostState.SILENT:
                self._sensor.give_up(host)

    def _step_failed(self, plan: Plan, problem: str, hosts: tuple[str, ...], now_s: float, wall: float) -> None:
        step = plan.step
        assert step is not None
        if not step.required:
            logger.warning("%s: plan %d goes on although %s", plan.workload, plan.number, problem)
            self._advance(plan, now_s)
            return
        for host in hosts:
            self._sensor.quarantine(host, problem, now_s)
        if hosts:  # the hosts failed, not the remedy
            self._end_plan(replace(plan, failed=hosts), Outcome.OVERTAKEN, problem, now_s)
            kind = ObservationKind.HOST_UNHEALTHY
        else:
            self._end_plan(plan, Outcome.FAILED, problem, now_s)
            kind = ObservationKind.NO_PROGRESS
        workload = self._workloads[plan.workload]
        for host in hosts or ("",):
            if not host or host in workload.places:
                seen = Observation(
                    kind=kind, host=host, workload=workload.name, generation=workload.generation, detail=problem
                )
                self._note(self._workloads[workload.name], seen, now_s, wall)

    def _end_plan(self, plan: Plan, outcome: Outcome, reason: str, now_s: float) -> None:
        if outcome is Outcome.FAILED:
            self._failed_s[plan.workload] = now_s
        if outcome is not Outcome.DONE:
            logger.warning("%s: plan %d is %s: %s", plan.workload, plan.number, outcome, reason)
        self._records.set_plan(replace(plan, outcome=outcome, reason=reason))
        workload = replace(self._workloads[plan.workload], plan=None)
        if workload.generation != plan.generation and self._seen_of(workload).began:
            workload = replace(workload, state=WorkloadState.RUNNING, since_s=now_s)  # the plan had changed nothing yet
        self._set(workload)

    def _end(self, workload: Workload, state: WorkloadState, reason: str, now_s: float, wall: float) -> None:
        level = logging.INFO if state is WorkloadState.COMPLETED else logging.ERROR
        logger.log(level, "%s is %s: %s", workload.name, state, reason)
        if workload.plan is not None:
            self._end_plan(self._plans[workload.plan], Outcome.OVERTAKEN, reason, now_s)
        self._close(self._workloads[workload.name], reason, now_s, wall)
        self._set(replace(self._workloads[workload.name], state=state, since_s=now_s, reason=reason))
        self._goodput.pause(workload.name)

    # -- state that is stored -----------------------------------------------------------------------------------------

    def _seen_of(self, workload: Workload) -> Progress:
        seen = self._seen.get(workload.name)
        if seen is None or seen.generation != workload.generation:
            seen = self._seen[workload.name] = Progress(generation=workload.generation)
        return seen

    def _set(self, workload: Workload) -> None:
        self._records.set_workload(replace(workload, goodput=self._goodput.of(workload.name)))


#: Generations that failed alike are counted up to this.
_MOST_STUCK = 31
_OTHER_HOSTS = (RemedyKind.HOT_SWAP, RemedyKind.SCALE_DOWN)
#: Observations that, after ranks were placed, mean that they will not make their first step.
_ENDS_A_GENERATION = (ObservationKind.WORKER_LOST, ObservationKind.WORKER_HUNG, ObservationKind.NO_PROGRESS)
#: Seconds between two remedies when remedies do not help: before the third one of an incident, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 15.0
#: When this many times ``most_plans`` plans were tried, overtaken ones included, the workload is stopped.
_OVERTAKEN_COUNT = 5


def pause_s(failed: int) -> float:
    """Seconds to wait before the next plan of an incident.

    Args:
        failed: how many plans of the incident did not help.
    """
    return 0.0 if failed < 2 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 3.0 ** (failed - 2))


def _checked(answer: object) -> Remedy | None:
    """A policy's answer, with its values made storable; None when it is no valid :class:`Remedy`."""
    if not isinstance(answer, Remedy):
        return None
    if isinstance(answer.out, str) or not all(isinstance(host, str) for host in answer.out):
        return None
    return Remedy(kind=RemedyKind(answer.kind), out=tuple(answer.out), reason=plain_line(str(answer.reason or "")))
