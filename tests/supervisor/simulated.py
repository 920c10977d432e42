"""Hosts that do what they are told, on a clock that the test turns, and a supervisor above them."""

from __future__ import annotations

from dataclasses import dataclass, field

from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.runtime.messages.places import Place
from resiliency.supervisor.controller import Controller, ControllerSettings
from resiliency.supervisor.model import HostState, Workload, WorkloadSpec
from resiliency.supervisor.policy import Policy
from resiliency.supervisor.sensor import Sensor, SensorSettings

PERIOD_S, TIMEOUT_S = 1.0, 3.0


@dataclass
class SimulatedHost:
    """One that runs ranks where it has a place.

    Attributes:
        up: it runs. A host that is down says nothing and trains nothing.
        heard: what it says comes through.
        healthy: a check passes.
        obeys: it takes the places that it is given.
        trains: its ranks make steps.
        block: its failure domain.
    """

    name: str
    up: bool = True
    heard: bool = True
    healthy: bool = True
    obeys: bool = True
    trains: bool = True
    block: str = ""
    incarnation: int = 0
    place: Place | None = None
    asked: list[tuple[int, StepKind]] = field(default_factory=list)


class Simulation:
    """A cluster of simulated hosts. Time passes in ``pass_time`` only."""

    def __init__(
        self,
        spec: WorkloadSpec,
        hosts: int,
        *,
        policy: Policy | None = None,
        settings: ControllerSettings | None = None,
        sensor: SensorSettings | None = None,
    ) -> None:
        self.now = 1000.0
        self.policy, self.settings = policy, settings or ControllerSettings()
        self.sensor_settings = sensor or SensorSettings(
            period_s=PERIOD_S, timeout_s=TIMEOUT_S, quarantine_s=5.0, thaw_s=2.0
        )
        self.hosts = {f"host-{number}": SimulatedHost(f"host-{number}") for number in range(hosts)}
        self.spec = spec
        self.step = 0
        #: The wall clock's difference from the one that time passes on.
        self.wall_ahead_s = 0.0
        #: Steps of plans in which time stands still.
        self.held: set[StepKind] = set()
        self.finishes_at: int | None = None
        self.stored: dict[str, dict] = {"workloads": {}, "incidents": {}, "plans": {}, "hosts": {}}
        self._new_supervisor()
        self.controller.add(spec, self.now)
        self.store()

    # -- the supervisor -----------------------------------------------------------------------------------------------

    def _new_supervisor(self) -> None:
        self.sensor = Sensor(self.sensor_settings, self.now)
        self.controller = Controller(self.sensor, policy=self.policy, settings=self.settings, period_s=PERIOD_S)

    def kill_supervisor(self, away_s: float = 0.5) -> None:
        """Another one begins with what was stored."""
        for _ in range(int(away_s / 0.1)):
            self.now += 0.1
            self._train(0.1)
        self._new_supervisor()
        self.sensor.restore(self.stored["hosts"].values(), self.now)
        self.controller.restore(
            self.stored["workloads"].values(),
            self.stored["incidents"].values(),
            self.stored["plans"].values(),
            self.now,
            self.now,
        )

    def store(self) -> None:
        changes = self.controller.take_changes()
        for name in ("workloads", "incidents", "plans"):
            self.stored[name].update(getattr(changes, name))
        for name in self.sensor.take_changed():
            host = self.sensor.host(name)
            if host is None:
                self.stored["hosts"].pop(name, None)
            else:
                self.stored["hosts"][name] = host

    @property
    def workload(self) -> Workload:
        return self.controller.workloads[self.spec.name]

    # -- moments ------------------------------------------------------------------------------------------------------

    def hold(self, kind: StepKind) -> None:
        """No plan gets beyond a step of this kind: hosts do not take their places, or make no steps in them."""
        self.held.add(kind)
        for host in self.hosts.values():
            host.obeys, host.trains = StepKind.PLACE not in self.held, StepKind.PROGRESS not in self.held

    def release(self) -> None:
        self.held.clear()
        for host in self.hosts.values():
            host.obeys = host.trains = True

    def is_at(self, kind: StepKind) -> bool:
        return any(plan.step is not None and plan.step.kind is kind for plan in self.controller.active_plans())

    # -- time ---------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        for _ in range(max(1, round(seconds / step_s))):
            self.now += step_s
            self._train(step_s)
            self._report()
            self.controller.look(self.now, self.now + self.wall_ahead_s)
            self.store()
            self._carry_out()
            self.store()
            self.check()

    def until(self, condition, within_s: float = 120.0) -> None:
        """Lets time pass until something is true."""
        end = self.now + within_s
        while not condition():
            assert self.now < end, f"not within {within_s} s: {self.workload}"
            self.pass_time(0.25)

    def running_on(self) -> set[str]:
        return {host.name for host in self.hosts.values() if host.up and host.place is not None}

    def _train(self, seconds: float) -> None:
        """Ranks make a step where all of a generation are there."""
        generations = {host.place.generation for host in self.hosts.values() if host.place is not None}
        for generation in generations:
            having = [
                host for host in self.hosts.values() if host.place is not None and host.place.generation == generation
            ]
            if sum(host.up and host.trains for host in having) == having[0].place.nodes:
                self.step += 1

    def _report(self) -> None:
        for host in self.hosts.values():
            if not (host.up and host.heard):
                continue
            self.sensor.heard(host.name, str(host.incarnation), self.now, block=host.block)
            place = self.controller.place_of(host.name)
            if host.obeys:
                if place is not None and (host.place is None or host.place.generation != place.generation):
                    host.place, host.began = place, self.step
                elif place is None:
                    host.place = None
            if host.place is not None:
                began = self.step > getattr(host, "began", self.step)
                finished = self.finishes_at is not None and self.step >= self.finishes_at
                self.controller.reported(
                    host.name,
                    host.place.workload,
                    host.place.generation,
                    self.now,
                    step=self.step if began else -1,
                    ended=finished,
                )
        for name in self.sensor.to_check(self.now):
            host = self.hosts[name]
            if host.up and host.heard:
                self.sensor.checked(name, "" if host.healthy else "the check failed", self.now)

    def _carry_out(self) -> None:
        for plan in self.controller.active_plans():
            step = plan.step
            if step is None or step.kind in {StepKind.PLACE, StepKind.PROGRESS, *self.held}:
                continue
            bad = []
            if step.kind is StepKind.VERIFY:
                bad = [name for name in step.hosts if not self._passes(name)]
            for name in step.hosts:
                self.hosts[name].asked.append((plan.number, step.kind))
            self.controller.step_ended(
                plan.number, plan.at, self.now, self.now, problem="the check failed" if bad else "", hosts=bad
            )

    def _passes(self, name: str) -> bool:
        host = self.hosts[name]
        return host.up and host.heard and host.healthy

    # -- what must always hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        workload = self.workload
        places = workload.places
        assert len(set(places)) == len(places), "a host has two places"
        owners = {}
        for host in self.hosts.values():
            if host.place is not None:
                key = (host.place.generation, host.place.node_rank)
                assert key not in owners, f"{host.name} and {owners[key]} both have rank {key}"
                owners[key] = host.name
        if places:
            assert len(places) >= self.spec.min_hosts and len(places) % self.spec.hosts_per_replica == 0
            assert len(places) <= self.spec.hosts
        active = [plan for plan in self.controller.plans.values() if plan.step is not None]
        assert [plan.number for plan in active] == ([] if workload.plan is None else [workload.plan]), "two remedies"
        assert sum(incident.is_open for incident in self.controller.incidents.values()) <= 1

    # -- faults -------------------------------------------------------------------------------------------------------

    def lose_worker(self, name: str, exit_code: int | None = None, detail: str = "") -> None:
        """A rank of a host dies; the host is well."""
        host = self.hosts[name]
        if host.place is not None and host.up and host.heard:
            self.controller.observe(
                Observation(
                    kind=ObservationKind.WORKER_LOST,
                    host=name,
                    workload=host.place.workload,
                    generation=host.place.generation,
                    rank=0,
                    exit_code=exit_code,
                    detail=detail,
                ),
                self.now,
                self.now,
            )

    def kill(self, name: str) -> None:
        self.hosts[name].up = False
        self.hosts[name].place = None

    def revive(self, name: str) -> None:
        host = self.hosts[name]
        host.up, host.incarnation = True, host.incarnation + 1

    def states(self) -> dict[str, HostState | None]:
        return {name: self.sensor.state_of(name) for name in self.hosts}
