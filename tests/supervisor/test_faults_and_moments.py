"""Each fault in each moment, on a clock of the test's: the incident ends, the job trains at its full size again, and no
rank ever has two owners (``Simulation.check``, after every quarter of a second). With real training:
tests/e2e/test_cluster_soak.py; in any order: test_controller_any_order.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.supervisor.controller import ControllerSettings
from resiliency.supervisor.model import HostState, RemedyKind, WorkloadSpec, WorkloadState

from .simulated import TIMEOUT_S, Simulation

RUNNING = WorkloadState.RUNNING
#: In which a fault is noticed, while its moment lasts.
LASTS_S = TIMEOUT_S + 2.0
#: Of one fault, and of a second one in a remedy: more would be a loop.
MOST_PLANS = 6


def simulation(hosts: int, hook: bool = False) -> Simulation:
    spec = WorkloadSpec(
        name="job", replicas=3, min_replicas=2, max_in_job_restarts=2, max_workload_restarts=1, dwell_s=2.0,
        start_timeout_s=20.0, verify_timeout_s=20.0, checkpoint_timeout_s=20.0, stop_timeout_s=2.0,
    )  # fmt: skip
    return Simulation(spec, hosts, settings=ControllerSettings(hook_timeout_s=20.0 if hook else 0.0))


def trains(job: Simulation) -> None:
    job.until(lambda: job.workload.state is RUNNING and job.workload.plan is None and job.workload.incident is None)


# ---- moments: a job with spares, or one that grows, and a plan that stands still


def at_start(kind: StepKind) -> Callable[[], Simulation]:
    def make() -> Simulation:
        job = simulation(5)
        job.hold(kind)
        job.until(lambda: job.is_at(kind))
        return job

    return make


def training() -> Simulation:
    job = simulation(5)
    trains(job)
    job.pass_time(2)
    return job


def supervisor_just_restarted() -> Simulation:
    job = training()
    job.kill_supervisor(2.0)
    return job


def in_remedy(kind: StepKind) -> Callable[[], Simulation]:
    """A host is drained for a spare: it is verified, ranks save, the hook runs, places are told, ranks restore."""

    def make() -> Simulation:
        job = simulation(5, hook=kind is StepKind.HOOK)
        trains(job)
        job.hold(kind)
        host = job.workload.places[2]
        assert job.sensor.cordon(host, "drained", job.now)
        job.controller.observe(Observation(kind=ObservationKind.DRAIN, host=host), job.now, job.now)
        job.until(lambda: job.is_at(kind))
        return job

    return make


def in_growth(kind: StepKind) -> Callable[[], Simulation]:
    """A host returns to a job that was scaled down."""

    def make() -> Simulation:
        job = simulation(3)
        trains(job)
        job.kill("host-2")
        job.until(lambda: len(job.workload.places) == 2 and job.workload.plan is None)
        job.hold(kind)
        job.revive("host-2")
        job.until(lambda: job.is_at(kind))
        assert job.controller.active_plans()[0].remedy.kind is RemedyKind.SCALE_UP
        return job

    return make


MOMENTS = {
    "places are told at the start": at_start(StepKind.PLACE),
    "ranks start": at_start(StepKind.PROGRESS),
    "training": training,
    "the supervisor was just restarted": supervisor_just_restarted,
    "a spare is verified": in_remedy(StepKind.VERIFY),
    "ranks save": in_remedy(StepKind.CHECKPOINT),
    "the hook runs": in_remedy(StepKind.HOOK),
    "places are told": in_remedy(StepKind.PLACE),
    "ranks restore": in_remedy(StepKind.PROGRESS),
    "a host that returns is verified": in_growth(StepKind.VERIFY),
    "ranks save to grow": in_growth(StepKind.CHECKPOINT),
    "places are told to grow": in_growth(StepKind.PLACE),
    "ranks restore with more": in_growth(StepKind.PROGRESS),
}


# ---- faults


@dataclass(frozen=True)
class Where:
    job: Simulation

    @property
    def trainer(self) -> str:
        """One that has a place, or is to have one."""
        return self._places[0]

    @property
    def other(self) -> str:
        return self._places[1]

    @property
    def _places(self) -> tuple[str, ...]:
        plans = self.job.controller.active_plans()
        return self.job.workload.places or plans[0].places

    @property
    def newcomer(self) -> str:
        """One that is to take a place, else a spare."""
        plans = self.job.controller.active_plans()
        coming = [host for plan in plans for host in plan.places if host not in self.job.workload.places]
        taken = {*self.job.workload.places, *coming}
        return next(
            iter([*reversed(coming), *(host for host in reversed(self.job.hosts) if host not in taken)]), self.other
        )

    def see(self, host: str, kind: ObservationKind, **fields: object) -> None:
        one = Observation(kind=kind, host=host, **fields)  # type: ignore[arg-type]
        self.job.controller.observe(one, self.job.now, self.job.now)

    def see_rank(self, host: str, kind: ObservationKind) -> None:
        place = self.job.hosts[host].place
        if place is not None:  # it has ranks
            self.see(host, kind, workload="job", generation=place.generation, rank=place.node_rank)

    def kill(self, host: str) -> None:
        self.job.kill(host)

    def cut_off(self, host: str) -> None:
        self.job.hosts[host].heard = False


def flaps(at: Where) -> None:
    host = at.trainer
    for _ in range(3):
        at.kill(host)
        at.job.pass_time(1.0)
        at.job.revive(host)
        at.job.pass_time(0.5)


def says_what_is_over(at: Where) -> None:
    """Of a generation before, of one that nobody has had, of a host and a workload that nobody knows."""
    job, generation = at.job, at.job.workload.generation
    lost = ObservationKind.WORKER_LOST
    for name, workload, number in [
        (at.trainer, "job", generation - 1),
        (at.trainer, "job", generation + 7),
        (at.trainer, "x", generation),
    ]:
        at.see(name, lost, workload=workload, generation=number, rank=0)
        for host in job.hosts:  # of all of them: else the job would not be taken for finished
            job.controller.reported(host, workload, number, job.now, step=10**9, ended=True)
    at.see("ghost", lost, workload="job", generation=generation, rank=0)
    at.see("ghost", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.SWAP)


def device(kind: DeviceClass) -> Callable[[Where], None]:
    return lambda at: at.see(at.trainer, ObservationKind.DEVICE_FAULT, device="0", device_class=kind)


def jumps(seconds: float) -> Callable[[Where], None]:
    def jump(at: Where) -> None:
        at.job.wall_ahead_s = seconds

    return jump


def stops(at: Where) -> None:
    """The service notices that it did not run, and says so."""
    at.job.now += 86_400.0
    at.job.controller.pause(86_400.0)


FAULTS: dict[str, Callable[[Where], None]] = {
    "a rank is lost": lambda at: at.see_rank(at.trainer, ObservationKind.WORKER_LOST),
    "a rank hangs": lambda at: at.see_rank(at.trainer, ObservationKind.WORKER_HUNG),
    "a host dies": lambda at: at.kill(at.trainer),
    "a host is cut off": lambda at: at.cut_off(at.trainer),
    "a host that was to come, or a spare, dies": lambda at: at.kill(at.newcomer),
    "a host flaps": flaps,
    "a device is to be reset": device(DeviceClass.RESET),
    "a device is broken": device(DeviceClass.SWAP),
    "a host dies and a rank of another is lost": lambda at: (
        at.see_rank(at.other, ObservationKind.WORKER_LOST),
        at.kill(at.trainer),
    )[0],
    "a host dies, and a spare": lambda at: (at.kill(at.trainer), at.kill(at.newcomer))[0],
    "the supervisor is killed": lambda at: at.job.kill_supervisor(1.0),
    "the supervisor is stopped for a day": stops,
    "the supervisor is killed and a host dies": lambda at: (at.kill(at.trainer), at.job.kill_supervisor(1.0))[0],
    "most hosts are cut off": lambda at: [at.cut_off(host) for host in [*at.job.hosts][:-1]] and None,
    "what is over, or forged, is said": says_what_is_over,
    "the wall clock jumps ahead": jumps(1e9),
    "the wall clock jumps back": jumps(-1e9),
}
#: That are no reason to do anything.
IDLE = {
    "the supervisor is killed",
    "the supervisor is stopped for a day",
    "what is over, or forged, is said",
    "the wall clock jumps ahead",
    "the wall clock jumps back",
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_gets_over_each_fault_in_each_moment(fault: str, moment: str) -> None:
    job = MOMENTS[moment]()
    plans, generation = len(job.controller.plans), job.workload.generation
    active = [plan.number for plan in job.controller.active_plans()]
    FAULTS[fault](Where(job))
    job.pass_time(LASTS_S)
    assert job.workload.state is not WorkloadState.COMPLETED
    lost = {name for name, host in job.hosts.items() if not (host.up and host.heard)}
    waits_for = {host for plan in job.controller.active_plans() for host in plan.places}
    assert job.sensor.frozen or not waits_for & lost, "a plan is carried out that cannot succeed"
    if fault in IDLE:
        assert [plan.number for plan in job.controller.active_plans()] == active, "what was begun goes on"
        assert len(job.controller.plans) == plans
    job.release()
    if fault == "most hosts are cut off":
        assert job.workload.generation == generation and len(job.controller.plans) == plans, "frozen"
    job.pass_time(20)
    for name, host in job.hosts.items():
        host.heard = True
        if not host.up:
            job.revive(name)
        job.sensor.uncordon(name, job.now)
    job.until(lambda: job.workload.incident is None and len(job.workload.places) == 3, within_s=200)
    trains(job)
    step = job.step
    job.pass_time(5)
    assert job.step > step and job.running_on() == set(job.workload.places)
    assert all(not one.is_open for one in job.controller.incidents.values())
    more = len(job.controller.plans) - plans
    assert more <= (0 if fault in IDLE and job.workload.generation <= generation + 1 else MOST_PLANS), (
        "remedies without an end"
    )


def test_moments_are_what_they_are_called() -> None:
    for moment, make in MOMENTS.items():
        job = make()
        (plan,) = job.controller.active_plans() or [None]
        has_plan = moment not in ("training", "the supervisor was just restarted")
        assert (plan is not None) is has_plan, moment
        assert job.states()["host-0"] is HostState.READY or not has_plan, moment
