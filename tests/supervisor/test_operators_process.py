"""What operators do to a job that runs, and who may speak at all: real supervisors, monitors, programs and commands."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Certificates
from tests.ports import free_port

from .fake_monitors import until
from .monitor_command import MonitorCommand, monitor
from .supervisor_command import Command, asked, commands, run, runs, stored

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_supervisors")]

_TOKEN = "operators-token-of-the-test-0123456789"


async def done(*words: str) -> str:
    found = await asked(*words)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_drain_uncordon_stop_and_start_by_the_command_line_while_ranks_run_and_the_hook_sees_it(tmp_path: Path) -> None:
    """A host is drained: its rank goes to the spare, after the user's program. It is given back, and the job stopped and
    started."""
    said = tmp_path / "hook-said"
    hook = tmp_path / "hook"
    hook.write_text(
        '#!/bin/sh\necho "$RESILIENCY_PLAN $RESILIENCY_GENERATION $RESILIENCY_REMEDY [$RESILIENCY_HOSTS]'
        f' [$RESILIENCY_HOSTS_OUT] $RESILIENCY_REPLICAS_BEFORE>$RESILIENCY_REPLICAS" >> {said}\n'
    )
    hook.chmod(0o700)

    async def work() -> None:
        given: dict[str, Any] = {"hook": {"command": [str(hook)], "timeout_s": 10}}
        given["workload"] = {
            "name": "job",
            "replicas": 1,
            "dwell_s": 0.2,
            "correlate_s": 0.05,
            "checkpoint_timeout_s": 5,
        }
        async with commands() as started:
            started.append(Command(tmp_path, free_port(), **given))
            url = started[0].url
            await started[0].leads()
            with monitor(tmp_path, "--supervisor", url, host="a") as a, contextlib.ExitStack() as more:

                async def is_running(generation: int, *hosts: str) -> None:
                    def so() -> bool:
                        workload, _ = stored(tmp_path)
                        is_there = workload is not None
                        return is_there and (workload.state.value, workload.generation, workload.places) == (
                            "running",
                            generation,
                            hosts,
                        )

                    await until(so, within_s=30)

                await is_running(1, "a")
                await until(a.ranks)
                b = more.enter_context(monitor(tmp_path, "--supervisor", url, host="b"))
                await until(lambda: "connected to the supervisor at" in b.text(), within_s=30)
                assert not b.ranks()

                assert "a is cordoned" in await done("drain", "a", "-s", url, "--reason", "new fan")
                await is_running(2, "b")
                await until(lambda: b.ranks() and not a.ranks(), within_s=30)
                table = await done("status", "-s", url)
                (line,) = (line for line in table.splitlines() if line.split()[:1] == ["a"])
                assert "cordoned" in line and "new fan" in line

                assert "a is checked" in await done("uncordon", "a", "-s", url)
                again = await asked("uncordon", "a", "-s", url)
                assert again.returncode == 1 and "not cordoned" in again.stderr

                assert "stopped for good" in await done("stop", "job", "-s", url, "--reason", "enough")
                await until(lambda: not b.ranks() and not a.ranks(), within_s=30)
                assert stored(tmp_path)[0].state.value == "stopped"
                assert "job begins again" in await done("start", "job", "-s", url)
                await until(lambda: runs(tmp_path), within_s=30)
                assert stored(tmp_path)[0].generation == 3
                await until(lambda: len(a.ranks()) + len(b.ranks()) == 1, within_s=30)

                lines = [line.split(" ", 1)[1] for line in said.read_text().splitlines()]
                last = stored(tmp_path)[0].places[0]
                assert lines == [
                    "1 start [a] [] 0>1",
                    "2 hot_swap [b] [a] 1>1",
                    f"3 start [{last}] [] 0>1",
                ]

    run(work)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_with_mutual_tls_a_host_speaks_for_itself_alone_and_only_with_a_certificate_of_the_authority(
    tmp_path: Path,
) -> None:
    ours, foreign = Certificates(tmp_path, "ours"), Certificates(tmp_path, "foreign")
    server, server_key = ours.sign("server", "IP:127.0.0.1")
    of_a, of_b = ours.sign("a", "DNS:a"), ours.sign("b", "DNS:b")
    false_c = foreign.sign("c", "DNS:c")
    token = tmp_path / "operator.token"
    token.write_text(_TOKEN)
    token.chmod(0o600)

    async def work() -> None:
        given: dict[str, Any] = {
            "insecure_no_authentication": False,
            "operator_token": str(token),
            "tls": {"cert": server, "key": server_key, "client_ca": str(ours.ca)},
            "workload": {"name": "job", "replicas": 1, "dwell_s": 0.2, "correlate_s": 0.05},
        }
        async with commands() as started:
            started.append(Command(tmp_path, free_port(), **given))
            await started[0].leads()
            url = started[0].url.replace("http:", "https:")

            def host(name: str, *identity: str) -> contextlib.AbstractContextManager[MonitorCommand]:
                files = ("--cert", identity[0], "--key", identity[1]) if identity else ()
                return monitor(tmp_path, "--supervisor", url, "--ca", str(ours.ca), *files, host=name)

            async def is_said(one: MonitorCommand, what: Callable[[str], bool]) -> str:
                await until(lambda: what(one.text()), within_s=30)
                return one.text()

            with host("a", *of_a) as a, host("nameless") as nameless, host("c", *false_c) as c, host("d", *of_b) as d:
                await is_said(a, lambda text: f"connected to the supervisor at {url}" in text)
                await until(lambda: runs(tmp_path), within_s=30)
                assert stored(tmp_path)[0].places == ("a",)
                for refused in (nameless, c, d):
                    text = await is_said(refused, lambda text: "no connection to the supervisor" in text)
                    assert "connected to the supervisor at" not in text
                assert "refuses this host" in d.text(), "its certificate names b"
                for each in (nameless, c):  # at one of its attempts: a reset may come before the alert that says so
                    await is_said(each, lambda text: "needs a certificate that is signed" in text)

            of_operator = ("-s", url, "--token-file", str(token), "--ca", str(ours.ca))
            status = await done("status", "--json", *of_operator, "--cert", of_b[0], "--key", of_b[1])
            assert '"a"' in status and '"c"' not in status and '"d"' not in status and '"nameless"' not in status
            bare = await asked("status", *of_operator)
            assert bare.returncode == 1 and "--cert FILE --key FILE" in bare.stderr

    run(work)
