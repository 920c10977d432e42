"""A supervisor and monitors of hosts, over real WebSockets, in one event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from resiliency import faultpoints
from resiliency.runtime.messages.monitor import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Desired,
    Hello,
    Observed,
    Refused,
    Report,
    StepKind,
    pack,
    unpack,
)
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.clusters.base import HostFacts
from resiliency.supervisor.clusters.none import NoCluster
from resiliency.supervisor.clusters.registry import CLUSTERS
from resiliency.supervisor.model import Host, HostState, Workload, WorkloadState
from resiliency.supervisor.records import Changes
from resiliency.supervisor.sensor import SensorSettings
from resiliency.supervisor.server import Supervisor
from resiliency.supervisor.settings import HangSettings, HookSettings, StragglerSettings
from resiliency.supervisor.sqlite_store import SqliteStore, StateFileGone
from resiliency.supervisor.store import StateUnavailable

from .fake_monitors import PERIOD_S, TIMEOUT_S, FakeMonitor, asked, job, leading, monitors, settings, until, url_of


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def is_running(supervisor: Supervisor, generation: int = 1) -> bool:
    assert supervisor.service is not None
    workload = supervisor.service.decided.workloads.get("job")
    return workload is not None and workload.state is WorkloadState.RUNNING and workload.generation == generation


def remedies(supervisor: Supervisor) -> list[str]:
    assert supervisor.service is not None
    plans = supervisor.service.controller.plans
    return [str(plans[number].remedy.kind) for number in sorted(plans)]


def test_two_monitors_get_places_and_the_address_of_the_first_and_train(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            assert a.desired is not None and b.desired is not None
            assert (a.desired.place.node_rank, b.desired.place.node_rank) == (0, 1)
            assert a.desired.place.nodes == 2 and b.desired.place.master == "10.0.0.1:20001"
            assert a.asked == [] or {kind for _, _, kind in a.asked} == {StepKind.VERIFY}
            a.ended = b.ended = True
            await until(lambda: a.desired.completed and b.desired.completed)
            assert a.desired.place is None

    run(work)


def test_the_cluster_that_the_settings_choose_is_told_of_a_host_that_is_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Cordons(NoCluster):
        async def run(self, changed: Callable[[HostFacts], None]) -> None:
            for host in "abc":
                changed(HostFacts(host=host))
            await super().run(changed)

        async def take_out(self, host: str, reason: str, *, is_dead: bool) -> str:
            told.append(host)
            return ""

    monkeypatch.setitem(CLUSTERS, "cordons", lambda settings: (Cordons(), None))

    async def work() -> None:
        made = settings(tmp_path, cluster="cordons")
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b", "c") as hosts:
            await until(lambda: is_running(supervisor))
            lost = next(host for host in hosts if host.place is not None)
            assert supervisor.service is not None and supervisor.service.drain(lost.name, "a test")
            await until(lambda: is_running(supervisor, 2))
            await until(lambda: told == [lost.name])

    run(work)


async def told(supervisor: Supervisor) -> tuple[list[str], list[str], dict[str, str]]:
    """Incidents and the workload's states, as status and history tell them, and counts of the metrics."""
    _, status = await asked(supervisor, "/v1/status")
    assert supervisor.service is not None
    incidents = [each["observations"][0]["kind"] for each in status["incidents"]]
    states = [event.fields["state"] for event in supervisor.store.events() if event.kind == "workload_state"]
    lines = [line.split() for line in supervisor.metrics.text().decode().splitlines() if not line.startswith("#")]
    return incidents, states, {line[0].removeprefix("resiliency_supervisor_"): line[1] for line in lines}


def test_a_start_is_no_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is one that an operator has asked for."""
    caplog.set_level("INFO", "resiliency.supervisor.controller")

    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b"):
            await until(lambda: is_running(supervisor))
            assert supervisor.service is not None and supervisor.service.stop_workload("job", "enough")
            assert supervisor.service.start_workload("job")
            await until(lambda: is_running(supervisor, 2))
            incidents, states, counts = await told(supervisor)
            assert incidents == [] and (counts["incidents_total"], counts["open_incidents"]) == ("0.0", "0.0")
            assert states[:3] == ["waiting", "starting", "running"] and states[-2:] == ["starting", "running"]
            kinds = {event.kind for event in supervisor.store.events()}
            assert kinds <= {"host_state", "workload_state", "operator", "supervisor_leads"}
            assert not any(event.incident for event in supervisor.store.events())
            assert (await asked(supervisor, "/v1/explain/last"))[0] == 404

    run(work)
    said = [record.getMessage() for record in caplog.records if record.name == "resiliency.supervisor.controller"]
    assert sum("start: hosts are there" in line for line in said) == 2
    assert not any("incident" in line or "capacity" in line for line in said)


def test_a_start_in_which_a_rank_is_lost_is_an_incident(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            a.trains = b.trains = False
            await until(lambda: a.place is not None and b.place is not None)
            await a.saw(ObservationKind.WORKER_LOST, rank=0)
            a.trains = b.trains = True
            await until(lambda: is_running(supervisor, 2))
            incidents, states, counts = await told(supervisor)
            assert incidents == ["worker_lost"] and counts["incidents_total"] == "1.0"
            assert states == ["waiting", "starting", "remedying", "running"]
            kinds = [event.kind for event in supervisor.store.events() if event.incident]
            assert kinds[:3] == ["incident_opened", "worker_lost", "plan_ended"]
            assert remedies(supervisor) == ["start", "restart_in_job"]

    run(work)


def test_a_host_is_needed_until_the_last_workload_has_ended(tmp_path: Path) -> None:
    """The one whose own workload is completed too: it takes the place of a host of the other."""

    async def work() -> None:
        made = settings(tmp_path, job(name="short", replicas=1), job(name="long", replicas=1))
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b") as hosts:
            assert supervisor.service is not None
            known = supervisor.service.decided.workloads
            is_running = {WorkloadState.RUNNING}
            await until(lambda: {each.state for each in known.values()} == is_running and len(known) == 2)
            of = {one.place.workload: one for one in hosts if one.place is not None}
            of["short"].ended = True
            await until(lambda: known["short"].state is WorkloadState.COMPLETED)
            await until(lambda: of["short"].desired.place is None)
            assert not any(each.completed for one in hosts for each in one.desires)

            assert supervisor.service.drain(of["long"].name, "goes home")
            await until(lambda: known["long"].places == (of["short"].name,))
            await until(lambda: known["long"].state is WorkloadState.RUNNING)
            of["short"].ended = True
            await until(lambda: of["short"].desired.completed)

    run(work)


@pytest.mark.parametrize("ends", ["completed", "stopped"])
def test_hosts_whose_workloads_have_ended_leave_but_for_all_that_were_stopped(tmp_path: Path, ends: str) -> None:
    """What is stopped can be started again; beside it another one was completed, or not."""

    async def work() -> None:
        made = settings(tmp_path, job(name="one", replicas=1), job(name="two", replicas=1))
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b", "spare") as hosts:
            assert supervisor.service is not None
            known = supervisor.service.decided.workloads
            await until(lambda: sorted(each.state.value for each in known.values()) == ["running"] * 2)
            (first,) = (one for one in hosts if one.place is not None and one.place.workload == "one")
            assert supervisor.service.stop_workload("two", "enough")
            if ends == "completed":
                first.ended = True
                await until(lambda: all(one.desired.completed for one in hosts))
                assert supervisor.service.start_workload("two")
                await until(lambda: not any(one.desired.completed for one in hosts))
            else:
                assert supervisor.service.stop_workload("one", "enough")
                await until(lambda: not any(one.place for one in hosts))
                assert not any(one.desired.completed for one in hosts)

    run(work)


def test_a_workload_that_was_added_to_the_file_keeps_hosts_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not stored yet when the hosts of the one that is completed come again."""
    disk, commit = threading.Event(), SqliteStore.commit

    async def work() -> None:
        async with leading(settings(tmp_path, job(replicas=1))) as supervisor:
            async with FakeMonitor(url_of(supervisor), "a") as a:
                await until(lambda: is_running(supervisor))
                a.ended = True
                await until(lambda: a.desired.completed)
        monkeypatch.setattr(SqliteStore, "commit", lambda *given: disk.wait(10) and commit(*given))
        async with leading(settings(tmp_path, job(replicas=1), job(name="more", replicas=1))) as supervisor:
            async with FakeMonitor(url_of(supervisor), "a") as a:
                try:
                    await until(lambda: a.desires)
                finally:
                    disk.set()
                await until(lambda: a.place is not None and a.place.workload == "more")
                assert not any(each.completed for each in a.desires)

    run(work)


def states(supervisor: Supervisor) -> dict[str, HostState]:
    assert supervisor.service is not None
    return {host.name: host.state for host in supervisor.service.sensor.hosts()}


def test_a_lost_rank_leads_to_one_new_generation(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            await a.saw(ObservationKind.WORKER_LOST, rank=0)
            await until(lambda: is_running(supervisor, 2))
            await a.send(unpack(pack(Observed(observations=(lost("a", generation=1),)))))  # of the generation before
            await asyncio.sleep(0.5)
            assert remedies(supervisor) == ["start", "restart_in_job"] and is_running(supervisor, 2)
            assert (
                b.desired is not None and b.desired.place.generation == 2 and b.desired.place.master == "10.0.0.1:20002"
            )
            kinds = [event.kind for event in supervisor.store.events()]
            assert kinds.count("worker_lost") == 1 and kinds.count("restart_requested") == 1

    run(work)


@pytest.mark.parametrize("jump_s", [-(10.0**6), 10.0**6])
def test_a_wall_clock_that_jumps_is_no_reason_to_do_anything_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b", "c") as hosts:
            await until(lambda: is_running(supervisor) and len(supervisor.service.sensor.ready) == 3)
            right = time.time
            monkeypatch.setattr(time, "time", lambda: right() + jump_s)
            await asyncio.sleep(2 * TIMEOUT_S)
            assert remedies(supervisor) == ["start"] and is_running(supervisor)
            (dead,) = (one for one in hosts if one.place is not None and one.place.node_rank == 1)
            other = next(one for one in hosts if one.place is not None and one is not dead)
            other.trains = False  # it waits for the one that is gone
            await dead.die()
            await until(lambda: supervisor.service.controller.workloads["job"].plan is not None, within_s=5.0)
            other.trains = True
            await until(lambda: is_running(supervisor, 2), within_s=5.0)
            assert remedies(supervisor) == ["start", "hot_swap"]

    run(work)


def test_a_dead_host_is_swapped_for_a_verified_spare(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            leading(settings(tmp_path)) as supervisor,
            monitors(url_of(supervisor), "a", "b", "c") as (a, b, c),
        ):
            await until(lambda: is_running(supervisor))
            placed = {host.name: host for host in (a, b, c) if host.place is not None}
            (spare,) = {"a", "b", "c"} - placed.keys()
            dead = sorted(placed)[0]
            for other in (a, b, c):
                other.trains = False
            await placed[dead].die()
            await until(lambda: spare in supervisor.service.decided.workloads["job"].places)  # type: ignore[union-attr]
            for other in (a, b, c):
                other.trains = True
            await until(lambda: is_running(supervisor, 2))
            assert remedies(supervisor)[-1] == "hot_swap" and states(supervisor)[dead] is HostState.SILENT

    run(work)


def test_a_host_that_fails_its_check_gets_no_place(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor:
            bad = FakeMonitor(url_of(supervisor), "bad")
            bad.problem = "the disk is full"
            async with bad, monitors(url_of(supervisor), "b", "c") as (b, c):
                await until(lambda: is_running(supervisor))
                assert bad.place is None and b.place is not None and c.place is not None
                assert states(supervisor)["bad"] is HostState.QUARANTINED

    run(work)


def test_a_host_with_fewer_devices_than_its_peers_gets_no_place_and_one_that_trains_keeps_its(tmp_path: Path) -> None:
    async def work() -> None:
        soon = SensorSettings(period_s=PERIOD_S, timeout_s=TIMEOUT_S, quarantine_s=0.2)
        async with leading(settings(tmp_path, sensor=soon)) as supervisor:
            bad = FakeMonitor(url_of(supervisor), "bad", devices=7)
            async with monitors(url_of(supervisor), "a", "b", "c", devices=8) as hosts:
                await until(lambda: is_running(supervisor))
                a = next(host for host in hosts if host.place is not None)
                async with bad:
                    said = "it has 7 devices, and most hosts have 8"
                    await until(lambda: states(supervisor).get("bad") is HostState.QUARANTINED)
                    assert supervisor.service is not None
                    assert said in supervisor.service.sensor.host("bad").reason  # type: ignore[union-attr]
                    a.devices = 7
                    number = a.number
                    await until(lambda: a.number > number + 3)
                    assert is_running(supervisor) and a.place is not None
                    a.devices = 8
                    bad.devices = 8  # it was repaired
                    await until(lambda: states(supervisor)["bad"] is HostState.READY)

    run(work)


def test_a_check_is_asked_for_once_and_never_again_when_it_was_answered(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path, job(replicas=3, min_replicas=3))) as supervisor:
            async with monitors(url_of(supervisor), "a") as (a,):
                await until(lambda: states(supervisor).get("a") is HostState.READY)
                await asyncio.sleep(0.5)
                assert len(set(a.asked)) == 1 and a.desired is not None and a.desired.asks == ()

    run(work)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("nonsense", "not a message"),
        (pack(Report(number=1)), "first message is a Hello"),
        (pack(Hello(version=99, host="a", incarnation="1")), "version 99"),
        (pack(Hello(version=PROTOCOL_VERSION, host="../a", incarnation="1")), "not that of a host"),
        (None, "no Hello within"),
    ],
)
def test_a_connection_that_does_not_greet_is_closed_with_a_reason(tmp_path: Path, first: str | None, said: str) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, aiohttp.ClientSession() as session:
            async with session.ws_connect(f"{url_of(supervisor)}/v1/monitor") as socket:
                if first is not None:
                    await socket.send_str(first)
                answer = unpack((await socket.receive(5)).data)
                assert isinstance(answer, Refused) and said in answer.reason
                assert (await socket.receive(5)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)

    run(work)


@pytest.mark.parametrize("what", ["another host", "a kind", "no workload", "too long", "binary", "desired"])
def test_a_forged_message_closes_the_connection_and_changes_nothing(tmp_path: Path, what: str) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            assert a.socket is not None
            if what == "too long":
                await a.socket.send_str("x" * (MAX_MESSAGE_BYTES + 1))
            elif what == "binary":
                await a.socket.send_bytes(b"x")
            elif what == "desired":
                await a.send(Desired(term=99))
            else:
                one = {
                    "another host": lost("b", generation=1),
                    "a kind": Observation(kind=ObservationKind.HOST_LOST, host="a"),
                    "no workload": Observation(kind=ObservationKind.WORKER_LOST, host="a"),
                }[what]
                await a.send(Observed(observations=(one,)))
            before = a.socket
            await until(lambda: before.closed or a.refused)
            assert is_running(supervisor) and remedies(supervisor) == ["start"]

    run(work)


def test_a_second_monitor_of_a_host_is_refused_and_the_same_one_may_come_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            async with FakeMonitor(url_of(supervisor), "a", incarnation="2") as thief:
                await until(lambda: thief.refused)
                assert "has one monitor" in thief.refused.replace("\n", " ") and thief.desired is None
            async with FakeMonitor(url_of(supervisor), "a", incarnation="1") as again:
                again.place = a.place
                await until(lambda: again.desired)
            assert is_running(supervisor)

    run(work)


def test_tokens_bind_monitors_to_their_hosts_and_operators_have_one_of_their_own(tmp_path: Path) -> None:
    for name, text in (("tokens", "a-* " + "a" * 20 + "\n"), ("operator", "o" * 20)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    made = settings(
        tmp_path,
        insecure_no_authentication=False,
        monitor_tokens=str(tmp_path / "tokens"),
        operator_token=str(tmp_path / "operator"),
    )

    async def work() -> None:
        async with leading(made) as supervisor:
            url = url_of(supervisor)
            async with (
                FakeMonitor(url, "a-1", token="a" * 20) as good,
                FakeMonitor(url, "b-1", token="a" * 20) as forged,
                FakeMonitor(url, "a-2", token="x" * 20) as wrong,
            ):
                await until(lambda: good.desired and forged.refused and wrong.refused)
                assert "not that of a host" in forged.refused and wrong.refused == "401"
            for path, method in (
                ("/", "GET"),
                ("/v1/status", "GET"),
                ("/metrics", "GET"),
                ("/v1/hosts/a-1/drain", "POST"),
            ):
                assert (await asked(supervisor, path, method=method))[0] == 401
                assert (await asked(supervisor, path, method=method, token="a" * 20))[0] == 401
                assert (await asked(supervisor, path, method=method, token="o" * 20))[0] == 200
            assert (await asked(supervisor, "/healthz"))[0] == (await asked(supervisor, "/readyz"))[0] == 200

    run(work)


def test_a_connection_that_dribbles_is_cut_off_and_garbage_harms_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            assert supervisor.address is not None
            slow = [await asyncio.open_connection(*supervisor.address) for _ in range(20)]
            for _, writer in slow:
                writer.write(b"GET /v1/status HTTP/1.1\r\nX: ")
            reader, garbage = await asyncio.open_connection(*supervisor.address)
            garbage.write(bytes(range(256)) * 300)
            ends = [asyncio.wait_for(one.read(), 5) for one, _ in [*slow, (reader, garbage)]]
            await asyncio.gather(*ends, return_exceptions=True)
            for _, writer in [*slow, (reader, garbage)]:
                writer.close()
            await until(lambda: is_running(supervisor))

    run(work)


def test_a_slow_disk_makes_no_host_silent_and_holds_back_what_was_decided(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            faultpoints.arm(f"supervisor.store.write:delay={3 * TIMEOUT_S}")
            try:
                await a.saw(ObservationKind.WORKER_LOST, rank=0)
                began = time.monotonic()
                await until(lambda: a.desired is not None and a.desired.place.generation == 2)
                assert time.monotonic() - began > 2 * TIMEOUT_S
                await until(lambda: is_running(supervisor, 2))
            finally:
                faultpoints.arm("")
            assert remedies(supervisor) == ["start", "restart_in_job"]
            assert set(states(supervisor).values()) == {HostState.READY}

    run(work)


def test_a_disk_that_fails_is_said_and_tried_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            faultpoints.arm("supervisor.store.write:full@*")
            try:
                await a.saw(ObservationKind.WORKER_LOST, rank=0)
                await until(lambda: supervisor.service.journal.problem)  # type: ignore[union-attr]
                assert (await asked(supervisor, "/readyz"))[0] == 503
                assert a.desired is not None and a.desired.place.generation == 1
            finally:
                faultpoints.arm("")
            await until(lambda: is_running(supervisor, 2))
            assert (await asked(supervisor, "/readyz"))[0] == 200

    run(work)


def test_a_leader_that_cannot_renew_its_lease_ends_what_it_does_and_goes_on_once_it_can(tmp_path: Path) -> None:
    """For as long another one might lead. Nobody does here, so that it is the same term."""
    script = (
        f"cd {tmp_path}; trap 'echo ended >>did; exit 1' TERM; echo begun >>did; until test -e go; do sleep 0.05; done"
    )

    def did() -> list[str]:
        return (tmp_path / "did").read_text().split() if (tmp_path / "did").exists() else []

    async def work() -> None:
        made = settings(tmp_path, hook=HookSettings(command=["sh", "-c", script]), lease_s=0.5)
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: did() == ["begun"])
            assert supervisor.service is not None
            service, term = supervisor.service, supervisor.service.term
            faultpoints.arm("supervisor.lease.write:full@*")
            try:
                await until(lambda: did() == ["begun", "ended"])
                status, text = await asked(supervisor, "/readyz")
                assert status == 503 and "not renewed in time" in text
                assert (await asked(supervisor, "/v1/hosts/a/drain", method="POST"))[0] == 503
                assert (await asked(supervisor, "/v1/status"))[0] == 200
                said = len(a.desires)
                await asyncio.sleep(4 * PERIOD_S)
                assert did() == ["begun", "ended"] and len(a.desires) == said
            finally:
                faultpoints.arm("")
            await until(lambda: did() == ["begun", "ended", "begun"])
            (tmp_path / "go").touch()
            await until(lambda: is_running(supervisor) and a.place is not None and b.place is not None)
            assert supervisor.service is service and service.term == term and remedies(supervisor) == ["start"]

    run(work)


def test_a_state_file_that_is_removed_ends_the_leader_with_what_to_do(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(StateFileGone, match="was removed.*Start the supervisor again"):
            async with leading(settings(tmp_path, lease_s=0.5)) as supervisor, monitors(url_of(supervisor), "a", "b"):
                await until(lambda: is_running(supervisor))
                (tmp_path / "supervisor.db").unlink()
                await until(lambda: supervisor.service is None)
        assert not (tmp_path / "supervisor.db").exists()

    run(work)


def test_a_dry_run_says_what_it_would_do(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path, dry_run=True)) as supervisor, monitors(url_of(supervisor), "a", "b"):
            workloads = supervisor.service.controller.workloads  # type: ignore[union-attr]
            await until(lambda: workloads["job"].reason)
            await asyncio.sleep(0.5)
            _, found = await asked(supervisor, "/v1/status")
            (workload,) = found["workloads"]
            assert "dry run: would start" in workload["reason"] and (workload["generation"], workload["plan"]) == (
                0,
                None,
            )

    run(work)


def test_an_operator_drains_a_host_and_gives_it_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            leading(settings(tmp_path)) as supervisor,
            monitors(url_of(supervisor), "a", "b", "c") as all_of_them,
        ):
            await until(lambda: is_running(supervisor))
            host = next(one for one in all_of_them if one.place is not None and one.place.node_rank == 1)
            status, _ = await asked(supervisor, f"/v1/hosts/{host.name}/drain?reason=repairs", method="POST")
            assert status == 200
            await until(lambda: is_running(supervisor, 2))
            assert host.place is None and remedies(supervisor)[-1] == "hot_swap"
            kept = [one for one in all_of_them if one is not host]
            assert any(kind is StepKind.CHECKPOINT for one in kept for _, _, kind in one.asked)
            assert (await asked(supervisor, f"/v1/hosts/{host.name}/uncordon", method="POST"))[0] == 200
            await until(lambda: states(supervisor)[host.name] is HostState.READY)
            assert (await asked(supervisor, "/v1/hosts/nobody/drain", method="POST"))[0] == 404
            status, _ = await asked(supervisor, "/v1/workloads/job/stop?reason=enough", method="POST")
            await until(lambda: all(one.place is None for one in all_of_them))
            _, text = await asked(supervisor, "/metrics")
            assert 'resiliency_supervisor_workload_state{state="stopped",workload="job"} 1.0' in text

    run(work)


def test_a_rank_that_hangs_is_found_by_comparing_hosts(tmp_path: Path) -> None:
    made = settings(tmp_path, hang=HangSettings(hang_floor_s=1.0))

    async def work() -> None:
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            a.shows, b.shows = ({"beats": beats, "quiet_s": 5.0, "longest_s": 0.5} for beats in (9, 8))
            await until(lambda: "restart_in_job" in remedies(supervisor))
            found = supervisor.store.events(workload="job")
            (hang,) = [event for event in found if event.kind == "hang_detected"]
            assert hang.fields["worker"] == b.place.node_rank and "no progress for 5 s" in hang.text

    run(work)


@pytest.mark.parametrize("seconds", [2.0], ids=lambda seconds: f"{seconds:g} s")
def test_a_slow_disk_makes_no_host_late_for_a_step_that_it_was_not_told_of(
    tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.supervisor.plans._PLACE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("resiliency.supervisor.service._AWAY_S", 0.2)

    async def work() -> None:
        made = settings(tmp_path, job(stop_timeout_s=0.0))
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            faultpoints.arm(f"supervisor.store.write:delay={seconds}@2")
            try:
                await a.saw(ObservationKind.WORKER_LOST, rank=0)
                await until(lambda: is_running(supervisor, 2))
            finally:
                faultpoints.arm("")
            assert remedies(supervisor) == ["start", "restart_in_job"]
            assert set(states(supervisor).values()) == {HostState.READY}

    run(work)


def test_a_supervisor_that_did_not_run_blames_nobody_for_a_late_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.supervisor.plans._PLACE_TIMEOUT_S", 1.0)

    async def work() -> None:
        made = settings(tmp_path, job(stop_timeout_s=0.0))
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            a.obeys = False
            await a.saw(ObservationKind.WORKER_LOST, rank=0)
            await until(lambda: b.desired is not None and b.desired.place.generation == 2)
            await asyncio.sleep(2 * PERIOD_S)  # nothing is being written any more
            a.obeys = True
            a.place, a.began_at = a.desired.place, a.step
            time.sleep(1.5)  # as if it were stopped: the event loop is the supervisor's as well
            supervisor.service._look()  # type: ignore[union-attr]  # before it has read what has come meanwhile
            await until(lambda: is_running(supervisor, 2))
            assert remedies(supervisor) == ["start", "restart_in_job"]
            assert set(states(supervisor).values()) == {HostState.READY}

    run(work)


def test_hosts_that_were_silent_before_a_restart_are_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        store, term = SqliteStore(str(tmp_path / "supervisor.db")), 1
        store.fence(term)
        gone = {
            name: Host(name=name, incarnation="1", state=HostState.SILENT, heard_s=0.0) for name in ("x", "y", "needed")
        }
        placed = Workload(spec=job(), state=WorkloadState.RUNNING, generation=3, places=("needed", "b"))
        store.commit(term, Changes(workloads={"job": placed}), gone)
        store.close()
        async with leading(settings(tmp_path)) as supervisor:
            assert states(supervisor) == {
                "x": HostState.SILENT,
                "y": HostState.SILENT,
                "needed": HostState.JOINING,
            }

    run(work)


@pytest.mark.parametrize(
    "text", ["\ud800 lost", "a\nWARNING forged\x1b[2J", "x" * 5000], ids=["half", "forged", "long"]
)
def test_any_text_of_a_host_can_be_stored_and_shown(tmp_path: Path, text: str) -> None:
    """A rank may die with an error that names a file whose name is not text."""

    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            await a.saw(ObservationKind.WORKER_LOST, rank=0, detail=text)
            await until(lambda: is_running(supervisor, 2))
            await a.report(problem=text)
            await until(lambda: states(supervisor)["a"] is HostState.QUARANTINED)
            for path in ("/", "/v1/status", "/v1/events", "/v1/explain/last", "/metrics"):
                status, found = await asked(supervisor, path)
                assert status == 200 and "\x1b" not in str(found)
            (event,) = [one for one in supervisor.store.events() if one.kind == "worker_lost"]
            assert event.text.isprintable() and len(event.text) < 2100

    run(work)


def test_a_step_that_no_rank_can_have_made_does_not_end_the_supervisor(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            leading(settings(tmp_path)) as supervisor,
            monitors(url_of(supervisor), "a", "b", "c") as all_of_them,
        ):
            await until(lambda: is_running(supervisor))
            liar = next(one for one in all_of_them if one.place is not None)
            for step in (10, 10**300, 10**307):
                liar.shows = {"beats": 1, "step": step, "own_steps": step, "own_s": 1.0}
                await liar.report()
                await asyncio.sleep(PERIOD_S)
            status, _ = await asked(supervisor, f"/v1/hosts/{liar.name}/drain", method="POST")
            assert status == 200
            await until(lambda: remedies(supervisor)[-1] == "hot_swap" and is_running(supervisor, 2))

    run(work)


def test_hosts_that_one_token_invents_are_bounded(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path, most_connections=3)) as supervisor:
            for number in range(3):
                async with FakeMonitor(url_of(supervisor), f"host-{number}") as one:
                    await until(lambda one=one: one.desired)
            async with FakeMonitor(url_of(supervisor), "host-9") as more:
                await until(lambda: more.refused)
            assert "3 hosts are known already" in more.refused and len(states(supervisor)) == 3
            async with FakeMonitor(url_of(supervisor), "host-1") as again:
                await until(lambda: again.desired)

    run(work)


def test_a_dry_run_leaves_ranks_alone_that_it_knows_nothing_of(tmp_path: Path) -> None:
    """It has a state file of its own, and stands where the real supervisor stood."""

    async def work() -> None:
        (tmp_path / "dry").mkdir()
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            place = a.place
        async with leading(settings(tmp_path / "dry", dry_run=True)) as supervisor:
            again = FakeMonitor(url_of(supervisor), "a")
            again.place = place
            async with again, FakeMonitor(url_of(supervisor), "c") as spare:
                await until(lambda: spare.asked and states(supervisor).get("a") is not None)
                await asyncio.sleep(4 * PERIOD_S)
                assert again.place == place and again.desires == []

    run(work)


def test_a_new_state_file_goes_on_above_the_generations_that_monitors_have_had(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "new").mkdir()
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            await a.saw(ObservationKind.WORKER_LOST, rank=0)
            await until(lambda: is_running(supervisor, 2))
            places = a.place, b.place
        async with leading(settings(tmp_path / "new")) as supervisor:
            a, b = FakeMonitor(url_of(supervisor), "a"), FakeMonitor(url_of(supervisor), "b")
            a.place, b.place = places
            async with a, b:
                await until(lambda: is_running(supervisor, 3))
                assert remedies(supervisor) == ["start"]

    run(work)


def lost(host: str, *, generation: int) -> Observation:
    return Observation(kind=ObservationKind.WORKER_LOST, host=host, workload="job", generation=generation, rank=0)


def test_a_rank_that_holds_up_the_others_is_named_in_the_history_and_the_job_goes_on(tmp_path: Path) -> None:
    made = settings(tmp_path, straggler=StragglerSettings(straggler_window_s=0.5))

    async def work() -> None:
        async with leading(made) as supervisor, monitors(url_of(supervisor), "a", "b", "c") as all_of_them:
            await until(lambda: is_running(supervisor))
            placed = [one for one in all_of_them if one.place is not None]
            slow = placed[-1]

            def show() -> None:
                steps = int(20 * (time.monotonic() - began))
                for one in placed:
                    one.shows = {"own_steps": steps, "own_s": steps * (0.03 if one is slow else 0.01)}

            began = time.monotonic() - 1

            def found() -> bool:
                show()
                return any("holds up the others" in one.text for one in supervisor.store.events(workload="job"))

            await until(found)
            (event,) = [one for one in supervisor.store.events(workload="job") if "holds up" in one.text]
            assert event.host == slow.name and "3.0 times the median" in event.text
            assert remedies(supervisor)[1:] == [] and is_running(supervisor)

    run(work)


class GivenBack:
    """A lease that another one holds, and then gives back; a file or an API server that cannot be asked in between."""

    looks_every_s, is_out_of_reach = 0.01, False

    def __init__(self) -> None:
        self.holder, self.answers = "", [("other", ""), ("other", "no answer"), ("", "")]

    def acquire(self) -> int | None:
        if self.answers:
            self.holder, problem = self.answers.pop(0)
            if problem:
                raise StateUnavailable(problem)
        return None

    def release(self) -> None:
        return


def test_who_stands_by_names_the_one_that_leads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lease = GivenBack()

    async def work() -> None:
        supervisor = Supervisor(settings(tmp_path, job()))
        supervisor.backend = lambda settings: (NoCluster(), lease)  # type: ignore[assignment, return-value]
        running = asyncio.create_task(supervisor.run())
        await until(lambda: not lease.answers and "nobody" in caplog.text)
        supervisor.stop()
        await running

    run(work)
    said = [one.getMessage() for one in caplog.records if "this one stands by" in one.getMessage()]
    assert said == ["other leads; this one stands by", "nobody yet leads; this one stands by"]
    assert "the lease cannot be looked at: no answer; this is tried again" in caplog.text
