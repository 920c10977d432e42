"""The supervisor's decisions, on simulated hosts and a clock of the test's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from resiliency.runtime.messages.launcher import REPORT_S
from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.runtime.typed_json import from_jsonable, to_jsonable
from resiliency.supervisor.controller import Controller, ControllerSettings
from resiliency.supervisor.model import HostState, Outcome, Plan, Remedy, RemedyKind, WorkloadSpec, WorkloadState
from resiliency.supervisor.plans import save_step
from resiliency.supervisor.policy import Situation
from resiliency.supervisor.sensor import Sensor, SensorSettings

from .simulated import PERIOD_S, TIMEOUT_S, Simulation

RUNNING = WorkloadState.RUNNING


def job(**settings) -> WorkloadSpec:
    values = {"name": "job", "replicas": 3, "dwell_s": 4.0, "start_timeout_s": 20.0, **settings}
    return WorkloadSpec(**values)


def started(hosts: int = 3, **settings) -> Simulation:
    made = Simulation(job(**settings), hosts)
    made.until(lambda: made.workload.state is RUNNING)
    return made


def remedies(simulation: Simulation) -> list[RemedyKind]:
    """All but the first start."""
    return [plan.remedy.kind for plan in sorted(simulation.controller.plans.values(), key=lambda plan: plan.number)][1:]


def seen(simulation: Simulation, host: str, kind: ObservationKind, **fields) -> None:
    simulation.controller.observe(Observation(kind=kind, host=host, **fields), simulation.now, simulation.now)


def test_a_job_starts_on_all_its_hosts_and_is_done_when_all_have_finished() -> None:
    job = started()
    assert job.workload.places == ("host-0", "host-1", "host-2") and job.workload.generation == 1
    job.finishes_at = job.step
    job.until(lambda: job.workload.state is WorkloadState.COMPLETED)
    job.pass_time(1)
    assert job.running_on() == set() and remedies(job) == []


def test_a_job_starts_smaller_when_the_other_hosts_do_not_come() -> None:
    job = started(2)
    assert job.workload.places == ("host-0", "host-1")


def test_a_job_does_not_start_smaller_because_one_host_was_faster_than_another() -> None:
    made = Simulation(job(dwell_s=4.0), 3)
    for host in made.hosts.values():
        host.up = False
    made.pass_time(10)
    for name in made.hosts:
        made.revive(name)
        made.pass_time(3)
    made.until(lambda: made.workload.state is RUNNING)
    assert len(made.workload.places) == 3 and made.workload.generation == 1


def reports(job: Simulation, host: str, step: int) -> None:
    job.controller.reported(host, "job", job.workload.generation, job.now, step=step)
    job.controller.look(job.now, job.now)


def placed(hosts: int = 3, **settings) -> Simulation:
    """Ranks have their places, and none has made a step."""
    made = Simulation(job(**settings), hosts)
    for host in made.hosts.values():
        host.trains = False
    made.until(
        lambda: any(plan.step and plan.step.kind is StepKind.PROGRESS for plan in made.controller.active_plans())
    )
    return made


def test_a_job_has_started_when_ranks_of_every_host_have_made_a_step() -> None:
    job = placed()
    for host in ("host-0", "host-1", "host-0"):
        reports(job, host, 40)
        assert job.workload.state is WorkloadState.STARTING
    reports(job, "host-2", 40)
    assert job.workload.state is RUNNING


def test_a_job_of_which_one_host_alone_tells_of_steps_has_started_when_it_goes_on() -> None:
    job = placed()
    for step in (40, 41, 42):
        reports(job, "host-1", step)
        assert job.workload.state is WorkloadState.STARTING
    reports(job, "host-1", 43)
    assert job.workload.state is RUNNING


def test_a_job_of_long_steps_has_started_by_the_end_of_the_time_for_it() -> None:
    job = placed(start_timeout_s=20.0)
    reports(job, "host-1", 40)
    job.pass_time(25)
    assert job.workload.state is RUNNING and remedies(job) == []


def test_a_host_that_does_not_come_to_its_first_step_is_not_taken_for_started() -> None:
    job = placed(start_timeout_s=20.0)
    reports(job, "host-1", 40)
    job.lose_worker("host-2")
    job.until(lambda: len(job.controller.plans) == 2)
    assert [plan.outcome for plan in job.controller.plans.values()][0] is Outcome.FAILED


def test_a_lost_rank_is_replaced_in_the_job() -> None:
    job = started()
    job.lose_worker("host-1")
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    assert remedies(job) == [RemedyKind.RESTART_IN_JOB] and job.workload.places == ("host-0", "host-1", "host-2")
    assert not job.workload.fresh and all(not one.is_open for one in job.controller.incidents.values())


def test_ranks_lost_at_once_are_one_incident() -> None:
    job = started()
    for host in job.workload.places:
        job.lose_worker(host)
    job.until(lambda: job.workload.state is RUNNING and job.workload.generation > 1)
    assert len(remedies(job)) == 1
    assert len(job.controller.incidents[max(job.controller.incidents)].observations) == 3


def test_a_crash_loop_climbs_the_ladder_and_ends() -> None:
    job = started(max_in_job_restarts=1, max_workload_restarts=1)
    for _ in range(3):
        job.lose_worker("host-1")
        job.until(lambda: job.workload.state in (RUNNING, WorkloadState.STOPPED) and job.workload.plan is None)
        job.pass_time(1)
    assert remedies(job)[:3] == [RemedyKind.RESTART_IN_JOB, RemedyKind.RESTART_WORKLOAD, RemedyKind.SCALE_DOWN]
    assert job.workload.places == ("host-0", "host-2")


def fails_in_each_generation(job: Simulation, codes: dict[str, int], *, most: int = 30) -> None:
    """Ranks of these hosts end before their first step, whatever is done, until the job is stopped."""
    for host in job.hosts.values():
        host.trains = False
    for _ in range(most):
        generation = job.workload.generation
        job.until(lambda: job.workload.state is WorkloadState.STOPPED or job.is_at(StepKind.PROGRESS))
        for host in set(codes) & set(job.workload.places):
            job.lose_worker(host, codes[host], f"exit status {codes[host]}: ModuleNotFoundError: No module named 'x'")
        job.until(lambda before=generation: job.workload.generation > before or job.workload.state.has_ended)
        if job.workload.state.has_ended:
            return


def test_a_script_that_fails_alike_on_all_hosts_is_stopped_after_its_restarts_and_no_host_is_swapped() -> None:
    made = Simulation(job(max_in_job_restarts=1, max_workload_restarts=2), 5)
    fails_in_each_generation(made, dict.fromkeys(made.hosts, 1))
    assert remedies(made) == [RemedyKind.RESTART_IN_JOB, *[RemedyKind.RESTART_WORKLOAD] * 2]
    assert set(made.states().values()) == {HostState.READY}
    assert "it is the script" in made.workload.reason
    assert "exit status 1: ModuleNotFoundError: No module named 'x'" in made.workload.reason


def test_hosts_that_fail_in_different_ways_are_swapped() -> None:
    made = Simulation(job(max_in_job_restarts=1, max_workload_restarts=1), 5)
    fails_in_each_generation(made, {f"host-{number}": number for number in range(1, 5)})
    assert RemedyKind.HOT_SWAP in remedies(made)


def test_a_script_that_has_made_a_step_is_not_taken_for_one_that_fails_at_its_begin() -> None:
    made = started(5, max_in_job_restarts=1, max_workload_restarts=1)
    made.lose_worker("host-0")
    fails_in_each_generation(made, dict.fromkeys(made.hosts, 1))
    assert RemedyKind.HOT_SWAP in remedies(made)


def fails_at_step(made: Simulation, steps: list[int], codes: dict[str, int], *, pause_s: float = 0.0) -> None:
    """All ranks reach the step, are restarted from an earlier one, and reach the next, until the job is stopped."""
    for step in steps:
        made.until(lambda: made.is_at(StepKind.PROGRESS))
        for done in (3, step):
            for host in made.workload.places:
                reports(made, host, done)
        made.until(lambda: made.workload.state is RUNNING)
        made.pass_time(pause_s)
        for host in set(codes) & set(made.workload.places):
            made.lose_worker(host, codes[host], f"exit status {codes[host]}: ZeroDivisionError: division by zero")
        generation = made.workload.generation
        made.until(lambda before=generation: made.workload.generation > before or made.workload.state.has_ended)
        if made.workload.state.has_ended:
            return


def test_a_script_that_fails_alike_at_one_step_is_stopped_after_its_restarts_and_no_host_is_swapped() -> None:
    made = placed(5, max_in_job_restarts=1, max_workload_restarts=2)
    fails_at_step(made, [9, 10, 9, 10, 10, 10, 10], dict.fromkeys(made.hosts, 1))
    assert remedies(made) == [RemedyKind.RESTART_IN_JOB, *[RemedyKind.RESTART_WORKLOAD] * 2]
    assert "none gets past step 10: it is the script" in made.workload.reason
    assert "ZeroDivisionError" in made.workload.reason and set(made.states().values()) == {HostState.READY}


def test_a_script_that_fails_alike_and_gets_further_each_time_is_not_stopped() -> None:
    made = placed(5, max_in_job_restarts=1, max_workload_restarts=2)
    fails_at_step(made, [10, 20, 30, 40, 50], dict.fromkeys(made.hosts, 1))
    assert made.workload.state is not WorkloadState.STOPPED


def test_a_script_that_fails_alike_at_one_step_after_long_training_is_stopped_too() -> None:
    made = placed(5, max_in_job_restarts=1, max_workload_restarts=1, healthy_s=20.0)
    fails_at_step(made, [10] * 6, dict.fromkeys(made.hosts, 1), pause_s=30.0)
    assert remedies(made) == [RemedyKind.RESTART_IN_JOB] * 2
    assert "none gets past step 10" in made.workload.reason


def test_hosts_that_fail_in_different_ways_at_one_step_are_swapped() -> None:
    made = placed(5, max_in_job_restarts=1, max_workload_restarts=1)
    fails_at_step(made, [10] * 5, {f"host-{number}": number + 1 for number in range(5)})
    assert RemedyKind.HOT_SWAP in remedies(made)


def test_a_job_on_one_host_is_tried_on_another_before_its_script_is_found_guilty() -> None:
    made = Simulation(job(replicas=1, max_in_job_restarts=1, max_workload_restarts=1), 4)
    fails_in_each_generation(made, dict.fromkeys(made.hosts, 1))
    assert remedies(made).count(RemedyKind.HOT_SWAP) == 1 and "it is the script" in made.workload.reason


def test_ranks_that_ended_with_status_0_before_the_others_are_named() -> None:
    made = started(ranks_per_host=2)
    made.controller.reported("host-1", "job", made.workload.generation, made.now, step=made.step, ended=True)
    seen(
        made,
        "host-0",
        ObservationKind.NO_PROGRESS,
        workload="job",
        generation=made.workload.generation,
        detail="no peer",
    )
    made.pass_time(1)
    (incident,) = made.controller.incidents.values()
    assert [one.detail for one in incident.observations] == [
        "no peer; ranks 2, 3 ended with status 0 before the others"
    ]


def test_no_workload_restarts_swaps_at_once() -> None:
    job = started(4, max_in_job_restarts=0, max_workload_restarts=0)
    job.lose_worker("host-1")
    job.until(lambda: "host-3" in job.workload.places and job.workload.state is RUNNING)
    assert remedies(job) == [RemedyKind.HOT_SWAP]


def test_training_for_long_forgives_what_was_before() -> None:
    job = started(max_in_job_restarts=1, healthy_s=10.0)
    for _ in range(3):
        job.lose_worker("host-0")
        job.until(lambda: job.workload.plan is not None)
        job.until(lambda: job.workload.state is RUNNING)
        job.pass_time(11)
    assert remedies(job) == [RemedyKind.RESTART_IN_JOB] * 3


def test_a_dead_host_is_swapped_for_a_spare_within_its_timeout() -> None:
    job = started(4)
    job.kill("host-1")
    killed = job.now
    job.until(lambda: job.workload.state is RUNNING and job.workload.generation == 2)
    assert job.now - killed < TIMEOUT_S + 2
    assert job.workload.places == ("host-0", "host-3", "host-2") and remedies(job) == [RemedyKind.HOT_SWAP]


def test_a_spare_that_is_dead_is_not_used() -> None:
    job = started(5)
    job.kill("host-1")
    job.kill("host-3")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.workload.places == ("host-0", "host-4", "host-2")


def test_a_spare_that_fails_its_check_is_quarantined_and_another_one_taken() -> None:
    job = started(5)
    job.hosts["host-3"].healthy = False
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.workload.places == ("host-0", "host-4", "host-2")
    assert job.sensor.state_of("host-3") is HostState.QUARANTINED
    assert remedies(job) == [RemedyKind.HOT_SWAP] * 2
    outcomes = [plan.outcome for plan in job.controller.plans.values()]
    assert outcomes == [Outcome.DONE, Outcome.OVERTAKEN, Outcome.DONE]


def test_a_spare_that_does_not_take_its_place_is_replaced() -> None:
    job = started(5, stop_timeout_s=1.0)
    job.hosts["host-3"].obeys = False
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.workload.places == ("host-0", "host-4", "host-2")


def test_without_a_spare_the_job_goes_on_smaller_and_grows_again() -> None:
    job = started()
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and job.workload.generation == 2)
    assert job.workload.places == ("host-0", "host-2") and remedies(job) == [RemedyKind.SCALE_DOWN]
    place = job.controller.place_of("host-2")
    assert place is not None and (place.replicas, place.replicas_before, place.node_rank) == (2, 3, 1)
    job.revive("host-1")
    job.until(lambda: job.workload.plan is not None)
    assert job.now - job.sensor.host("host-1").since_s >= job.spec.dwell_s, "a host that may go again at once"
    job.until(lambda: job.workload.state is RUNNING and len(job.workload.places) == 3)
    assert remedies(job) == [RemedyKind.SCALE_DOWN, RemedyKind.SCALE_UP]


def test_only_whole_replicas_train() -> None:
    job = started(6, replicas=3, hosts_per_replica=2)
    job.kill("host-2")
    job.until(lambda: job.workload.state is RUNNING and job.workload.generation == 2)
    assert job.workload.places == ("host-0", "host-1", "host-4", "host-5")


def test_two_broken_replicas_make_a_whole_one() -> None:
    job = started(6, replicas=3, hosts_per_replica=2)
    job.kill("host-2")
    job.kill("host-5")
    job.until(lambda: job.workload.state is RUNNING and len(job.workload.places) == 4)
    assert job.workload.places == ("host-0", "host-1", "host-3", "host-4")


def test_below_the_minimum_it_waits_and_starts_again_when_hosts_return() -> None:
    job = started(min_replicas=3)
    job.kill("host-1")
    job.until(lambda: job.workload.state is WorkloadState.WAITING)
    job.pass_time(2)
    assert job.running_on() == set()
    job.revive("host-1")
    job.until(lambda: job.workload.state is RUNNING)
    assert len(job.workload.places) == 3


def test_it_does_not_wait_for_ever() -> None:
    job = started(min_replicas=3, wait_timeout_s=10.0)
    job.kill("host-1")
    job.until(lambda: job.workload.state is WorkloadState.STOPPED)
    assert "2 of 3 hosts" in job.workload.reason


def test_most_hosts_silent_at_once_freezes_and_hurts_nobody() -> None:
    """The network of the supervisor is gone, and training goes on."""
    job = started(4, replicas=4)
    for name in ("host-0", "host-1", "host-2"):
        job.hosts[name].heard = False
    job.until(lambda: job.workload.state is WorkloadState.FROZEN)
    job.pass_time(60)
    assert job.workload.generation == 1 and len(job.running_on()) == 4
    for host in job.hosts.values():
        host.heard = True
    job.until(lambda: job.workload.state is RUNNING)
    job.pass_time(20)
    assert job.workload.generation == 1 and remedies(job) == []


def test_most_hosts_dead_at_once_is_seen_to_when_others_come() -> None:
    job = started(4, replicas=4)
    for name in ("host-0", "host-1", "host-2"):
        job.kill(name)
    job.until(lambda: job.workload.state is WorkloadState.FROZEN)
    for name in ("host-0", "host-1"):
        job.revive(name)
    back = job.now
    job.until(lambda: not job.sensor.frozen)
    assert job.now - back >= job.sensor_settings.thaw_s, "others may be about to return"
    job.until(lambda: job.workload.state is RUNNING and job.workload.generation > 1)
    assert "host-2" not in job.workload.places


def test_hosts_lost_one_after_the_other_over_days_do_not_freeze_it() -> None:
    job = started(5, replicas=5)
    for lost in range(4):
        job.kill(f"host-{lost}")
        job.until(lambda lost=lost: job.workload.state is RUNNING and len(job.workload.places) == 4 - lost)
    assert job.workload.places == ("host-4",)


def test_spares_lost_long_before_do_not_freeze_it() -> None:
    """Nobody replaces a spare that is gone, so that it stays silent: it was not lost at once with a host."""
    job = started(4, replicas=2)
    for spare in ("host-2", "host-3"):
        job.kill(spare)
        job.pass_time(30)
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and job.workload.places == ("host-0",))
    assert not job.sensor.frozen


def test_a_host_that_is_not_heard_while_training_goes_on_is_left_alone() -> None:
    job = started(4)
    job.hosts["host-1"].heard = False
    job.pass_time(60)
    assert job.sensor.state_of("host-1") is HostState.SILENT
    assert job.workload.generation == 1 and job.running_on() == {"host-0", "host-1", "host-2"}
    job.hosts["host-1"].heard = True
    job.pass_time(3)
    assert job.sensor.state_of("host-1") is HostState.READY and remedies(job) == []


@pytest.mark.parametrize("phase_s", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_a_host_that_is_not_heard_is_left_alone_also_when_reports_of_steps_come_late(
    phase_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor may pass on the same report of its launcher twice, and the next one comes a period later."""
    job, reported = started(4), Controller.reported
    told: dict[str, tuple[float, int]] = {}
    late_s = 0.0

    def rarely(controller: Controller, host: str, *args: Any, step: int = -1, **fields: Any) -> None:
        at_s, known = told.get(host, (-1e9, -1))
        if job.now - phase_s - at_s >= 2 * PERIOD_S + late_s:
            told[host] = at_s, known = job.now - phase_s, step
        reported(controller, host, *args, step=known, **fields)

    monkeypatch.setattr(Controller, "reported", rarely)
    job.pass_time(10 + phase_s)
    job.hosts["host-1"].heard = False
    job.pass_time(TIMEOUT_S + 2 * PERIOD_S)
    late_s = REPORT_S
    job.pass_time(30)
    assert job.sensor.state_of("host-1") is HostState.SILENT
    assert remedies(job) == [] and job.running_on() == {"host-0", "host-1", "host-2"}


@pytest.mark.parametrize("after_s", [0.0, 0.25, 0.5, 0.75])
def test_a_last_step_that_is_told_late_holds_no_remedy_up(after_s: float) -> None:
    """A host dies just before its next report, and others tell of the step before that a period and a look later."""
    job = started(4)
    since_s = job.now
    job.kill("host-1")
    generation = job.workload.generation
    reported_s = since_s + PERIOD_S + after_s + PERIOD_S
    while job.now < reported_s:
        job.pass_time(0.25)
    job.controller.reported("host-0", "job", generation, job.now, step=job.step + 1, age_s=job.now - since_s - PERIOD_S)
    job.until(lambda: bool(remedies(job)))
    assert job.now - since_s <= TIMEOUT_S + PERIOD_S


def test_hosts_that_report_a_step_apart_within_milliseconds_do_not_put_the_save_off() -> None:
    """Two steps a second; one host reports just behind the other, and its ranks have come a step further."""
    job = started(3, replicas=2)
    generation, begun = job.workload.generation, job.step
    for second in range(1, 20):
        for further, host in enumerate(job.workload.places):
            at_s, step = job.now + second + further / 100, begun + 2 * second + further
            job.controller.reported(host, "job", generation, at_s, step=step)
    rate = job.controller._seen_of(job.workload).steps_per_s
    assert 1 < rate < 4, f"{rate} steps a second"


def test_a_host_that_is_heard_again_in_time_is_not_said_to_be_in_quarantine(caplog) -> None:
    job = started(4)
    job.hosts["host-1"].heard = False
    job.until(lambda: job.sensor.state_of("host-1") is HostState.SILENT)
    with caplog.at_level("INFO"):
        job.hosts["host-1"].heard = True
        job.pass_time(3)
    assert "host host-1 is ready (was silent)" in caplog.text and "quarantine" not in caplog.text
    assert job.sensor.host("host-1").falls == 1


def test_a_host_that_comes_back_after_it_was_replaced_ends_its_ranks() -> None:
    job = started(4)
    job.hosts["host-1"].heard = job.hosts["host-1"].trains = False  # cut off from everybody; its ranks still run
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    assert job.hosts["host-1"].place is not None
    job.hosts["host-1"].heard = True
    job.pass_time(1)
    assert job.hosts["host-1"].place is None and job.sensor.state_of("host-1") is HostState.QUARANTINED
    assert len(job.workload.places) == 3


def test_a_host_that_flaps_is_kept_out_longer_each_time() -> None:
    job = started(4)
    waits = []
    for _ in range(3):
        job.kill("host-3")
        job.until(lambda: job.sensor.state_of("host-3") is HostState.SILENT)
        job.revive("host-3")
        job.until(lambda: job.sensor.state_of("host-3") is HostState.READY)
        waits.append(job.sensor.host("host-3").falls)
    assert waits == [1, 2, 3] and remedies(job) == []


def test_a_report_of_a_generation_that_is_over_changes_nothing() -> None:
    job = started()
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    before = job.controller.refused["generation"]
    seen(job, "host-1", ObservationKind.WORKER_LOST, workload="job", generation=1, rank=1)
    job.controller.reported("host-1", "job", 1, job.now, step=10**6)
    job.pass_time(5)
    assert job.workload.generation == 2 and job.controller.refused["generation"] == before + 2


@pytest.mark.parametrize("host", ["ghost", "host-3"], ids=["unknown", "a spare"])
def test_a_forged_event_changes_nothing(host: str) -> None:
    job = started(4)
    seen(job, host, ObservationKind.WORKER_LOST, workload="job", generation=1, rank=0)
    job.pass_time(5)
    assert job.workload.generation == 1 and job.workload.incident is None


def test_a_device_fault_goes_by_its_class() -> None:
    expected = {
        DeviceClass.IGNORE: [],
        DeviceClass.SOFT: [RemedyKind.RESTART_IN_JOB],
        DeviceClass.RESET: [RemedyKind.RESET_DEVICES],
        DeviceClass.SWAP: [RemedyKind.HOT_SWAP],
    }
    for kind, wanted in expected.items():
        job = started(4)
        seen(job, "host-2", ObservationKind.DEVICE_FAULT, device="0", device_class=kind)
        job.pass_time(10)
        assert remedies(job) == wanted, kind
        assert job.workload.state is RUNNING and job.workload.incident is None


def test_a_drained_host_is_emptied_after_a_checkpoint_when_there_is_a_spare() -> None:
    job = started(3)
    job.sensor.cordon("host-1", "maintenance", job.now)
    seen(job, "host-1", ObservationKind.DRAIN)
    job.pass_time(10)
    assert job.workload.generation == 1 and job.sensor.state_of("host-1") is HostState.CORDONED
    from .simulated import SimulatedHost

    job.hosts["host-9"] = SimulatedHost("host-9")
    job.until(lambda: job.workload.state is RUNNING and "host-9" in job.workload.places)
    assert "host-1" not in job.workload.places
    plan = job.controller.plans[max(job.controller.plans)]
    assert StepKind.CHECKPOINT in {step.kind for step in plan.steps} and plan.save_step > 0


def test_ranks_are_told_to_save_after_a_step_that_none_of_them_has_done() -> None:
    """A step of 10 ms, known from a report of 4 s ago: 400 steps have been made since."""
    assert save_step(1000, age_s=4.0, steps_per_s=100.0) > 1400
    assert save_step(1000, age_s=4.0, steps_per_s=0.0) > 1000


def test_a_plan_with_a_checkpoint_names_the_step_once_and_after_what_was_seen() -> None:
    job = started()
    job.pass_time(10)
    step_s = 0.25
    from .simulated import SimulatedHost

    job.sensor.cordon("host-1", "maintenance", job.now)
    job.hosts["host-9"] = SimulatedHost("host-9")
    carry_out, job._carry_out = job._carry_out, lambda: None
    job.until(lambda: job.workload.plan is not None)
    number = job.workload.plan
    job.controller.step_ended(number, 0, job.now, job.now)  # the check
    plan, step = job.controller.plans[number], job.step
    assert plan.step is not None and plan.step.kind is StepKind.CHECKPOINT
    assert step + 1.0 / step_s <= plan.save_step <= step + 4 / step_s
    job.pass_time(2)
    assert job.controller.plans[number].save_step == plan.save_step
    job._carry_out = carry_out
    job.until(lambda: "host-9" in job.workload.places)


def test_a_host_that_is_lost_during_a_remedy_is_part_of_the_same_incident() -> None:
    job = started(5)
    job.kill("host-1")
    job.until(lambda: job.workload.plan is not None)
    new = [host for host in job.controller.plans[job.workload.plan].places if host not in ("host-0", "host-2")]
    job.kill(new[0])
    job.until(
        lambda: job.workload.state is RUNNING and job.workload.plan is None and job.workload.incident is None,
        within_s=TIMEOUT_S + 5,
    )
    assert set(job.workload.places) == {"host-0", "host-2", "host-4"}
    assert len(job.controller.incidents) == 1


def test_a_rank_lost_right_after_a_remedy_is_a_remedy_that_failed() -> None:
    job = started(max_in_job_restarts=5)
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 2)
    for host in job.hosts.values():
        host.trains = False
    job.pass_time(1)
    job.lose_worker("host-0")
    for host in job.hosts.values():
        host.trains = True
    job.until(lambda: job.workload.state is RUNNING)
    assert remedies(job) == [RemedyKind.RESTART_IN_JOB, RemedyKind.RESTART_WORKLOAD] and job.workload.fresh


def test_a_rank_that_dies_before_the_first_step_of_all_is_replaced_as_any_other() -> None:
    made = Simulation(job(), 3)
    for host in made.hosts.values():
        host.trains = False
    made.until(lambda: made.workload.generation == 1)
    made.pass_time(1)
    made.lose_worker("host-1")
    for host in made.hosts.values():
        host.trains = True
    made.until(lambda: made.workload.state is RUNNING)
    assert remedies(made) == [RemedyKind.RESTART_IN_JOB]


def test_a_start_that_makes_no_step_is_given_up() -> None:
    job = started(max_in_job_restarts=1, max_workload_restarts=1, start_timeout_s=5.0)
    for host in job.hosts.values():
        host.trains = False
    job.lose_worker("host-0")
    job.until(lambda: job.workload.state is WorkloadState.STOPPED, within_s=200)
    assert remedies(job)[:2] == [RemedyKind.RESTART_IN_JOB, RemedyKind.RESTART_WORKLOAD]


@pytest.mark.parametrize("when", [lambda plan: plan.at == 0, lambda plan: plan.at == 1, lambda plan: plan.at >= 2])
def test_a_supervisor_that_is_killed_goes_on_where_it_was(when: Callable) -> None:
    job = started(4)
    job.kill("host-1")
    job.until(lambda: job.workload.plan is not None)
    while job.workload.plan is not None and not when(job.controller.plans[job.workload.plan]):
        job.pass_time(0.25)
    generation = job.workload.generation
    job.kill_supervisor()
    job.until(lambda: job.workload.state is RUNNING)
    assert job.workload.generation == 2 >= generation and remedies(job) == [RemedyKind.HOT_SWAP]
    assert job.workload.places == ("host-0", "host-3", "host-2")


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_supervisor_that_was_away_does_not_blame_the_hosts(hosts: int) -> None:
    job = started(hosts, replicas=hosts)
    job.now += 3600
    job.controller.look(job.now, job.now)
    assert set(job.states().values()) == {HostState.READY} and job.workload.incident is None
    job.store()
    job.pass_time(10)
    assert job.workload.generation == 1 and set(job.states().values()) == {HostState.READY}


class Stubborn:
    """Restarts on hosts that are gone."""

    def event_policy(self, situation: Situation) -> Remedy:
        return Remedy(kind=RemedyKind.RESTART_WORKLOAD)


class Broken:
    def event_policy(self, situation: Situation) -> Remedy:
        raise KeyError("no idea")


class Silent:
    def event_policy(self, situation: Situation) -> Remedy:
        return None  # type: ignore[return-value]


class Shrinks:
    """Below the minimum."""

    def event_policy(self, situation: Situation) -> Remedy:
        return Remedy(kind=RemedyKind.SCALE_DOWN, out=situation.workload.places)


@pytest.mark.parametrize("policy", [Stubborn, Broken, Silent, Shrinks])
def test_a_policy_that_answers_nonsense_is_overruled(policy: type) -> None:
    job = Simulation(job_of := WorkloadSpec(name="job", replicas=3, min_replicas=2, dwell_s=4.0), 4, policy=policy())
    job.until(lambda: job.workload.state is RUNNING)
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert len(job.workload.places) == job_of.hosts


def test_a_dry_run_says_what_it_would_do() -> None:
    made = started(4)
    made.controller._settings = ControllerSettings(dry_run=True)
    made.lose_worker("host-1")
    made.pass_time(5)
    assert made.workload.generation == 1
    assert "would restart_in_job" in made.controller.incidents[max(made.controller.incidents)].outcome


def test_a_host_that_was_taken_out_is_not_the_next_spare() -> None:
    """It is heard of and its checks pass, as those of a host whose device has fallen off the bus may."""
    job = started(5)
    seen(job, "host-1", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.SWAP)
    assert job.sensor.state_of("host-1") is HostState.QUARANTINED
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    job.kill("host-0")
    job.until(lambda: job.workload.state is RUNNING and "host-0" not in job.workload.places)
    assert job.workload.places == ("host-4", "host-3", "host-2")


def test_a_host_that_is_swapped_because_restarts_do_not_help_is_not_the_next_spare() -> None:
    job = started(4, max_in_job_restarts=0, max_workload_restarts=0)
    job.lose_worker("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-3" in job.workload.places)
    assert job.sensor.state_of("host-1") is HostState.QUARANTINED


def test_a_spare_that_breaks_before_it_is_needed_is_not_used() -> None:
    job = started(5)
    seen(job, "host-3", ObservationKind.HOST_UNHEALTHY, detail="its disk is full")
    assert job.workload.incident is None
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.workload.places == ("host-0", "host-4", "host-2")


def test_a_dry_run_says_it_once_and_starts_nothing() -> None:
    made = Simulation(job(), 4, settings=ControllerSettings(dry_run=True))
    made.pass_time(30)
    assert made.workload.generation == 0 and not made.controller.incidents
    assert "would start" in made.workload.reason


def test_a_drain_that_cannot_be_done_is_declined_once() -> None:
    made = Simulation(job(replicas=2, hosts_per_replica=2, min_replicas=2), 5)
    made.until(lambda: made.workload.state is RUNNING)
    for host in ("host-0", "host-1"):
        made.sensor.cordon(host, "repairs", made.now)
    made.pass_time(30)
    assert made.workload.generation == 1 and len(made.controller.incidents) == 1
    made.hosts["host-5"] = type(made.hosts["host-0"])("host-5")  # enough spares now
    made.until(lambda: set(made.workload.places) == {"host-2", "host-3", "host-4", "host-5"})


def test_a_broken_host_is_not_the_next_spare() -> None:
    job = started(4)
    seen(job, "host-1", ObservationKind.HOST_UNHEALTHY, detail="the disk is full")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.states()["host-1"] is HostState.QUARANTINED
    seen(job, "host-0", ObservationKind.HOST_UNHEALTHY, detail="the disk is full")
    job.until(lambda: job.workload.state is RUNNING and "host-0" not in job.workload.places)
    assert "host-1" not in job.workload.places and remedies(job)[-1] is RemedyKind.SCALE_DOWN


def test_a_spare_that_says_it_is_broken_is_not_used() -> None:
    job = started(5)
    seen(job, "host-3", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.SWAP)
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.workload.places == ("host-0", "host-4", "host-2")


def test_a_rank_that_hangs_is_named_to_its_host() -> None:
    job = started()
    seen(job, "host-2", ObservationKind.WORKER_HUNG, workload="job", generation=1, rank=2)
    job.until(lambda: job.workload.generation == 2)
    place = job.controller.place_of("host-2")
    assert place is not None and place.replace == (2,)
    job.until(lambda: job.workload.state is RUNNING)
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 3)
    assert job.workload.replace == ()


def test_hosts_that_fall_silent_one_after_the_other_within_the_window_are_one_remedy() -> None:
    job = started(6, replicas=4, correlate_s=1.0)
    job.kill("host-0")
    job.pass_time(0.5)
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and job.workload.generation > 1)
    assert remedies(job) == [RemedyKind.HOT_SWAP] and job.workload.places == ("host-4", "host-5", "host-2", "host-3")


def test_an_incident_that_no_plan_ends_is_given_up() -> None:
    job = started(max_in_job_restarts=0, max_workload_restarts=99, start_timeout_s=1.0)
    for host in job.hosts.values():
        host.trains = False
    job.lose_worker("host-0")
    job.until(lambda: job.workload.state is WorkloadState.STOPPED, within_s=200)
    assert "12 plans did not end incident" in job.workload.reason


def test_with_other_hosts_restarts_are_counted_anew() -> None:
    job = started(4, max_in_job_restarts=1)
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    job.kill("host-1")
    job.until(lambda: job.workload.generation == 3 and job.workload.state is RUNNING)
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 4 and job.workload.state is RUNNING)
    assert remedies(job) == [RemedyKind.RESTART_IN_JOB, RemedyKind.HOT_SWAP, RemedyKind.RESTART_IN_JOB]


def test_a_drain_waits_for_the_plan_that_is_being_carried_out() -> None:
    job = started(4)
    job.lose_worker("host-0")
    job.until(lambda: job.workload.plan is not None)
    plan = job.workload.plan
    job.sensor.cordon("host-2", "maintenance", job.now)
    seen(job, "host-2", ObservationKind.DRAIN)
    job.until(lambda: job.workload.state is RUNNING and "host-2" not in job.workload.places)
    assert plan is not None and job.controller.plans[plan].outcome is Outcome.DONE
    assert remedies(job) == [RemedyKind.RESTART_IN_JOB, RemedyKind.HOT_SWAP]


def test_a_deadline_runs_on_after_a_restart_of_the_machine_whose_clock_begins_anew() -> None:
    job = started(4, verify_timeout_s=5.0)
    job._carry_out = lambda: None  # nobody answers
    job.kill("host-1")
    job.until(lambda: job.workload.plan is not None)
    job.now = 0.0
    job.kill_supervisor()
    job.until(lambda: any(plan.outcome is Outcome.FAILED for plan in job.controller.plans.values()), within_s=30)


def test_two_workloads_do_not_take_the_same_spare() -> None:
    sensor = Sensor(SensorSettings(period_s=1.0, timeout_s=3.0), 0.0)
    controller = Controller(sensor, period_s=1.0)
    now = 0.0
    dead: set[str] = set()
    answers = True

    def pass_time(seconds: float) -> None:
        nonlocal now
        end = now + seconds
        while now < end:
            now += 0.25
            for host in hosts:
                if host not in dead:
                    sensor.heard(host, "x", now)
                    place = controller.place_of(host)
                    if place is not None and not dead & set(controller.workloads[place.workload].places):
                        controller.reported(host, place.workload, place.generation, now, step=int(now * 4))
            for host in sensor.to_check(now):
                sensor.checked(host, "", now)
            controller.look(now, now)
            for plan in controller.active_plans() if answers else ():
                controller.step_ended(plan.number, plan.at, now, now)

    hosts = [f"host-{number}" for number in range(6)]
    for name in ("a", "b"):
        controller.add(WorkloadSpec(name=name, replicas=2, min_replicas=2, dwell_s=1.0), now)
    pass_time(3)
    places = {name: workload.places for name, workload in controller.workloads.items()}
    assert len({*places["a"], *places["b"]}) == 4
    spares = set(hosts) - {*places["a"], *places["b"]}
    assert len(spares) == 2
    dead |= {places["a"][0], places["b"][0]}
    answers = False
    pass_time(8)
    taken = [plan.places for plan in controller.active_plans()]
    assert len(taken) == 2 and not set(taken[0]) & set(taken[1])


def test_a_cordoned_host_that_dies_is_replaced() -> None:
    job = started(3)
    job.sensor.cordon("host-1", "repairs", job.now)
    job.pass_time(5)
    assert "host-1" in job.workload.places  # there is no spare
    job.kill("host-1")
    job.until(lambda: "host-1" not in job.workload.places and job.workload.state is RUNNING)
    assert job.states()["host-1"] is HostState.CORDONED and remedies(job) == [RemedyKind.SCALE_DOWN]


def test_a_host_that_fails_its_check_at_the_first_start_leaves_the_job_waiting_for_hosts() -> None:
    made = Simulation(job(replicas=2, min_replicas=2), 2)
    carry_out, made._carry_out = made._carry_out, lambda: None
    made.until(lambda: made.workload.plan is not None)
    made.hosts["host-1"].healthy = False
    number = made.workload.plan
    made.controller.step_ended(number, 0, made.now, made.now, problem="a disk is full", hosts=["host-1"])
    made._carry_out = carry_out
    made.pass_time(2)
    assert made.workload.state is WorkloadState.WAITING, made.workload.reason
    made.hosts["host-1"].healthy = True
    made.until(lambda: made.workload.state is RUNNING)
    assert set(made.workload.places) == {"host-0", "host-1"}


@pytest.mark.parametrize("wanted", [{"replicas": 2}, {"replicas": 4, "min_replicas": 4}], ids=str)
def test_a_job_whose_size_was_changed_in_the_file_goes_on_after_a_fault(wanted: dict[str, int]) -> None:
    made = started(4)
    made.controller.add(made.spec.__class__(**{**vars(made.spec), **wanted}), made.now)
    made.check = lambda: None  # its places are those of the size before until then
    made.kill("host-1")
    made.until(lambda: "host-1" not in made.workload.places)
    made.revive("host-1")
    made.until(lambda: made.workload.state is RUNNING)
    assert len(made.workload.places) == wanted["replicas"]


def test_a_host_that_dies_after_its_device_was_reset_is_not_waited_for() -> None:
    job = started(4, start_timeout_s=600.0)
    for host in job.hosts.values():
        host.trains = False
    seen(job, "host-2", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.RESET)
    job.until(lambda: job.workload.generation == 2)
    job.kill("host-2")
    for host in job.hosts.values():
        host.trains = True
    job.until(lambda: job.workload.state is RUNNING and job.workload.plan is None, within_s=30)
    assert remedies(job) == [RemedyKind.RESET_DEVICES, RemedyKind.HOT_SWAP]


def test_ranks_that_lose_a_peer_before_the_first_step_are_started_again_at_once() -> None:
    """Nobody has died: the network has failed for a moment."""
    job = started(3, start_timeout_s=600.0)
    for host in job.hosts.values():
        host.trains = False
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 2)
    job.pass_time(1)
    seen(job, "host-1", ObservationKind.NO_PROGRESS, workload="job", generation=2)
    for host in job.hosts.values():
        host.trains = True
    job.until(lambda: job.workload.state is RUNNING and job.workload.plan is None, within_s=10)
    assert job.workload.generation == 3


@pytest.mark.parametrize("at", [StepKind.VERIFY, StepKind.CHECKPOINT])
def test_a_job_that_finishes_while_a_plan_is_prepared_is_not_begun_again(at: StepKind) -> None:
    job = started(4)
    job.pass_time(5)
    carry_out, job._carry_out = job._carry_out, lambda: None
    job.sensor.cordon("host-1", "maintenance", job.now)

    def step():
        return None if job.workload.plan is None else job.controller.plans[job.workload.plan].step

    job.until(lambda: step() is not None)
    if at is StepKind.CHECKPOINT:
        job.controller.step_ended(job.workload.plan, 0, job.now, job.now)
    assert step().kind is at
    job.finishes_at = job.step
    job.pass_time(1)
    job._carry_out = carry_out
    job.pass_time(10)
    assert job.workload.state is WorkloadState.COMPLETED and job.workload.generation == 1
    assert not any(incident.is_open for incident in job.controller.incidents.values())


def test_a_dry_run_ends_no_workload_that_waits_for_hosts() -> None:
    made = Simulation(job(wait_timeout_s=5.0), 0, settings=ControllerSettings(dry_run=True))
    made.pass_time(30)
    assert made.workload.state is WorkloadState.WAITING


def test_generations_go_on_above_those_that_hosts_have_had() -> None:
    """The state file was lost, or an older copy of it was put back."""
    made = Simulation(job(), 3)
    for host in made.hosts.values():
        host.obeys = False  # a monitor takes no place of a generation of the past
    made.until(lambda: made.workload.generation == 1)
    made.controller.heard_of_generation("host-0", "job", 7)
    made.controller.heard_of_generation("host-1", "job", 1 << 40)
    made.controller.heard_of_generation("stranger", "job", 9)
    for host in made.hosts.values():
        host.obeys = True
    made.until(lambda: made.workload.state is RUNNING, within_s=10)
    assert made.workload.generation == 8 and set(made.states().values()) == {HostState.READY}


def test_no_step_is_late_for_a_time_in_which_nothing_could_be_done() -> None:
    job = started(4, verify_timeout_s=5.0)
    carry_out, job._carry_out = job._carry_out, lambda: None
    job.kill("host-1")
    job.until(lambda: job.workload.plan is not None)
    number = job.workload.plan
    for _ in range(100):
        job.controller.pause(0.25)
        job.pass_time(0.25)
    assert job.workload.plan == number
    job._carry_out = carry_out
    job.until(lambda: job.workload.state is RUNNING)
    assert remedies(job) == [RemedyKind.HOT_SWAP] and job.states()["host-3"] is HostState.READY


def test_a_crash_loop_of_a_job_that_makes_a_step_each_time_ends_with_what_the_rank_has_said() -> None:
    """The hosts that are swapped for it return, so that there is always another spare."""
    job = started(6, max_in_job_restarts=1, max_workload_restarts=1, healthy_s=1000.0)
    for _ in range(40):
        host = job.workload.places[1]
        one = {
            "workload": "job",
            "generation": job.workload.generation,
            "rank": 1,
            "detail": "exit status 1: ValueError: no data",
        }
        seen(job, host, ObservationKind.WORKER_LOST, **one)
        job.until(lambda: job.workload.state is not RUNNING)
        job.until(lambda: job.workload.state in (RUNNING, WorkloadState.STOPPED))
        if job.workload.state is WorkloadState.STOPPED:
            break
    assert remedies(job).count(RemedyKind.HOT_SWAP) == 3
    assert "replace 3 hosts" in job.workload.reason and "ValueError: no data" in job.workload.reason


def test_spares_that_fail_their_checks_do_not_stop_the_job() -> None:
    job = started(20)
    for host in job.hosts.values():
        host.healthy = host.name == "host-9"  # the last one that is tried
    job.kill("host-1")
    job.until(lambda: job.workload.state is RUNNING and "host-1" not in job.workload.places)
    assert job.workload.places == ("host-0", "host-9", "host-10") and len(remedies(job)) > 12


def test_what_one_host_says_in_an_incident_is_bounded() -> None:
    job = started()
    job.controller._settings = ControllerSettings(dry_run=True)
    for number in range(2000):
        seen(job, "host-1", ObservationKind.DEVICE_FAULT, device=str(number), device_class=DeviceClass.SOFT)
    seen(job, "host-2", ObservationKind.WORKER_LOST, workload="job", generation=1, rank=2)
    (incident,) = [one for one in job.controller.incidents.values() if one.is_open]
    assert len(incident.observations) < 300 and incident.observations[-1].host == "host-2"
    assert job.controller.refused["too many"] > 1700


def test_a_device_that_asks_for_a_reset_while_ranks_are_replaced_gets_it_afterwards() -> None:
    job = started()
    for host in job.hosts.values():
        host.trains = False
    job.lose_worker("host-0")
    job.until(lambda: job.workload.generation == 2)
    seen(job, "host-2", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.RESET)
    for host in job.hosts.values():
        host.trains = True
    job.until(lambda: job.workload.generation == 3 and job.workload.state is RUNNING)
    job.pass_time(10)
    assert remedies(job) == [RemedyKind.RESTART_IN_JOB, RemedyKind.RESET_DEVICES]


class Loose:
    """Answers with values that are nearly right."""

    def event_policy(self, situation: Situation) -> Remedy:
        kind = "scale_up" if not situation.workload.places else "restart_workload"
        return Remedy(kind=kind, out=[], reason=None)  # type: ignore[arg-type]


class Waits:
    def event_policy(self, situation: Situation) -> Remedy:
        return Remedy(kind=RemedyKind.WAIT)


def test_a_policy_s_answer_is_stored_with_values_that_can_be_read_again() -> None:
    job_of = job()
    made = Simulation(job_of, 3, policy=Loose())
    made.until(lambda: made.workload.state is RUNNING)
    made.lose_worker("host-1")
    made.until(lambda: made.workload.generation == 2 and made.workload.state is RUNNING)
    for plan in made.controller.plans.values():
        assert from_jsonable(Plan, json.loads(json.dumps(to_jsonable(plan)))) == plan
    assert remedies(made) == [RemedyKind.RESTART_WORKLOAD]


def test_a_policy_that_waits_for_ever_waits_once_and_not_for_ever() -> None:
    made = Simulation(job(wait_timeout_s=20.0), 3, policy=Waits())
    made.pass_time(15)
    assert made.workload.state is WorkloadState.WAITING and made.workload.generation <= 1
    made.until(lambda: made.workload.state is WorkloadState.STOPPED)


def test_only_the_host_that_says_that_a_rank_hangs_has_it_killed() -> None:
    """A host can speak of its own ranks alone, whatever number it names."""
    job = started()
    seen(job, "host-2", ObservationKind.WORKER_HUNG, workload="job", generation=1, rank=0)
    job.until(lambda: job.workload.generation == 2)
    told = {host: job.controller.place_of(host).replace for host in job.hosts}
    assert told == {"host-0": (), "host-1": (), "host-2": (0,)}


def test_ranks_that_die_at_once_again_and_again_are_started_later_and_later() -> None:
    """A shared file system that is away for a minute does not use up all restarts."""
    job = started(max_in_job_restarts=3, max_workload_restarts=99)
    for host in job.hosts.values():
        host.trains = False
    began, starts = job.now, []
    job.lose_worker("host-0")
    while job.workload.state is not WorkloadState.STOPPED and job.now < began + 60:
        job.pass_time(0.25)
        if job.workload.plan is not None and job.workload.generation > len(starts) + 1:
            starts.append(job.now - began)
            job.pass_time(0.25)
            job.lose_worker("host-0")
    assert job.workload.state is not WorkloadState.STOPPED and 4 <= len(starts) <= 7
    assert starts[1] < 3 and starts[2] - starts[1] >= 5 and starts[-1] - starts[-2] >= 15
    for host in job.hosts.values():
        host.trains = True
    job.until(lambda: job.workload.state is RUNNING)


def test_a_host_that_is_lost_is_replaced_without_a_pause() -> None:
    job = started(5, max_workload_restarts=99)
    for host in job.hosts.values():
        host.trains = False
    job.lose_worker("host-0")
    for generation in range(2, 9):
        job.until(lambda generation=generation: job.workload.generation == generation)
        job.pass_time(0.5)
        job.lose_worker("host-0")
    job.kill("host-1")
    killed = job.now
    job.until(lambda: "host-1" not in job.workload.places)
    assert job.now - killed < TIMEOUT_S + 2


@pytest.mark.parametrize("dies", [False, True], ids=["all return", "one is dead"])
def test_a_start_goes_on_when_the_network_of_the_supervisor_was_cut_meanwhile(dies: bool) -> None:
    """Ranks load for minutes, and nobody is heard for a while."""
    made = Simulation(job(start_timeout_s=300.0), 3)
    for host in made.hosts.values():
        host.trains = False
    made.until(lambda: made.workload.generation == 1)
    made.pass_time(2)
    for host in made.hosts.values():
        host.heard = False
    made.until(lambda: made.sensor.frozen)
    made.controller.look(made.now, made.now)
    made.store()
    made.controller.look(made.now + 1, made.now + 1)
    assert not made.controller.take_changes(), "that time passes is written down again and again"
    made.pass_time(10)
    if dies:
        made.kill("host-1")
    for host in made.hosts.values():
        host.heard = True
    made.until(lambda: not made.sensor.frozen)
    made.pass_time(5)
    for host in made.hosts.values():
        host.trains = True
    made.until(lambda: made.workload.state is RUNNING and made.workload.plan is None)
    assert made.workload.generation == (2 if dies else 1)
    assert remedies(made) == ([RemedyKind.SCALE_DOWN] if dies else [])


def test_a_straggler_is_noted_and_left_alone_unless_its_swap_is_wanted() -> None:
    job = started(4, replicas=3)
    seen(job, "host-1", ObservationKind.STRAGGLER, workload="job", generation=1, rank=1)
    job.pass_time(2)
    assert remedies(job) == [] and job.workload.places == ("host-0", "host-1", "host-2")
    (incident,) = [one for one in job.controller.incidents.values() if one.tried == ()]
    assert "set swap_stragglers" in incident.outcome


def test_the_host_of_a_straggler_is_swapped_after_a_checkpoint_where_that_is_wanted() -> None:
    job = started(4, replicas=3, swap_stragglers=True)
    seen(job, "host-1", ObservationKind.STRAGGLER, workload="job", generation=1, rank=1)
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    assert remedies(job) == [RemedyKind.HOT_SWAP] and job.workload.places == ("host-0", "host-3", "host-2")
    plan = max(job.controller.plans.values(), key=lambda plan: plan.number)
    assert StepKind.CHECKPOINT in [step.kind for step in plan.steps]
    assert job.sensor.state_of("host-1") is HostState.QUARANTINED


def test_a_straggler_stays_while_there_is_no_spare() -> None:
    job = started(3, swap_stragglers=True)
    seen(job, "host-1", ObservationKind.STRAGGLER, workload="job", generation=1, rank=1)
    job.pass_time(2)
    assert remedies(job) == [] and job.workload.state is RUNNING


def in_blocks(*blocks: str, **settings) -> Simulation:
    made = Simulation(job(**settings), len(blocks))
    for host, block in zip(made.hosts.values(), blocks, strict=True):
        host.block = block
    made.until(lambda: made.workload.state is RUNNING)
    return made


def test_a_place_goes_to_a_spare_of_the_same_block_whichever_host_is_lost_with_it() -> None:
    job = in_blocks("rack-1", "rack-2", "rack-3", "rack-3", "rack-2", "rack-1")
    for host in ("host-0", "host-2"):
        job.kill(host)
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    assert job.workload.places == ("host-5", "host-1", "host-3") and remedies(job) == [RemedyKind.HOT_SWAP]


def test_so_it_does_when_a_host_goes_because_restarts_do_not_help_and_without_one_any_spare_will_do() -> None:
    job = in_blocks("rack-1", "rack-2", "rack-3", "rack-4", "rack-2", max_in_job_restarts=0, max_workload_restarts=0)
    job.lose_worker("host-1")
    job.until(lambda: job.workload.generation == 2 and job.workload.state is RUNNING)
    assert job.workload.places == ("host-0", "host-4", "host-2")
    job.kill("host-0")
    job.until(lambda: job.workload.generation == 3 and job.workload.state is RUNNING)
    assert job.workload.places == ("host-3", "host-4", "host-2")


def test_ranks_that_still_run_get_the_users_signal_before_each_set_of_places() -> None:
    made = Simulation(job(), 4, settings=ControllerSettings(hook_signal=10))
    made.until(lambda: made.workload.state is RUNNING)
    first = made.controller.plans[max(made.controller.plans)]
    assert StepKind.SIGNAL not in {step.kind for step in first.steps}  # nobody is there to get it
    made.kill("host-1")
    made.until(lambda: made.workload.generation == 2 and made.workload.state is RUNNING)
    steps = made.controller.plans[max(made.controller.plans)].steps
    kinds = [step.kind for step in steps]
    assert kinds.index(StepKind.SIGNAL) < kinds.index(StepKind.PLACE)
    (sent,) = [step for step in steps if step.kind is StepKind.SIGNAL]
    assert (sent.signal, sent.hosts, sent.required) == (10, ("host-0", "host-2"), False)
    assert from_jsonable(Plan, to_jsonable(made.controller.plans[max(made.controller.plans)])).steps == steps
