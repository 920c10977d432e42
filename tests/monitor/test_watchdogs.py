"""Watchdogs find what is wrong, once, and do no harm when something is wrong with themselves."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from resiliency.monitor.watchdogs import ecc
from resiliency.monitor.watchdogs.base import Finding, Watchdog, WatchdogRunner
from resiliency.monitor.watchdogs.disk import DiskWatchdog
from resiliency.monitor.watchdogs.ecc import EccWatchdog
from resiliency.monitor.watchdogs.memory import MemoryWatchdog
from resiliency.monitor.watchdogs.registry import WatchdogSettings, make_watchdogs
from resiliency.monitor.watchdogs.xid import XidWatchdog
from resiliency.runtime.messages.monitor import Ask, Report, StepKind
from resiliency.runtime.messages.observations import DeviceClass, ObservationKind
from tests import entry_points
from tests.monitor.monitored import Host, on_host, place


class Scripted(Watchdog):
    """Finds what the test puts into ``finds``: findings, or an exception."""

    name = "scripted"
    interval_s = 0.02
    deadline_s = 5.0

    def __init__(self) -> None:
        self.finds: list[Finding] | Exception = []
        self.looks = 0
        self.passed_on: list[Finding] = []

    def look(self) -> list[Finding]:
        self.looks += 1
        if isinstance(self.finds, Exception):
            raise self.finds
        return self.finds

    def reported(self, finding: Finding) -> None:
        self.passed_on.append(finding)


class Hanging(Scripted):
    name = "hanging"
    deadline_s = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def look(self) -> list[Finding]:
        self.looks += 1
        self.let_go.wait(20)
        return [fault()]


def fault(device: str = "a", code: str = "x", device_class: DeviceClass | None = DeviceClass.SOFT) -> Finding:
    return Finding(code=code, device=device, device_class=device_class, detail=f"{code} of {device}")


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


# ---- how they are run


def test_each_device_and_code_has_a_cooldown_of_its_own() -> None:
    async def scenario() -> None:
        watchdog, said = Scripted(), []
        runner = WatchdogRunner(watchdog, said.append)
        watchdog.finds = [fault(device) for device in "abcd"] + [fault("a", "y")]
        await runner.look_now()
        await runner.look_now()
        assert said == watchdog.finds == watchdog.passed_on, "one silences another, or is said twice"
        watchdog.cooldown_s = 0.0
        await runner.look_now()
        assert len(said) == 10
        runner.close()

    run(scenario)


def test_one_that_throws_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        watchdog, said = Scripted(), []
        watchdog.finds = ZeroDivisionError("of the watchdog")
        runner = WatchdogRunner(watchdog, said.append)
        for _ in range(3):
            assert await runner.look_now() == ""
        assert caplog.text.count("of the watchdog\n") <= 1 and caplog.text.count("watchdog scripted fails") == 1
        watchdog.finds = [fault()]
        await runner.look_now()
        assert said == [fault()] and "answers again" in caplog.text
        watchdog.finds = ["no finding"]  # type: ignore[list-item]
        await runner.look_now()
        assert "TypeError" in caplog.text
        runner.close()

    caplog.set_level(logging.INFO)
    run(scenario)


def test_one_that_throws_is_tried_later_and_later() -> None:
    async def scenario() -> None:
        watchdog = Scripted()
        watchdog.finds = OSError("again")
        runner = WatchdogRunner(watchdog, lambda finding: None)
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert 2 <= watchdog.looks <= 6
        runner.close()

    run(scenario)


def test_one_that_hangs_is_not_asked_again_and_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        watchdog, said = Hanging(), []
        runner = WatchdogRunner(watchdog, said.append)
        assert "has not answered" in await runner.look_now()
        for _ in range(3):
            assert await runner.look_now() == ""
        assert "has not answered" in await runner.look_now(0.05), "a check hears of it each time"
        assert watchdog.looks == 1 and caplog.text.count("not asked again") == 1
        watchdog.let_go.set()
        await runner.look_now(5.0)
        assert watchdog.looks == 1 and said == [fault()], "what it has found late is not lost"
        runner.close()

    run(scenario)


def test_those_of_a_name_that_is_not_known_are_refused() -> None:
    settings = WatchdogSettings(folders=("/tmp",))
    assert [each.name for each in make_watchdogs([], settings)] == ["xid", "ecc", "disk", "memory", "notice"]
    (made,) = make_watchdogs([f"{__name__}:Scripted"], settings)
    assert made.name == "scripted"
    for name, said in [
        ("nothing", "there is no watchdog 'nothing'"),
        ("no.such.module:A", "cannot be made"),
        (f"{__name__}:Finding", "cannot be made"),
        ("collections:OrderedDict", "derive it from Watchdog"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make_watchdogs([name], settings)


def test_one_that_is_installed_is_found_by_its_entry_point_and_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    described = site / "of_the_user-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: of-the-user\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[resiliency.watchdogs]\nof-the-user = of_the_user_watchdog:Mine\n")
    (site / "of_the_user_watchdog.py").write_text(
        "from resiliency.monitor.watchdogs.base import Finding, Watchdog\n"
        "class Mine(Watchdog):\n"
        "    name, interval_s = 'mine', 0.02\n"
        "    def look(self):\n"
        "        return [Finding(code='unmounted', detail='/data is not mounted')]\n"
    )
    # What is installed is looked up once in a process of tests.
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points._of_all.__wrapped__)
    with pytest.raises(ConfigError, match="there is no watchdog 'of-the-user'"):
        make_watchdogs(["of-the-user"], WatchdogSettings())
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "of_the_user_watchdog", raising=False)

    async def scenario(host: Host) -> None:
        host.watchdogs = make_watchdogs(["of-the-user"], WatchdogSettings())
        host.start_monitor()
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.HOST_UNHEALTHY and "/data is not mounted" in seen.detail

    try:
        on_host(tmp_path, scenario)
        with pytest.raises(ConfigError, match="there are .*of-the-user"):
            make_watchdogs(["nothing"], WatchdogSettings())
    finally:
        sys.modules.pop("of_the_user_watchdog", None)


# ---- in a monitor


def test_a_spare_is_watched_too_and_a_broken_device_fails_its_check_until_it_is_reset(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        kernel = tmp_path / "kernel"
        kernel.write_text("NVRM: Xid (PCI:0000:01:00): 79, long ago\n")
        watchdog = XidWatchdog(str(kernel))
        watchdog.interval_s = 0.02
        host.watchdogs = [watchdog]
        host.start_monitor(reset_command="/bin/true")
        await host.supervisor.want(asks=(Ask(plan=0, at=0, kind=StepKind.VERIFY, timeout_s=5),))
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert host.supervisor.answers[-1].problem == ""
        with kernel.open("a") as file:
            file.write("NVRM: Xid (PCI:0000:3b:00): 95, pid=1\nNVRM: Xid (PCI:0000:3b:00): 45, pid=1\n")
        (seen,) = await host.supervisor.observed(1)
        assert (seen.kind, seen.device, seen.device_class) == (
            ObservationKind.DEVICE_FAULT,
            "0000:3b:00",
            DeviceClass.RESET,
        )
        assert seen.workload == "" and seen.generation == 0
        await host.supervisor.report(lambda one: "XID 95" in one.problem)
        await host.stop_monitor()
        host.watchdogs = [XidWatchdog(str(kernel))]
        host.start_monitor(reset_command="/bin/true")  # it remembers, and reads nothing twice
        await host.launchers.next("ended")
        await host.launchers.next("connected")  # a launcher of which nobody reads what it says would wait
        await host.supervisor.want(asks=(Ask(plan=1, at=0, kind=StepKind.VERIFY, timeout_s=5),))
        await host.supervisor.until(lambda: [one for one in host.supervisor.answers if one.plan == 1])
        assert "XID 95" in host.supervisor.answers[-1].problem and len(host.supervisor.observations) == 1
        await host.supervisor.want(asks=(Ask(plan=2, at=0, kind=StepKind.RESET_DEVICES, timeout_s=5),))
        await host.supervisor.until(lambda: [one for one in host.supervisor.answers if one.plan == 2])
        await host.supervisor.want(asks=(Ask(plan=3, at=0, kind=StepKind.VERIFY, timeout_s=5),))
        await host.supervisor.until(lambda: [one for one in host.supervisor.answers if one.plan == 3])
        assert host.supervisor.answers[-1].problem == ""

    on_host(tmp_path, scenario)


def test_a_host_that_is_unhealthy_says_so_as_long_as_it_is(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        watchdog = Scripted()
        watchdog.finds = [fault("", "disk", None), Finding(code="slow", detail="a warning", warning=True)]
        host.watchdogs = [watchdog]
        host.start_monitor()
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.HOST_UNHEALTHY
        await host.supervisor.report(lambda one: "disk" in one.problem and "warning" not in one.problem)
        watchdog.finds = []
        await host.supervisor.report(lambda one: not one.problem, since=len(host.supervisor.heard))

    on_host(tmp_path, scenario)


def test_a_watchdog_that_throws_or_hangs_leaves_the_monitor_working(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        throwing, hanging = Scripted(), Hanging()
        throwing.finds = RuntimeError("broken")
        host.watchdogs = [throwing, hanging]
        host.start_monitor()
        await host.with_place(1)
        await host.supervisor.want(place=place(1), asks=(Ask(plan=0, at=0, kind=StepKind.VERIFY, timeout_s=1.0),))
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert host.supervisor.answers[0].problem == "watchdog hanging has not answered within 0.1 s"
        hanging.let_go.set()

    on_host(tmp_path, scenario)


# ---- those that come with the library


def test_ecc_counts_from_what_was_there_and_says_what_was_not_passed_on_again(tmp_path: Path) -> None:
    counters = tmp_path / "counters"
    counters.write_text("00000000:3B:00.0 5\n0000:5e:00 0\n")
    watchdog = EccWatchdog(str(counters))
    assert watchdog.look() == []
    counters.write_text("00000000:3B:00.0 7\n0000:5e:00 0\n")
    (found,) = watchdog.look()
    assert found.device == "0000:3b:00" and "2 memory errors" in found.detail
    counters.write_text("00000000:3B:00.0 8\n0000:5e:00 1\n")
    again = watchdog.look()  # the first was not passed on
    assert [one.detail[0] for one in again] == ["3", "1"]
    watchdog.reported(again[0])
    assert [one.device for one in watchdog.look()] == ["0000:5e:00"]
    counters.write_text("00000000:3B:00.0 2\n0000:5e:00 0\n")  # the driver was started again
    assert [one.detail[0] for one in watchdog.look()] == ["2"]


def test_ecc_without_a_driver_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ecc.shutil, "which", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    caplog.set_level(logging.INFO)
    watchdog = EccWatchdog()
    assert watchdog.look() == watchdog.look() == []
    assert caplog.text.count("not watched") == 1


def test_ecc_reads_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    counts = tmp_path / "counts"
    program.write_text(f"#!/bin/sh\ncat {counts}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    counts.write_text("00000000:3B:00.0, 0\n00000000:5E:00.0, [N/A]\n")
    watchdog = EccWatchdog()
    assert watchdog.look() == []
    counts.write_text("00000000:3B:00.0, 1\n00000000:5E:00.0, [N/A]\n")
    (found,) = watchdog.look()
    assert (found.device, found.device_class) == ("0000:3b:00", DeviceClass.RESET)


def test_a_disk_that_is_full_or_gone_is_found_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    assert DiskWatchdog([str(tmp_path)], min_free_bytes=0).look() == []
    assert not list(tmp_path.iterdir())
    (full,) = DiskWatchdog([str(tmp_path)], min_free_bytes=1 << 60).look()
    (gone,) = DiskWatchdog([str(tmp_path / "gone")], min_free_bytes=0).look()
    assert "GB free" in full.detail and "cannot be written" in gone.detail
    assert full.takes_host_out and full.code != gone.code
    both = DiskWatchdog([str(tmp_path), str(tmp_path / "gone")], min_free_bytes=1 << 60).look()
    assert len({one.code for one in both}) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_the_host_and_of_each_group_above(tmp_path: Path, version: int) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:    1024 kB\n")
    watchdog = MemoryWatchdog(min_available_bytes=512 * 1024, root=str(tmp_path))
    assert watchdog.look() == []
    if version == 2:
        put("proc/self/cgroup", "0::/pod/container\n")
        base, names, back = "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        put(f"{base}/pod/container/memory.max", "max\n")
        put(f"{base}/pod/container/memory.current", "100\n")
    else:
        put("proc/self/cgroup", "5:cpu,memory:/pod/container\n1:name=systemd:/x\n")
        base, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        back = "total_inactive_file"
        put(f"{base}/pod/container/{names[0]}", "9223372036854771712\n")
        put(f"{base}/pod/container/{names[1]}", "100\n")
    put(f"{base}/pod/{names[0]}", "1000000\n")
    put(f"{base}/pod/{names[1]}", "900000\n")
    put(f"{base}/pod/memory.stat", f"{back} 10\n")
    (found,) = watchdog.look()
    assert "control group" in found.detail and found.takes_host_out
    put(f"{base}/pod/memory.stat", f"active_file 1\n{back} 800000\n")
    assert watchdog.look() == []
    put("proc/pressure/memory", "some avg10=0.00 avg60=99.00 avg300=0 total=0\nfull avg10=0.00 avg60=77.50 total=0\n")
    (found,) = watchdog.look()
    assert found.warning and "78 %" in found.detail and not found.takes_host_out


def test_a_monitor_that_only_watches_starts_nothing_and_its_own_end_is_no_problem_of_the_machine(
    tmp_path: Path,
) -> None:
    """Else an update of the watchdogs would empty every machine."""

    async def scenario(host: Host) -> None:
        watchdog = Scripted()
        host.watchdogs = [watchdog]
        host.start_monitor(watch_only=True)
        await host.supervisor.report(lambda one: True)
        watchdog.finds = [Finding(code="79", detail="it is gone", device="gpu-1", device_class=DeviceClass.SWAP)]
        (seen,) = await host.supervisor.observed(1)
        assert (seen.kind, seen.host, seen.device) == (ObservationKind.DEVICE_FAULT, "host-a", "gpu-1")
        lasting = await host.supervisor.report(lambda one: one.problem)
        assert await host.stop_monitor() == 0
        reports = [one for one in host.supervisor.heard if isinstance(one, Report)]
        assert reports[-1].problem == lasting.problem and not host.launchers.drain()

    on_host(tmp_path, scenario)
