"""The real command: killed at each step, two of them, one stopped and revived."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from resiliency.runtime.messages.observations import ObservationKind
from tests.ports import free_port

from .fake_monitors import PERIOD_S, FakeMonitor, until
from .supervisor_command import Command, commands, run, runs, stored

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_supervisors")]


@pytest.mark.parametrize(
    "point",
    [
        # Of the writes about a lost rank: the incident, the plan with its place, the place taken, the first step.
        "supervisor.store.write:kill@{0}",
        "supervisor.store.committed:kill@{0}",
        "supervisor.store.committed:kill@{1}",
        "supervisor.store.committed:kill@{2}",
        "supervisor.send:kill@{0}",
        "supervisor.lease.write:kill@{1}",
    ],
)
def test_a_supervisor_that_is_killed_goes_on_and_does_it_once(tmp_path: Path, point: str) -> None:
    async def work() -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        async with commands() as started, FakeMonitor(url, "a") as a, FakeMonitor(url, "b") as b:
            started.append(Command(tmp_path, port))
            await started[0].leads()
            await until(lambda: a.step > a.began_at and b.step > b.began_at, within_s=30)
            await until(lambda: runs(tmp_path))
            started[0].send(signal.SIGKILL)
            await started[0].ended()
            # The one that will be killed begins with a job that runs, so that its writes can be counted.
            started.append(Command(tmp_path, port, faults=point.format(4, 5, 6)))
            term = await started[1].leads()
            await until(lambda: a.desired.term == term or started[1].process.returncode is not None)
            await asyncio.sleep(3 * PERIOD_S)
            if started[1].process.returncode is None:
                await a.saw(ObservationKind.WORKER_LOST, rank=0)
                with contextlib.suppress(AssertionError):
                    await until(lambda: started[1].process.returncode is not None, within_s=3)
            if started[1].process.returncode is None:
                started[1].send(signal.SIGKILL)
            await started[1].ended()
            started.append(Command(tmp_path, port))
            later = await started[2].leads()
            assert later > term
            await until(lambda: a.desired.term == later and b.desired.term == later)
            if a.place.generation == 1:  # a real monitor says it again, as it was not answered
                await a.saw(ObservationKind.WORKER_LOST, rank=0)
            await until(lambda: a.place.generation == b.place.generation >= 2, within_s=30)
            await until(lambda: runs(tmp_path), within_s=30)
            workload, plans = stored(tmp_path)
            assert workload.generation == 2 and workload.places == ("a", "b") and workload.incident is None
            assert [str(plan.remedy.kind) for plan in plans] == ["start", "restart_in_job"]

    run(work)


def test_one_stands_by_and_takes_over_when_the_other_is_killed_or_ends(tmp_path: Path) -> None:
    async def work() -> None:
        async with commands() as started:
            started.append(Command(tmp_path, free_port()))
            term = await started[0].leads()
            for at, number in enumerate((signal.SIGKILL, signal.SIGTERM)):
                started.append(Command(tmp_path, free_port()))
                await until(lambda at=at: "this one stands by" in started[at + 1].log.read_text(), within_s=30)
                started[at].send(number)
                later = await started[at + 1].leads()
                assert later > term
                term = later

    run(work)


@pytest.mark.parametrize(
    "point",
    [
        "",  # from outside, when the job runs and there is nothing to say
        # With something to say that it may not say any more: that the host is checked, is wanted, has its place.
        "supervisor.send:stop@1",
        "supervisor.send:stop@3",
        "supervisor.send:stop@5",
    ],
)
def test_a_leader_that_was_stopped_is_replaced_and_says_nothing_when_it_is_revived(tmp_path: Path, point: str) -> None:
    async def work() -> None:
        ports = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        async with commands() as started:
            # Stands by before there is a host, because the first one stops soon after there is.
            started.append(Command(tmp_path, ports[0], lease_s=1.0, faults=point))
            term = await started[0].leads()
            started.append(Command(tmp_path, ports[1], lease_s=1.0))
            await until(lambda: "this one stands by" in started[1].log.read_text(), within_s=30)
            async with FakeMonitor(urls[0], "a") as a:
                if point:
                    await until(started[0].is_stopped)
                else:
                    await until(lambda: runs(tmp_path))
                    await started[0].stop_outside_a_transaction(tmp_path)
                later = await started[1].leads()
                assert later > term
                said = len(a.desires)
                started[0].send(signal.SIGCONT)
                await until(lambda: "leads no more" in started[0].log.read_text(), within_s=30)
                await asyncio.sleep(3 * PERIOD_S)
                assert len(a.desires) == said
                started[1].send(signal.SIGTERM)
                assert await started[1].ended() == 0
                await until(lambda: started[0].log.read_text().count("leads in term") == 2, within_s=30)
                started[0].send(signal.SIGTERM)
                assert await started[0].ended() == 0

    run(work)
