"""Which hosts are taken for silent, on a clock of the test's."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from resiliency.runtime.messages.monitor import StepKind
from resiliency.supervisor.controller import Controller
from resiliency.supervisor.model import HostState, WorkloadSpec, WorkloadState
from resiliency.supervisor.sensor import Sensor, SensorSettings

SETTINGS = SensorSettings(period_s=5.0, timeout_s=10.0)


class Cluster:
    """Hosts that report once a period, each at a moment of its own, as real ones do."""

    def __init__(self, hosts: int, spares: int = 0) -> None:
        self.now, self.ticks = 0.0, 0
        self.sensor = Sensor(SETTINGS, 0.0)
        self.controller = Controller(self.sensor)
        self.controller.add(WorkloadSpec(name="job", replicas=hosts - spares), 0.0)
        self.names = [f"host-{number}" for number in range(hosts)]
        self.cut: set[str] = set()
        self.trains = True
        self.pass_time(20)
        assert self.workload.state is WorkloadState.RUNNING

    @property
    def workload(self):
        return self.controller.workloads["job"]

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.ticks += 1
            self.now = self.ticks / 10
            for number, name in enumerate(self.names):
                if self.ticks % 50 == number * 50 // len(self.names) and name not in self.cut:
                    self._report(name)
            for name in self.sensor.to_check(self.now):
                self.sensor.checked(name, "", self.now)
            self.controller.look(self.now, self.now)
            for plan in self.controller.active_plans():
                unheard = self.cut & {*plan.step.hosts} if plan.step is not None else set()
                if plan.step is not None and not (plan.step.kind is StepKind.VERIFY and unheard):
                    self.controller.step_ended(plan.number, plan.at, self.now, self.now)

    def _report(self, name: str) -> None:
        self.sensor.heard(name, "1", self.now)
        place = self.controller.place_of(name)
        if place is not None:
            trains = self.trains and not self.cut & {*self.workload.places}
            step = int(self.now) if trains else self.workload.generation
            self.controller.reported(name, "job", place.generation, self.now, step=step)


@pytest.mark.parametrize(
    ("hosts", "cut"),
    [(4, [0, 1, 2]), (4, [0, 1, 2, 3]), (2, [0, 1]), (8, [0, 2, 4, 6, 1]), (3, [2, 0])],
    ids=str,
)
def test_a_network_that_is_cut_between_reports_freezes_before_anything_is_done(
    hosts: int, cut: Collection[int]
) -> None:
    """The hosts become late one after the other, over a period."""
    job = Cluster(hosts)
    for moment in (0.0, 1.3, 3.1):
        job.pass_time(20 + moment)
        job.cut, job.trains = {f"host-{number}" for number in cut}, False
        job.pass_time(60)
        assert job.workload.state is WorkloadState.FROZEN and job.workload.generation == 1
        job.cut, job.trains = set(), True
        job.pass_time(60)
        assert job.workload.state is WorkloadState.RUNNING and job.workload.generation == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_network_is_cut_while_hosts_report_later_than_their_period_by_what_they_do_besides(seed: int) -> None:
    """Nobody is silent before all that were cut are: a host that was about to report is no host that died."""
    chance = random.Random(seed)
    sensor = Sensor(SensorSettings(period_s=0.5, timeout_s=2.0), 0.0)
    names = [f"host-{number}" for number in range(4)]
    cut_s = {name: 10 + chance.uniform(0.0, 0.1) for name in names[: chance.choice([3, 4])]}
    reports: list[tuple[float, str]] = []
    for name in names:
        at = chance.uniform(0.0, 0.5)
        while at < min(cut_s.get(name, 20.0), 20.0):
            reports.append((at, name))
            at += 0.5 + chance.uniform(0.0, 0.25)
    reports.sort()
    for tick in range(1, 260):
        now = tick / 20
        while reports and reports[0][0] <= now:
            at, name = reports.pop(0)
            sensor.heard(name, "1", at)
            sensor.checked(name, "", at)
        sensor.look(now)
        silent = [name for name in names if sensor.state_of(name) is HostState.SILENT]
        assert sensor.frozen == (len(silent) >= 3) and len(silent) in (0, 3, 4), (now, silent)
    assert sensor.frozen and set(cut_s) == set(silent)


@pytest.mark.parametrize(("hosts", "cut"), [(4, [0, 1, 2]), (2, [0, 1]), (8, [0, 2, 4, 6, 1]), (3, [2, 0])], ids=str)
@pytest.mark.parametrize("moment", [0.0, 1.3, 3.1])
def test_hosts_that_find_a_mended_network_one_after_the_other_are_all_waited_for(
    hosts: int, cut: list[int], moment: float
) -> None:
    """A monitor waits for two periods at most between two attempts to connect."""
    job = Cluster(hosts)
    job.pass_time(20 + moment)
    job.cut = {f"host-{number}" for number in cut}
    job.pass_time(60)
    assert job.workload.state is WorkloadState.FROZEN
    for number in cut:
        job.cut.discard(f"host-{number}")
        job.pass_time(2 * SETTINGS.period_s / (len(cut) - 1))
    job.pass_time(SETTINGS.period_s + 0.1)  # the last one was about to report
    assert job.workload.state is WorkloadState.RUNNING, "nobody is silent any more"
    job.pass_time(60)
    assert job.workload.generation == 1 and len(job.controller.plans) == 1, "no plan but that of the start"


def test_a_host_that_does_not_find_a_mended_network_is_lost_a_timeout_and_a_period_after_the_others_have() -> None:
    job = Cluster(4)
    job.cut = {"host-0", "host-1", "host-2"}
    job.pass_time(60)
    job.cut = {"host-2"}
    job.pass_time(SETTINGS.timeout_s + SETTINGS.period_s)
    assert job.workload.state is WorkloadState.FROZEN
    job.pass_time(SETTINGS.period_s)
    assert job.workload.state is not WorkloadState.FROZEN and "host-2" not in job.workload.places


def test_while_the_supervisor_itself_is_away_no_host_could_have_been_heard_again() -> None:
    """It is stopped in the moment in which the first hosts are back."""
    sensor = Sensor(SETTINGS, 0.0)
    names = [f"host-{number}" for number in range(4)]
    for name in names:
        sensor.heard(name, "1", 0.0)
        sensor.checked(name, "", 0.0)
    for now in range(1, 31):
        sensor.heard(names[3], "1", now)
        sensor.look(now)
    assert sensor.frozen
    sensor.heard(names[0], "1", 30)
    sensor.look(30)
    sensor.look(100)  # before it reads what came meanwhile
    assert sensor.frozen
    for name in names:
        sensor.heard(name, "1", 100)
    sensor.look(100 + SETTINGS.thaw_s)
    assert not sensor.frozen and sensor.ready == {*names}


@pytest.mark.parametrize("dead", [["host-0"], ["host-3"], ["host-1", "host-2"]], ids=str)
def test_hosts_that_die_are_silent_a_timeout_and_a_period_later_at_most(dead: list[str]) -> None:
    job = Cluster(6)
    job.cut = set(dead)
    job.pass_time(SETTINGS.timeout_s + SETTINGS.period_s)
    assert {name for name in job.names if job.sensor.state_of(name) is HostState.SILENT} == set(dead)
    assert not job.sensor.frozen


def test_a_spare_that_died_long_ago_does_not_freeze_the_job_when_a_host_dies() -> None:
    job = Cluster(3, spares=1)
    (spare,) = {*job.names} - {*job.workload.places}
    job.cut = {spare}
    job.pass_time(120)
    dead = job.workload.places[0]
    job.cut = {spare, dead}
    job.pass_time(30)
    assert not job.sensor.frozen and dead not in job.workload.places
    job.pass_time(15)
    assert job.workload.state is WorkloadState.RUNNING


def test_hosts_that_died_before_the_supervisor_was_restarted_do_not_freeze_it() -> None:
    job = Cluster(6, spares=4)
    job.cut = {*job.names} - {*job.workload.places}
    job.pass_time(300)
    sensor = Sensor(SETTINGS, job.now)
    sensor.restore(job.sensor.hosts(), job.now, given_up=job.cut)
    for second in range(60):
        now = job.now + second
        for name in job.workload.places:
            sensor.heard(name, "1", now)
        sensor.look(now)
        assert not sensor.frozen
    assert all(sensor.state_of(name) is HostState.SILENT for name in job.cut)
    sensor.heard(min(job.cut), "2", now)
    assert sensor.state_of(min(job.cut)) is HostState.QUARANTINED


def test_a_quarantine_is_not_made_shorter_by_silence_or_by_a_restart_of_the_supervisor() -> None:
    sensor = Sensor(SETTINGS, 0.0)
    now = 5000.0
    sensor.look(now)
    sensor.heard("a", "1", now)
    sensor.heard("b", "1", now)
    for _ in range(3):  # the third time it is 120 s
        sensor.quarantine("a", "its disk is full", now)
    free_at_s = now + 4 * SETTINGS.quarantine_s
    while now < 5030:
        now += 1
        sensor.heard("b", "1", now)
        sensor.look(now)
    assert sensor.state_of("a") is HostState.SILENT
    sensor.heard("a", "1", now)
    assert sensor.state_of("a") is HostState.QUARANTINED and sensor.to_check(free_at_s - 1) == ["b"]
    assert sensor.host("a").reason == "its disk is full"
    another = Sensor(SETTINGS, now)
    another.restore(sensor.hosts(), now)
    assert another.to_check(free_at_s - 1) == ["b"] and set(another.to_check(free_at_s + 1)) == {"a", "b"}
    of_a_new_boot = Sensor(SETTINGS, 0.0)
    of_a_new_boot.restore(sensor.hosts(), 0.0)
    assert "a" in of_a_new_boot.to_check(8 * SETTINGS.quarantine_s)


def test_a_host_that_is_cordoned_again_before_it_was_heard_of_is_lost_again() -> None:
    sensor = Sensor(SETTINGS, 0.0)
    now = 0.0

    def pass_time(seconds: int) -> list[str]:
        nonlocal now
        seen = []
        for _ in range(seconds):
            now += 1
            sensor.heard("b", "1", now)
            seen += [str(one.kind) for one in sensor.look(now)]
        return seen

    sensor.heard("a", "1", now)
    sensor.cordon("a", "repairs", now)
    assert pass_time(20) == ["host_lost"]
    sensor.uncordon("a", now)
    assert pass_time(2) == ["host_silent"]
    sensor.cordon("a", "repairs", now)
    assert pass_time(2) == ["host_lost"]


def test_a_host_whose_monitor_was_told_to_end_is_checked_at_once_when_another_one_comes() -> None:
    """As after an update of the package. The supervisor may have been started anew as well."""
    sensor = Sensor(SETTINGS, 0.0)
    now = 100.0
    for kind in ("told to end", "broken"):
        for name in ("a", "b"):
            sensor.heard(name, f"{kind} 1", now)
            sensor.checked(name, "", now)
        if kind == "broken":
            sensor.quarantine("a", "its disk is full", now)
        else:
            sensor.left("a", now)
            assert sensor.state_of("a") is HostState.QUARANTINED
        another = Sensor(SETTINGS, now)
        another.restore(sensor.hosts(), now)
        another.heard("a", f"{kind} 2", now)
        assert ("a" in another.to_check(now)) == (kind == "told to end")
        sensor.heard("a", f"{kind} 2", now)
        sensor.checked("a", "", now)


def test_a_silent_host_is_one_also_when_it_is_cordoned() -> None:
    job = Cluster(4, spares=2)
    job.cut = {"host-2", "host-3"}
    job.sensor.cordon("host-2", "its node was taken out", job.now)
    job.pass_time(40)
    assert sorted(job.sensor.silent_for(20.0, job.now)) == ["host-2", "host-3"]
    job.cut = set()
    job.pass_time(10)
    assert job.sensor.silent_for(20.0, job.now) == [] and job.sensor.cordoned == {"host-2"}
