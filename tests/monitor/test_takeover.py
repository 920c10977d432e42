"""A monitor that is killed leaves its launcher to the next one, which starts none of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from resiliency.monitor.launcher_process import adopt_launcher, find_launcher, start_launcher
from resiliency.monitor.state import StateFolder
from resiliency.runtime.messages.monitor import Desired, Hello
from resiliency.runtime.messages.observations import ObservationKind
from tests.monitor.monitored import DEADLINE_S, Host, on_host, place
from tests.processes import wait_ended


@asynccontextmanager
async def monitor_process(host: Host):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("monitor_process.py"))),
        *(json.dumps(asdict(host.settings)), host.supervisor.url, host.token_file),
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 5)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await asyncio.wait_for(process.wait(), DEADLINE_S)


def test_ranks_outlive_a_killed_monitor_and_the_next_one_takes_them_over(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        async with monitor_process(host) as first:
            told = await host.with_place(1)
            await kill(first)
        await host.launchers.next("disconnected")
        ranks = [psutil.Process(pid) for pid in told["ranks"].values()]
        heard = len(host.supervisor.heard)
        async with monitor_process(host):
            await host.launchers.next("connected")
            report = await host.supervisor.report(lambda one: one.generation, since=heard)
            assert (report.workload, report.generation) == ("job", 1)
            hellos = [one for one in host.supervisor.heard if isinstance(one, Hello)]
            assert hellos[0].incarnation != hellos[-1].incarnation
            assert all(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
            again = await host.with_place(2)
            assert again["pid"] == told["pid"] and host.launchers.started == [told["pid"]]
            assert not host.supervisor.observations
            # It is watched as if it had been started here.
            os.kill(told["pid"], signal.SIGKILL)
            seen = await host.supervisor.observed(2)
            assert {one.rank for one in seen} == {0, 1}
            await host.launchers.next("started")
        launchers = []
        for pid in host.launchers.started[1:]:
            with suppress(psutil.NoSuchProcess):  # it ends just now
                launchers.append(psutil.Process(pid))
        assert not wait_ended(launchers, timeout_s=5)

    on_host(tmp_path, scenario)


def test_a_launcher_that_dies_without_a_monitor_has_lost_its_ranks(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        told = await host.with_place(1)
        await host.abandon_monitor()
        os.kill(told["pid"], signal.SIGKILL)
        assert not wait_ended([psutil.Process(told["pid"])], timeout_s=5)
        host.start_monitor()
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.WORKER_LOST and seen.generation == 1 and "gone" in seen.detail
        new = await host.launchers.next("connected")
        await host.supervisor.want(place=place(2))
        given = await host.launchers.next("told", kind="place")
        assert given["pid"] == new["pid"] != told["pid"] and given["message"]["generation"] == 2
        os.waitpid(told["pid"], 0)  # it is a child of this process, in which the monitor before was

    on_host(tmp_path, scenario)


def test_what_a_launcher_says_to_nobody_is_said_to_the_next_monitor(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(3))["pid"]
        await host.abandon_monitor()
        await host.launchers.next("disconnected")
        host.supervisor.desired = Desired(term=1, place=place(3))
        host.start_monitor()
        await host.launchers.next("connected")
        host.launchers.say(pid, kind="lost", generation=3, rank=1, signal=11)
        (seen,) = await host.supervisor.observed(1)
        assert (seen.rank, seen.generation, seen.detail) == (1, 3, "signal 11")

    on_host(tmp_path, scenario)


@pytest.mark.parametrize("notes", [None, "garbage{"], ids=["no notes", "notes that cannot be read"])
def test_a_monitor_that_has_lost_its_notes_finds_the_launcher(tmp_path: Path, notes: str | None) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        told = await host.with_place(1)
        await host.abandon_monitor()
        file = tmp_path / "state" / "monitor.json"
        file.unlink() if notes is None else file.write_text(notes)
        host.start_monitor()
        await host.launchers.next("connected")
        again = await host.with_place(2)
        assert again["pid"] == told["pid"] and host.launchers.started == [told["pid"]]

    on_host(tmp_path, scenario)


def test_a_launcher_whose_start_was_not_written_down_never_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        mark = tmp_path / "began"
        assert start_launcher(["touch", str(mark)], dict(os.environ), lambda identity: False) is None
        assert not mark.exists()

    asyncio.run(scenario())


def test_a_number_that_now_means_another_process_is_not_adopted(tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = start_launcher(["sleep", "600"], dict(os.environ), lambda identity: True)
        identity = launcher.identity
        try:
            adopted = adopt_launcher(identity)
            assert adopted is not None
            adopted.let_go()
            import dataclasses

            assert adopt_launcher(dataclasses.replace(identity, started=identity.started + 1)) is None
            assert adopt_launcher(dataclasses.replace(identity, boot="another")) is None
        finally:
            await launcher.end(5)
        assert adopt_launcher(identity) is None
        assert launcher.status == -signal.SIGTERM and "SIGTERM" in launcher.how_it_ended

    asyncio.run(scenario())


def test_the_name_of_the_socket_is_of_the_folder_and_the_host(tmp_path: Path) -> None:
    names = {StateFolder(str(tmp_path / a), b).socket_name for a in "xy" for b in "xy"}
    assert len(names) == 4 and StateFolder(f"{tmp_path}/./x", "x").socket_name in names
    assert find_launcher(StateFolder(str(tmp_path), "z").socket_name) is None


def test_ranks_that_nobody_else_ends_do_not_outlive_both_launcher_and_monitor(tmp_path: Path) -> None:
    """Ranks that are not forked (--no-standby): the kernel leaves them when their launcher is killed."""

    async def scenario(host: Host) -> None:
        rank = await asyncio.create_subprocess_exec("sleep", "600")
        try:
            async with monitor_process(host) as monitor:
                pid = (await host.with_place(1))["pid"]
                host.launchers.say(pid, kind="running", generation=1, ranks={"0": [0, rank.pid]})
                host.launchers.say(pid, kind="master", generation=1, address="here:2")
                await host.supervisor.report(lambda one: one.master == "here:2")
                await kill(monitor)
                os.kill(pid, signal.SIGKILL)
            host.start_monitor()
            assert await asyncio.wait_for(rank.wait(), 10) == -signal.SIGKILL
        finally:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()

    on_host(tmp_path, scenario)
