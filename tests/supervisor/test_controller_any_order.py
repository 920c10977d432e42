"""Faults in any order: nothing that must hold is ever broken, and every incident ends once the faults do."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.supervisor.model import WorkloadSpec, WorkloadState

from .simulated import Simulation

HOSTS = 7
NAMES = [f"host-{number}" for number in range(HOSTS)]


class Cluster(RuleBasedStateMachine):
    """After every quarter of a second ``Simulation.check`` looks for a rank with two owners, a host with two places, two
    plans at once, a size below the minimum, and an incident beside an open one."""

    @initialize(
        replicas=st.integers(1, 3),
        size=st.integers(1, 2),
        fewest=st.integers(1, 3),
        in_job=st.integers(0, 2),
        restarts=st.integers(0, 2),
    )
    def start(self, replicas: int, size: int, fewest: int, in_job: int, restarts: int) -> None:
        self.job = Simulation(
            WorkloadSpec(
                name="job",
                replicas=replicas,
                hosts_per_replica=size,
                min_replicas=min(fewest, replicas),
                max_in_job_restarts=in_job,
                max_workload_restarts=restarts,
                dwell_s=2.0,
                start_timeout_s=8.0,
                stop_timeout_s=1.0,
                verify_timeout_s=3.0,
                checkpoint_timeout_s=2.0,
                healthy_s=20.0,
            ),
            HOSTS,
        )
        self.generation = 0

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.job.pass_time(seconds)
        assert self.job.workload.generation >= self.generation
        self.generation = self.job.workload.generation

    @rule(name=st.sampled_from(NAMES))
    def lose_worker(self, name: str) -> None:
        self.job.lose_worker(name)

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        self.job.kill(name)

    @rule(name=st.sampled_from(NAMES))
    def revive(self, name: str) -> None:
        if not self.job.hosts[name].up:
            self.job.revive(name)

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from(["heard", "healthy", "obeys", "trains"]))
    def toggle(self, name: str, what: str) -> None:
        host = self.job.hosts[name]
        setattr(host, what, not getattr(host, what))

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(list(DeviceClass)))
    def device_fault(self, name: str, kind: DeviceClass) -> None:
        one = Observation(kind=ObservationKind.DEVICE_FAULT, host=name, device="0", device_class=kind)
        self.job.controller.observe(one, self.job.now, self.job.now)

    @rule(name=st.sampled_from(NAMES), generation=st.integers(0, 20))
    def stale(self, name: str, generation: int) -> None:
        """Of another generation, or forged."""
        if generation != self.job.workload.generation:
            one = Observation(
                kind=ObservationKind.WORKER_LOST, host=name, workload="job", generation=generation, rank=1
            )
            self.job.controller.observe(one, self.job.now, self.job.now)
            self.job.controller.reported(name, "job", generation, self.job.now, step=10**9, ended=True)

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        if self.job.sensor.cordon(name, "maintenance", self.job.now):
            one = Observation(kind=ObservationKind.DRAIN, host=name)
            self.job.controller.observe(one, self.job.now, self.job.now)

    @rule(name=st.sampled_from(NAMES))
    def uncordon(self, name: str) -> None:
        self.job.sensor.uncordon(name, self.job.now)

    @rule(away_s=st.sampled_from([0.1, 2.0, 30.0]))
    def kill_supervisor(self, away_s: float) -> None:
        self.job.kill_supervisor(away_s)

    @rule(seconds=st.sampled_from([5.0, 86_400.0]))
    def suspend_supervisor(self, seconds: float) -> None:
        self.job.now += seconds

    def teardown(self) -> None:
        """All hosts are well from now on: the job trains, or was ended with a reason."""
        if not hasattr(self, "job"):
            return
        for host in self.job.hosts.values():
            host.up = host.heard = host.healthy = host.obeys = host.trains = True
            self.job.sensor.uncordon(host.name, self.job.now)
        settled = (WorkloadState.RUNNING, WorkloadState.STOPPED)
        self.job.until(
            lambda: (
                self.job.workload.state in settled
                and self.job.workload.plan is None
                and self.job.workload.incident is None
            ),
            within_s=2000,
        )
        if self.job.workload.state is WorkloadState.STOPPED:
            self.job.pass_time(0.25)
            assert self.job.workload.reason and not self.job.running_on()
            return
        self.job.until(lambda: len(self.job.workload.places) == self.job.spec.hosts, within_s=2000)
        before = self.job.step
        self.job.pass_time(10)
        assert self.job.step > before or self.job.workload.state is not WorkloadState.RUNNING
        assert self.job.running_on() == set(self.job.workload.places)


Cluster.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = Cluster.TestCase


def test_the_simulation_itself_notices_two_owners_of_a_rank() -> None:
    job = Simulation(WorkloadSpec(name="job", replicas=2), 3)
    job.until(lambda: job.workload.state is WorkloadState.RUNNING)
    job.hosts["host-2"].place = job.hosts["host-0"].place
    with pytest.raises(AssertionError, match="both have rank"):
        job.check()
