"""A host monitor makes true what the supervisor wants, and nothing that it does not want."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from resiliency.errors import ConfigError
from resiliency.monitor.settings import MonitorSettings
from resiliency.runtime.messages.monitor import Ask, Desired, Report, StepKind, pack
from resiliency.runtime.messages.observations import Observation, ObservationKind
from tests.monitor.monitored import DEADLINE_S, TOKEN, Host, on_host, place
from tests.processes import wait_ended


def lost(host: Host) -> list[Observation]:
    return [one for one in host.supervisor.observations if one.kind is ObservationKind.WORKER_LOST]


def test_a_place_reaches_the_launcher_and_its_master_the_supervisor(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        hello = await host.supervisor.until(lambda: host.supervisor.heard[:1])
        assert hello[0].host == "host-a" and host.supervisor.tokens == [f"Bearer {TOKEN}"]
        await host.supervisor.want(place=place(1, replicas=2, replicas_before=3))
        told = (await host.launchers.next("told", kind="place"))["message"]
        assert (told["generation"], told["node_rank"], told["nodes"], told["master"]) == (1, 0, 2, "")
        assert (told["workload"], told["replicas"], told["replicas_before"]) == ("job", 2, 3)
        report = await host.supervisor.report(lambda one: one.master)
        assert (report.workload, report.generation, report.master) == ("job", 1, "127.0.0.1:29500")
        assert (report.node_rank, report.nodes, report.replicas) == (0, 2, 2), (
            "by which another supervisor takes it over"
        )
        await host.supervisor.want(place=place(1, master="127.0.0.1:29500"))
        assert (await host.launchers.next("told", kind="place"))["message"]["master"] == "127.0.0.1:29500"

    on_host(tmp_path, scenario)


def test_how_many_devices_the_driver_has_is_said_with_each_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tmp_path / "gpus"
    monkeypatch.setattr("resiliency.monitor.checks._GPUS", str(gpus))

    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.supervisor.report(lambda one: one.devices == 0)
        for at in range(3):
            (gpus / f"0000:0{at}:00.0").mkdir(parents=True)
        await host.supervisor.report(lambda one: one.devices == 3, since=len(host.supervisor.heard))

    on_host(tmp_path, scenario)


def test_a_file_says_whether_ranks_could_be_started_at_once(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        ready = Path(host.settings.state_dir, "ready")

        async def until_it_is(there: bool) -> None:
            while ready.exists() is not there:
                await asyncio.sleep(0.005)

        host.start_monitor()
        pid = (await host.launchers.next("started"))["pid"]
        await asyncio.wait_for(until_it_is(True), DEADLINE_S)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(until_it_is(False), DEADLINE_S)
        await asyncio.wait_for(until_it_is(True), DEADLINE_S)
        await host.stop_monitor()
        ready.touch()  # of a life before, in the same pod
        host.start_monitor(command=("/bin/sleep", "100"))  # it never says that it is warm
        await asyncio.wait_for(until_it_is(False), DEADLINE_S)

    on_host(tmp_path, scenario)


def test_what_happens_is_said_before_the_period_is_over(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.supervisor.period_s = 60.0
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="lost", generation=1, rank=1, signal=9, reason="killed")
        host.launchers.say(pid, kind="lost", generation=1, rank=0, exit_code=3)
        seen = await host.supervisor.observed(2)
        assert [(one.rank, one.generation, one.workload, one.exit_code, one.detail) for one in seen] == [
            (1, 1, "job", -9, "signal 9: killed"),
            (0, 1, "job", 3, "exit status 3"),
        ]
        assert len([one for one in host.supervisor.heard if isinstance(one, Report)]) < 10

    on_host(tmp_path, scenario)


def test_pages_come_with_reports_and_those_of_another_generation_do_not(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(2))["pid"]
        page = {"rank": 0, "beats": 7, "step": 6, "phase": "training", "watched": True, "quiet_s": 0.1, "new_field": 1}
        host.launchers.say(pid, kind="pages", generation=1, ranks=[{"rank": 5}])
        host.launchers.say(pid, kind="pages", generation=2, ranks=[{k: v for k, v in page.items() if k != "new_field"}])
        report = await host.supervisor.report(lambda one: one.ranks)
        assert [(one.rank, one.step, one.watched) for one in report.ranks] == [(0, 6, True)]

    on_host(tmp_path, scenario)


def test_a_launcher_that_dies_loses_all_its_ranks_and_is_started_again_but_not_given_the_generation(
    tmp_path: Path,
) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        told = await host.with_place(1)
        os.kill(told["pid"], signal.SIGKILL)
        seen = await host.supervisor.observed(2)
        assert {one.rank for one in seen} == {0, 1} and "SIGKILL" in seen[0].detail
        await host.launchers.next("connected")
        second = host.launchers.started[-1]
        assert second != told["pid"]
        await host.supervisor.want(place=place(2))
        again = await host.launchers.next("told", kind="place")
        assert again["pid"] == second and again["message"]["generation"] == 2, "generation 1 was given twice"

    on_host(tmp_path, scenario)


def test_the_last_words_of_a_launcher_are_heard(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        os.kill(pid, signal.SIGSTOP)
        host.launchers.say(pid, kind="lost", generation=1, rank=0, exit_code=3)
        host.launchers.do(pid, do="exit", status=3)
        monitor = host.monitor
        assert monitor is not None
        link = monitor._link  # it hears nothing until the process has ended, as on a host that is busy
        asyncio.get_running_loop().remove_reader(link._launcher)
        os.kill(pid, signal.SIGCONT)
        seen = await host.supervisor.observed(2)
        assert [(one.rank, one.detail.split(",")[0]) for one in seen] == [
            (0, "exit status 3"),
            (1, "its launcher ended with status 3"),
        ]

    on_host(tmp_path, scenario)


def test_no_place_ends_the_ranks_and_the_launcher_stays(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        told = await host.with_place(1)
        await host.supervisor.want(place=None)
        await host.launchers.next("told", kind="no_place")
        await host.supervisor.report(lambda one: one.generation == 0, since=len(host.supervisor.heard))
        assert not lost(host), "ranks that were told to end are no news"
        again = await host.with_place(2)
        assert again["pid"] == told["pid"]

    on_host(tmp_path, scenario)


def test_a_generation_that_was_withdrawn_is_not_given_again(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.with_place(1)
        await host.supervisor.want(place=None)
        await host.launchers.next("told", kind="no_place")
        await host.supervisor.want(place=place(1))
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.WORKER_LOST and "told to leave" in seen.detail
        assert not [one for one in host.launchers.drain()[-1:] if one.get("message", {}).get("kind") == "place"]

    on_host(tmp_path, scenario)


def test_an_older_generation_is_not_obeyed(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.with_place(5)
        await host.supervisor.want(place=place(4), asks=(Ask(plan=0, at=0, kind=StepKind.VERIFY, timeout_s=5),))
        await host.supervisor.until(lambda: host.supervisor.answers)  # it has been taken note of
        await host.supervisor.want(place=place(6))
        await host.launchers.next("told", kind="place", generation=6)
        told = [one["message"] for one in host.launchers.events if one["event"] == "told"]
        # 5 may be told twice, once with the address that the launcher has said itself.
        assert {one["generation"] for one in told if one["kind"] == "place"} == {5, 6}

    on_host(tmp_path, scenario)


def test_a_lower_term_is_not_obeyed_also_after_a_restart_of_the_monitor(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.supervisor.term = 7
        host.start_monitor()
        await host.with_place(1)
        await host.stop_monitor()
        host.supervisor.term = 6
        host.supervisor.desired = Desired(term=6, place=place(2))
        host.start_monitor()
        count = host.supervisor.connections
        await host.supervisor.until(lambda: host.supervisor.connections >= count + 2)  # it hangs up, and tries again
        host.supervisor.term = 7
        host.supervisor.desired = Desired(term=7, place=place(3))
        await host.launchers.next("told", kind="place", generation=3)
        assert not [one for one in host.launchers.events if one.get("message", {}).get("generation") == 2]

    on_host(tmp_path, scenario)


def test_a_desire_of_a_lower_term_on_a_good_connection_ends_it(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.supervisor.term = 3
        host.start_monitor()
        await host.with_place(1)
        count = host.supervisor.connections
        await host.supervisor.say(pack(Desired(term=2, place=place(9))))
        await host.supervisor.until(lambda: host.supervisor.connections > count)
        await host.supervisor.want(place=place(2))
        assert (await host.launchers.next("told", kind="place", generation=2)) and not [
            one for one in host.launchers.events if one.get("message", {}).get("generation") == 9
        ]

    on_host(tmp_path, scenario)


def test_a_fresh_place_gets_a_new_launcher_once(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        first = (await host.with_place(1))["pid"]
        second = (await host.with_place(2, fresh=True))["pid"]
        assert second != first
        await host.supervisor.want(place=place(2, fresh=True, master="127.0.0.1:1"))
        told = await host.launchers.next("told", kind="place")
        assert told["pid"] == second and host.launchers.started == [first, second]
        assert not lost(host), "ranks that were to end are no news"

    on_host(tmp_path, scenario)


def test_a_launcher_that_had_no_place_yet_is_fresh_enough(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.launchers.next("connected")
        told = await host.with_place(1, fresh=True)
        assert host.launchers.started == [told["pid"]]

    on_host(tmp_path, scenario)


def test_another_workload_gets_another_launcher(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        first = (await host.with_place(5))["pid"]
        await host.supervisor.want(place=place(1, workload="other"))
        told = await host.launchers.next("told", kind="place", workload="other")
        assert told["pid"] != first

    on_host(tmp_path, scenario)


def test_a_completed_job_ends_the_launcher_and_is_not_started_again(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor(exit_when_completed=True)
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="ended", generation=1, preempted=False)
        await host.supervisor.report(lambda one: one.ended)
        await host.supervisor.want(completed=True)
        await host.launchers.next("told", kind="completed")
        assert await host.ended() == 0
        assert host.launchers.drain() and len(host.launchers.started) == 1 and not lost(host)

    on_host(tmp_path, scenario)


def test_ranks_that_have_finished_run_again_in_the_next_generation(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="ended", generation=1, preempted=True)
        report = await host.supervisor.report(lambda one: one.ended)
        assert report.preempted
        await host.with_place(2)
        report = await host.supervisor.report(lambda one: one.generation == 2)
        assert not report.ended and not report.preempted

    on_host(tmp_path, scenario)


def test_ranks_that_lost_a_peer_are_news_only_when_nobody_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.monitor.host_monitor._LOST_PEERS_S", 0.3)

    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="lost_peers", generation=1, ranks=[0, 1])
        host.launchers.say(pid, kind="waiting", generation=1)
        await host.with_place(2)
        await asyncio.sleep(0.4)
        assert not host.supervisor.observations
        host.launchers.say(pid, kind="lost_peers", generation=2, ranks=[0, 1], ended=[2])
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.NO_PROGRESS
        assert seen.detail == "ranks 0, 1 have lost a peer, and rank 2 ended with status 0 before the others"

    on_host(tmp_path, scenario)


def test_a_launcher_that_waits_without_a_reason_has_lost_its_ranks(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="waiting", generation=1)
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.WORKER_LOST and seen.rank is None and seen.generation == 1

    on_host(tmp_path, scenario)


def test_a_launcher_that_cannot_start_is_a_problem_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resiliency.monitor.host_monitor._FIRST_BACKOFF_S", 0.01)

    async def scenario(host: Host) -> None:
        host.start_monitor(command=("/bin/sh", "-c", "exit 7"))
        report = await host.supervisor.report(lambda one: one.problem)
        assert "has died" in report.problem

    on_host(tmp_path, scenario)


def test_sigterm_gives_the_launcher_its_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        told = await host.with_place(1)
        processes = [psutil.Process(int(pid)) for pid in [told["pid"], *told["ranks"].values()]]
        assert await host.stop_monitor() == 0
        assert (await host.launchers.next("ended"))["pid"] == told["pid"]
        assert not wait_ended(processes, timeout_s=5)
        reports = [one for one in host.supervisor.heard if isinstance(one, Report)]
        assert "told to end" in reports[-1].problem

    on_host(tmp_path, scenario)


def test_a_launcher_that_does_not_end_is_killed_and_so_are_ranks_that_nobody_else_ends(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        rank = await asyncio.create_subprocess_exec("sleep", "600")  # as one that is not forked: it outlives
        host.start_monitor(stop_s=0.2)
        pid = (await host.with_place(1))["pid"]
        host.launchers.say(pid, kind="running", generation=1, ranks={"0": [0, rank.pid]})
        host.launchers.say(pid, kind="master", generation=1, address="here:2")
        await host.supervisor.report(lambda one: one.master == "here:2")
        os.kill(pid, signal.SIGSTOP)
        await host.stop_monitor()
        assert await asyncio.wait_for(rank.wait(), 5) == -signal.SIGKILL

    on_host(tmp_path, scenario)


def test_a_second_monitor_of_a_state_folder_is_refused(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.launchers.next("connected")
        from resiliency.monitor.connection import ConnectionSettings
        from resiliency.monitor.host_monitor import HostMonitor

        second = HostMonitor(host.settings, ConnectionSettings(urls=(host.supervisor.url,)))
        with pytest.raises(ConfigError, match="another host monitor"):
            await second.run()

    on_host(tmp_path, scenario)


def test_a_generation_that_is_not_obeyed_is_answered_with_the_one_that_was_had(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.supervisor.period_s = 60.0
        host.start_monitor()
        await host.with_place(7)
        await host.supervisor.want(place=None)
        await host.launchers.next("told", kind="no_place")
        await host.supervisor.report(lambda one: one.generation == 0)
        since = len(host.supervisor.heard)
        await host.supervisor.want(place=place(1))
        report = await host.supervisor.report(lambda one: one.generation, since=since)
        assert (report.workload, report.generation, report.ranks) == ("job", 7, ())

    on_host(tmp_path, scenario)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "a\nb", "\N{LATIN SMALL LETTER A WITH DIAERESIS}", "a" * 254])
def test_a_name_that_no_supervisor_takes_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="no supervisor takes"):
        MonitorSettings(host=name, command=(), state_dir="state")
