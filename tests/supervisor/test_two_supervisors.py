"""Two supervisors with one state file and two addresses, and a monitor that knows both: real processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import AgentError
from resiliency.supervisor.client import OperatorClient
from tests.ports import free_port

from .fake_monitors import PERIOD_S, until
from .monitor_command import monitor
from .supervisor_command import Command, asked, commands, run, runs, stored

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_supervisors")]


def steps(url: str) -> int:
    """That a leader knows of; -1: it leads not, or knows none."""
    try:
        return int(OperatorClient(url).get("/v1/status")["workloads"][0]["step"])
    except AgentError:
        return -1


def with_leader(log: str, url: str, term: int) -> bool:
    return f"connected to the supervisor at {url}, term {term}" in log


def test_a_monitor_of_two_addresses_follows_the_leader_and_its_ranks_train_on(tmp_path: Path) -> None:
    """One leader is killed, the next is stopped and revived. The host has one place, and one process, throughout."""

    async def work() -> None:
        ports = free_port(), free_port()
        given: dict[str, Any] = {"workload": {"name": "job", "replicas": 1, "dwell_s": 0.2, "correlate_s": 0.05}}
        given |= {"heartbeat_polling_period_s": 1.0, "heartbeat_timeout_s": 4.0, "lease_s": 1.0}
        period_s = given["heartbeat_polling_period_s"]
        async with commands() as started:
            started.append(Command(tmp_path, ports[0], **given))
            first, second = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
            term = await started[0].leads()
            started.append(Command(tmp_path, ports[1], **given))
            await until(lambda: "this one stands by" in started[1].log.read_text(), within_s=30)
            # The one that stands by is asked first.
            with monitor(tmp_path, "--supervisor", second, "--supervisor", first) as host:
                await until(lambda: with_leader(host.text(), first, term), within_s=30)
                await until(lambda: runs(tmp_path), within_s=30)
                ranks = await until(host.ranks)

                async def is_with(command: Command, url: str) -> None:
                    nonlocal term
                    later = await command.leads()
                    assert later > term
                    term = later
                    began_s = time.monotonic()
                    await until(lambda: with_leader(host.text(), url, term), within_s=30)
                    assert time.monotonic() - began_s < 2 * period_s
                    known = await asyncio.to_thread(steps, url)
                    end = time.monotonic() + 20
                    while await asyncio.to_thread(steps, url) <= known:
                        assert time.monotonic() < end, "no more steps are told"
                        await asyncio.sleep(PERIOD_S)

                started[0].send(signal.SIGKILL)
                await is_with(started[1], second)

                started.append(Command(tmp_path, ports[0], **given))
                await until(lambda: "this one stands by" in started[2].log.read_text(), within_s=30)
                started[1].send(signal.SIGSTOP)
                await is_with(started[2], first)
                started[1].send(signal.SIGCONT)
                await until(lambda: "leads no more" in started[1].log.read_text(), within_s=30)
                known = await asyncio.to_thread(steps, first)
                await asyncio.sleep(2 * period_s)
                assert await asyncio.to_thread(steps, first) > known

                workload, plans = stored(tmp_path)
                assert host.ranks() == ranks and workload.generation == 1 and workload.places == ("a",)
                assert [str(plan.remedy.kind) for plan in plans] == ["start"], "nothing was remedied"
                told = re.findall(r"generation (\d+) of job", host.text())
                assert told == ["1"] and host.text().count("connected to the supervisor at") == 3

    run(work)


def test_an_operators_command_asks_the_leader_wherever_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        async with commands() as started:
            for at in range(2):
                started.append(Command(tmp_path, free_port()))
                if at == 0:
                    await started[0].leads()
            await until(lambda: "this one stands by" in started[1].log.read_text(), within_s=30)
            leader, waiting = started[0].url, started[1].url
            nobody = f"http://127.0.0.1:{free_port()}"

            found = await asked("status", "--json", "-s", nobody, "-s", waiting, "-s", leader)
            assert json.loads(found.stdout)["workloads"][0]["name"] == "job", found.stderr
            found = await asked("status", "--json", RESILIENCY_SUPERVISOR=f"{waiting}, {leader}")
            assert json.loads(found.stdout)["workloads"][0]["name"] == "job", found.stderr
            refused = await asked("drain", "no-such-host", "-s", f"{waiting},{leader}")
            assert refused.returncode == 1 and f"{leader}: no host 'no-such-host' has joined" in refused.stderr
            alone = await asked("status", "-s", waiting)
            assert alone.returncode == 1 and f"{waiting}: this supervisor stands by; another one leads" in alone.stderr

            started[0].send(signal.SIGSTOP)
            await started[1].leads()
            found = await asked("events", "--json", "-s", leader, "-s", waiting)
            assert "supervisor_leads" in found.stdout, found.stderr

    run(work)
