"""Who may speak at the monitor's socket, and what is listened to."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.errors import AgentError
from resiliency.monitor.launcher_link import MOST_BYTES, read_message
from resiliency.monitor.state import StateFolder
from resiliency.runtime.channel import send
from tests.monitor.monitored import Host, on_host


def connect(host: Host) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(10)
    end.connect("\0" + StateFolder(host.settings.state_dir, "host-a").socket_name)
    return end


def test_a_process_that_is_not_the_launcher_is_not_listened_to(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        with connect(host) as end:
            send(end, {"kind": "lost", "generation": 1, "rank": 0, "signal": 9})
            assert await asyncio.to_thread(end.recv, 1) == b""
        host.launchers.say(pid, kind="lost", generation=1, rank=1, signal=9)
        (seen,) = await host.supervisor.observed(1)
        assert seen.rank == 1

    on_host(tmp_path, scenario)


@pytest.mark.parametrize(
    "command",
    [
        {"do": "raw", "hex": b"garbage".hex()},
        {"do": "raw", "hex": b'{"kind":"explode"}'.hex()},
        {"do": "raw", "hex": b'{"kind":"lost","generation":1,"rank":"0"}'.hex()},
        {"do": "raw", "hex": b'{"kind":"running","generation":1,"ranks":{"0":[0,-1]}}'.hex()},
        {"do": "raw", "hex": b"[]".hex()},
        {"do": "raw", "hex": b'{"kind":"control","action":"partition","seconds":60}'.hex()},
        {"do": "packet"},
    ],
    ids=["text", "kind", "type", "negative pid", "list", "control", "no file"],
)
def test_nonsense_of_the_launcher_is_passed_over(tmp_path: Path, command: dict) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(1))["pid"]
        host.launchers.do(pid, **command)
        host.launchers.say(pid, kind="lost", generation=1, rank=1, signal=9)
        (seen,) = await host.supervisor.observed(1)
        assert seen.rank == 1 and host.launchers.drain() and host.launchers.started == [pid]

    on_host(tmp_path, scenario)


def test_the_past_and_the_future_of_the_launcher_are_passed_over(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        pid = (await host.with_place(5))["pid"]
        for generation in (4, 6):
            host.launchers.say(pid, kind="lost", generation=generation, rank=0, signal=9)
            host.launchers.say(pid, kind="ended", generation=generation)
            host.launchers.say(pid, kind="master", generation=generation, address="nowhere:1")
        host.launchers.say(pid, kind="lost", generation=5, rank=1, signal=9)
        (seen,) = await host.supervisor.observed(1)
        assert (seen.generation, seen.rank) == (5, 1)
        report = await host.supervisor.report(lambda one: True, since=len(host.supervisor.heard))
        assert not report.ended and report.master == "127.0.0.1:29500"

    on_host(tmp_path, scenario)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(tmp_path: Path) -> None:
    code = (
        "import socket, sys; end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); end.settimeout(10)\n"
        "end.connect('\\0' + sys.argv[1]); sys.exit(end.recv(1) != b'')"
    )

    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.with_place(1)
        name = StateFolder(host.settings.state_dir, "host-a").socket_name
        command = [
            "/usr/bin/env",
            "python3" if os.path.exists("/usr/bin/python3") else sys.executable,
            "-c",
            code,
            name,
        ]
        found = await asyncio.to_thread(subprocess.run, command, user=65534, timeout=30, env={"PATH": "/usr/bin:/bin"})
        assert found.returncode == 0

    on_host(tmp_path, scenario)


def test_connections_that_say_nothing_do_not_keep_the_launcher_out(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.start_monitor()
        await host.launchers.next("connected")
        idle = [await asyncio.to_thread(connect, host) for _ in range(64)]
        await host.with_place(1)
        for end in idle:
            end.close()

    on_host(tmp_path, scenario)


def test_texts_that_are_too_long_or_not_in_memory_are_refused_and_their_files_closed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(tmp_path / "file", "wb") as file, open(os.devnull) as null:
        before = len(os.listdir("/proc/self/fd"))
        file.write(b'{"kind":"waiting"}')
        file.flush()
        socket.send_fds(theirs, [b"m"], [file.fileno(), null.fileno(), null.fileno()])
        with pytest.raises(AgentError, match="not in memory"):
            read_message(ours)
        send(theirs, {"kind": "waiting", "more": "x" * MOST_BYTES})
        with pytest.raises(AgentError, match="are the most"):
            read_message(ours)
        send(theirs, {"kind": "waiting", "generation": 3, "of a newer version": 1}, [null.fileno()])
        assert read_message(ours).generation == 3
        assert len(os.listdir("/proc/self/fd")) == before
