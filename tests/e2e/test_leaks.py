"""Nothing of ours is left behind: processes, threads, shared memory, ports, after each way a trainer can end."""

from __future__ import annotations

import os
import socket
import threading
import time
from itertools import product
from pathlib import Path

import psutil
import pytest

from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.testing.zygote import Zygote
from tests.e2e.driver import Job
from tests.patience import PATIENCE
from tests.rings import few

STEPS = 15


def _belonging_to(directory: Path) -> list[str]:
    """Command lines of processes that name the directory, and unix sockets of ours."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(directory) in line and "resiliency.agent" in line:
            found.append(line[:120])
    return found


def _sockets(*directories: Path) -> set[str]:
    """Abstract sockets of agents of these directories (other jobs may run on this machine)."""
    ours = set()
    for directory in directories:
        config = AgentConfig(
            run="default",
            node=socket.gethostname(),
            attempt=1,
            token="000000",
            world_size=2,
            local_ranks=(0, 1),
            shared=True,
            local=TierSpec(address=str(directory), name="local"),
            durable=True,
        )
        ours.add("@" + config.address[1:])
    with open("/proc/net/unix", encoding="ascii") as file:
        return {line.split()[-1] for line in file} & ours


def _shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _gone(directory: Path, *, within_s: float) -> list[str]:
    """Waits for the agent, which ends by itself after the last trainer; returns what is still there."""
    deadline = time.monotonic() + PATIENCE * within_s
    pause = threading.Event()
    while (left := _belonging_to(directory)) and time.monotonic() < deadline:
        pause.wait(0.05)
    return left


@pytest.mark.kill
@pytest.mark.parametrize(
    ("end", "tiers"),
    few(
        product(["normal", "exception", "killed"], ["one directory", "ramdisk and directory"]),
        [("normal", "one directory"), ("exception", "ramdisk and directory"), ("killed", "ramdisk and directory")],
    ),
)
def test_no_process_socket_or_shared_memory_is_left(end: str, tiers: str, zygote: Zygote, tmp_path: Path) -> None:
    shm = _shm()
    fast = Path("/dev/shm") / f"leak-test-{os.getpid()}-{end}"
    arguments = {} if tiers == "one directory" else {"local_dir": str(fast)}
    job = Job(zygote, tmp_path / "run", steps=STEPS, arguments=dict(arguments))
    faults = {0: "save.begin:kill@4"} if end == "killed" else {}
    job.arguments["fail_at"] = 10 if end == "exception" else None
    workers = job.start(rank_faults=faults)
    try:
        workers[0].wait(timeout_s=60)
        if end == "killed":
            job.kill(workers)
        codes = [worker.wait(timeout_s=60) for worker in workers]
    finally:
        job.kill(workers)
    if end == "normal":
        assert codes == [0, 0]
    assert not _gone(tmp_path, within_s=20) and not _gone(fast, within_s=20)
    assert not _sockets(tmp_path / "run", fast)
    leaked = {name for name in _shm() - shm if name == fast.name or not name.startswith(("resiliency", "leak-test"))}
    if tiers == "one directory" or end == "normal":
        assert not leaked
    else:
        # What stays in the ramdisk is the checkpoint to restart from, nothing else; the next start takes it up.
        assert leaked == {fast.name}
        files = {path.name for path in fast.rglob("*") if path.is_file()}
        assert not [name for name in files if name.endswith(".slot")], "free slots keep memory for nobody"
        job.arguments["fail_at"] = None
        workers = job.start()
        try:
            assert [worker.wait(timeout_s=60) for worker in workers] == [0, 0]
        finally:
            job.kill(workers)
        assert not _gone(fast, within_s=20)
        assert fast.name not in _shm()
