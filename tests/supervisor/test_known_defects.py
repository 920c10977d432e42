"""What supervisors are known to get wrong, each as a test of its own. A peer that is away ends one, and whoever depends
on that one (``test_chain_of_aborts`` in test_local_cluster.py); who carries a remedy out sees nothing meanwhile; a reset forgets the limits, so that the next fault
is taken for the worst; a spare that died counts; fewer hosts are decided on, and nothing is done; a backend that throws loses
the event; what was known is gone with the process; a port that is none, or is taken, and names in other letters."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.monitor.watchdogs.registry import WatchdogSettings, make_watchdogs
from resiliency.runtime.messages.monitor import StepKind
from resiliency.runtime.messages.observations import DeviceClass, ObservationKind
from resiliency.supervisor import server
from resiliency.supervisor.clusters.base import HostFacts
from resiliency.supervisor.model import HostState, Outcome, Remedy, RemedyKind, WorkloadSpec, WorkloadState
from resiliency.supervisor.policy import Situation
from resiliency.supervisor.settings import HookSettings, split_address

from .fake_monitors import TIMEOUT_S, job, leading, monitors, settings, until, url_of
from .simulated import Simulation
from .simulated_service import TIMEOUT_S as SILENT_S
from .simulated_service import Whole

RUNNING = WorkloadState.RUNNING


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def started(hosts: int, *, policy: Any = None, **spec: Any) -> Simulation:
    values = {"name": "job", "replicas": 3, "dwell_s": 4.0, "start_timeout_s": 20.0, **spec}
    made = Simulation(WorkloadSpec(**values), hosts, policy=policy)
    made.until(lambda: made.workload.state is RUNNING)
    return made


def test_blind_sensor_a_host_that_dies_during_a_remedy_is_seen_in_its_time(tmp_path: Path) -> None:
    """The user's program hangs in the remedy of one workload; a host of another one dies meanwhile."""

    async def work() -> None:
        flag = tmp_path / "slow"
        hook = HookSettings(command=["/bin/sh", "-c", f"[ ! -e {flag} ] || exec sleep 600"], timeout_s=50.0)
        made = settings(tmp_path, job(name="one", replicas=1), job(name="two", replicas=1), hook=hook)
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b", "c", "d") as hosts:
            assert supervisor.service is not None
            known = supervisor.service.decided.workloads
            await until(lambda: sorted(each.state.value for each in known.values()) == ["running"] * 2)
            of = {one.place.workload: one for one in hosts if one.place is not None}
            flag.touch()
            await of["one"].saw(ObservationKind.WORKER_LOST, rank=0)
            plans = supervisor.service.decided.plans
            await until(lambda: any(plan.step and plan.step.kind is StepKind.HOOK for plan in plans.values()))
            dead = of["two"].name
            await of["two"].die()
            await until(lambda: supervisor.service.sensor.state_of(dead) is HostState.SILENT, within_s=5 * TIMEOUT_S)
            assert known["one"].state is WorkloadState.REMEDYING  # it is carried out still
            flag.unlink()  # programs of later plans end at once
            await until(lambda: known["two"].places not in ((), (dead,)) and known["two"].state is RUNNING)
            assert known["one"].state is WorkloadState.REMEDYING

    run(work)


def test_wiped_limits_a_reset_or_a_kill_forgets_no_limit_and_no_count() -> None:
    """Limits are the workload's, not the hosts', and what a host says of a generation that is over changes nothing."""
    job = started(5, max_in_job_restarts=1, max_workload_restarts=1)
    kinds = []
    for _ in range(3):
        generation = job.workload.generation
        job.lose_worker("host-1")
        job.until(lambda generation=generation: job.workload.generation > generation and job.workload.state is RUNNING)
        for host in job.hosts:
            job.controller.reported(host, "job", generation, job.now, step=5)
        kinds.append(job.controller.plans[max(job.controller.plans)].remedy.kind)
        job.kill_supervisor(1.0)
        assert (job.workload.spec.max_in_job_restarts, job.workload.spec.max_workload_restarts) == (1, 1)
    assert kinds == [RemedyKind.RESTART_IN_JOB, RemedyKind.RESTART_WORKLOAD, RemedyKind.HOT_SWAP]


def test_dead_spare_accepted_one_that_died_in_the_same_moment_gets_no_rank() -> None:
    job = started(5)
    spares = [name for name in job.hosts if name not in job.workload.places]
    job.kill(spares[0])
    job.kill("host-1")
    job.until(lambda: "host-1" not in job.workload.places and job.workload.state is RUNNING)
    assert spares[0] not in job.workload.places and spares[1] in job.workload.places
    assert all(
        spares[0] not in plan.places
        for plan in job.controller.plans.values()
        if plan.generation == job.workload.generation
    )


def test_dead_spare_accepted_a_host_whose_ranks_just_failed_is_no_spare_for_another() -> None:
    job = started(3, min_replicas=2, max_in_job_restarts=0, max_workload_restarts=0)
    job.lose_worker("host-1")
    job.until(lambda: "host-1" not in job.workload.places and job.workload.state is RUNNING)
    job.kill("host-2")
    job.pass_time(8)
    assert "host-1" not in job.workload.places


class SaysScaleDown:
    """A policy that wants fewer hosts and names none, or all of them."""

    def __init__(self, out: tuple[str, ...]) -> None:
        self.out = out

    def event_policy(self, situation: Situation) -> Remedy:
        if not situation.workload.places:
            return Remedy(kind=RemedyKind.SCALE_UP, reason="begin")
        return Remedy(kind=RemedyKind.SCALE_DOWN, out=self.out, reason="smaller")


@pytest.mark.parametrize("out", [(), ("host-0", "host-1", "host-2"), ("nobody",)])
def test_no_op_scale_down_something_else_is_done_and_the_dead_host_is_gone(out: tuple[str, ...]) -> None:
    job = started(3, min_replicas=2, policy=SaysScaleDown(out))
    job.kill("host-1")
    job.until(lambda: "host-1" not in job.workload.places)
    job.until(lambda: job.workload.state is RUNNING)
    step = job.step
    job.pass_time(5)
    assert job.step > step and len(job.workload.places) == 2


def test_no_op_scale_down_sizes_that_allow_none_are_refused_when_the_file_is_read() -> None:
    for wrong in ({"replicas": 0}, {"hosts_per_replica": 0}, {"min_replicas": 0}, {"replicas": 2, "min_replicas": 3}):
        with pytest.raises(ConfigError):
            WorkloadSpec(**{"name": "job", "replicas": 3, **wrong})


def test_ranks_that_are_taken_for_hung_on_purpose_are_really_replaced(tmp_path: Path) -> None:
    """``enable_fault_injection``."""

    async def work() -> None:
        made = settings(tmp_path, enable_fault_injection=True, fault_injection_period_s=0.5)
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b") as hosts:
            await until(lambda: all(one.place is not None and one.place.generation >= 3 for one in hosts))
            told = {(one.name, one.place.node_rank, desired.place.replace) for one in hosts for desired in one.desires
                    if desired.place is not None and desired.place.replace}  # fmt: skip
            assert told and all(replace == (node_rank,) for _, node_rank, replace in told)
            assert {"start", "scale_up", "restart_in_job"} >= {
                str(plan.remedy.kind) for plan in supervisor.service.controller.plans.values()
            }

    run(work)


@pytest.fixture
def whole() -> Iterator[Whole]:
    given = {"name": "job", "replicas": 2, "dwell_s": 1.0, "start_timeout_s": 6.0, "verify_timeout_s": 3.0}
    made = Whole(WorkloadSpec(**given, max_in_job_restarts=1), 4)  # type: ignore[arg-type]
    try:
        made.until(lambda: made.job is not None and made.job.state is RUNNING)
        yield made
    finally:
        made.close()


def test_lost_events_a_backend_that_throws_ends_no_remedy(whole: Whole) -> None:
    whole.cluster_behaves = "throws"
    whole.observed("h-0", ObservationKind.DEVICE_FAULT, device="0", device_class=DeviceClass.SWAP)
    whole.until(lambda: "h-0" not in whole.job.places and whole.job.incident is None)
    plan = whole.journal.plans[max(whole.journal.plans)]
    assert plan.outcome is Outcome.DONE and plan.remedy.kind is RemedyKind.HOT_SWAP
    whole.until(lambda: "h-0" in whole.taken_out)
    assert whole.job.state is RUNNING


@pytest.mark.parametrize("is_down", [True, False])
def test_a_host_that_died_with_the_leader_before_is_taken_out_when_its_machine_is_down(
    whole: Whole, is_down: bool
) -> None:
    assert whole.service is not None
    whole.service.cluster_says(HostFacts(host="never-heard", node="n", is_down=is_down))
    whole.pass_time(SILENT_S)
    assert not whole.taken_out, "the machine may only be away for a moment"
    whole.pass_time(3 * SILENT_S)
    assert whole.taken_out == ({"never-heard"} if is_down else set())
    assert whole.job.state is RUNNING


def test_nothing_persisted_hosts_cordons_and_counts_outlive_the_supervisor(whole: Whole) -> None:
    whole.observed("h-0", ObservationKind.WORKER_LOST, rank=0)
    whole.until(lambda: whole.job.generation > 1 and whole.job.incident is None)
    assert whole.service is not None and whole.service.drain("h-3", "maintenance")
    whole.pass_time(0.5)
    before = whole.job
    whole.kill()
    whole.start()
    assert {host.name for host in whole.service.sensor.hosts()} == set(whole.hosts)
    assert whole.service.sensor.state_of("h-3") is HostState.CORDONED
    known = whole.service.controller.workloads["job"]
    assert (known.in_job_restarts, known.places, known.generation) == (1, before.places, before.generation)


def test_wrong_port_one_that_is_none_is_refused_and_whoever_has_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="a port up to 65535"):
        split_address("0.0.0.0:90090")
    monkeypatch.setattr(server, "_BIND_S", 0.0)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            made = settings(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}")
            with pytest.raises(ConfigError, match="cannot listen on .*pass another address with --listen"):
                await server.Supervisor(made).run()
            socket.create_connection(taken.getsockname(), timeout=5).close()

    run(work)


def test_names_of_watchdogs_one_that_is_written_otherwise_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no watchdog 'XID'; there are .*ecc.*xid"):
        make_watchdogs(["XID"], WatchdogSettings())
