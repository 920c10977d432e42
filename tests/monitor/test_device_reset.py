"""A device that asks for a reset: a real supervisor and a real monitor, with a launcher of the test's."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from resiliency.monitor.connection import ConnectionSettings
from resiliency.monitor.host_monitor import HostMonitor
from resiliency.monitor.settings import MonitorSettings
from resiliency.monitor.watchdogs.base import Finding, Watchdog
from resiliency.runtime.messages.observations import DeviceClass
from resiliency.supervisor.model import HostState, WorkloadState
from tests.monitor.monitored import Launchers
from tests.supervisor.fake_monitors import job, leading, settings, until, url_of


class Device(Watchdog):
    """One device that is broken when the test says so."""

    name = "device"
    interval_s = 0.05
    broken = False

    def look(self) -> list[Finding]:
        if not self.broken:
            return []
        return [Finding(code="48", device="0000:3b:00", device_class=DeviceClass.RESET, detail="a double bit error")]


def test_a_device_that_asks_for_a_reset_gets_it_and_its_host_keeps_its_place(tmp_path: Path) -> None:
    device = Device()
    program = tmp_path / "reset"
    program.write_text(f"#!/bin/sh\necho $RESILIENCY_DEVICES >> {tmp_path}/resets\n")
    program.chmod(0o700)

    async def train(launchers: Launchers) -> None:
        """Pages of whatever generation the launcher was given last."""
        beats = 0
        while True:
            beats += 1
            told = [one for one in launchers.drain() if one["event"] == "told" and one["message"]["kind"] == "place"]
            if told and told[-1]["pid"] == launchers.started[-1]:
                page = {"rank": 0, "beats": beats, "step": beats, "phase": "training", "watched": True}
                with suppress(OSError):  # it has just ended
                    launchers.say(
                        told[-1]["pid"], kind="pages", generation=told[-1]["message"]["generation"], ranks=[page]
                    )
            await asyncio.sleep(0.05)

    async def work() -> None:
        launchers = Launchers(tmp_path)
        async with leading(settings(tmp_path, job(replicas=1))) as supervisor:
            monitor = HostMonitor(
                MonitorSettings(
                    host="a",
                    command=launchers.command,
                    state_dir=str(tmp_path / "state"),
                    reset_command=str(program),
                    grace_s=3.0,
                    stop_s=3.0,
                ),
                ConnectionSettings(urls=(url_of(supervisor),)),
                [device],
            )
            running, training = asyncio.create_task(monitor.run()), asyncio.create_task(train(launchers))
            try:
                service = supervisor.service
                assert service is not None

                def runs(generation: int) -> bool:
                    workload = service.decided.workloads.get("job")
                    return (
                        workload is not None
                        and workload.state is WorkloadState.RUNNING
                        and workload.generation == generation
                    )

                await until(lambda: runs(1))
                device.broken = True
                await until(lambda: monitor._watchdogs.faulty())
                device.broken = False
                await until(lambda: runs(2))
                plans = [str(plan.remedy.kind) for plan in service.controller.plans.values()]
                assert plans == ["start", "reset_devices"]
                assert (tmp_path / "resets").read_text() == "0000:3b:00\n"
                assert service.sensor.state_of("a") is HostState.READY and not monitor._watchdogs.problems()
            finally:
                training.cancel()
                monitor.stop()
                await asyncio.wait_for(running, 15)
                launchers.close()

    asyncio.run(asyncio.wait_for(work(), 60))
