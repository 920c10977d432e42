"""``resiliency supervisor run`` as a process of its own, and what it has stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from resiliency.cli.main import main
from resiliency.settings import replace_variables
from resiliency.supervisor.sqlite_store import SqliteStore
from resiliency.testing.zygote import Zygote

from .fake_monitors import PERIOD_S, TIMEOUT_S, until

MODULE = "tests.supervisor.supervisor_command"


def run_command(*, words: list[str], environment: Mapping[str, str], log: str, output: str = "") -> None:
    """``resiliency`` with these words, in a fork. What it prints goes to files."""
    for path, number in ((output, 1), (log, 2)):
        if path:
            with open(path, "ab") as file:
                os.dup2(file.fileno(), number)
    replace_variables(environment)
    sys.argv = ["resiliency", *words]
    sys.exit(main(words))


class Command:
    """``resiliency supervisor run`` in a process group of its own: a fork; see the fixture ``forked_supervisors``."""

    zygote: Zygote | None = None

    def __init__(self, folder: Path, port: int, *, faults: str = "", lease_s: float = 2.0, **settings: Any) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "supervisor.yaml"
        values = {
            "insecure_no_authentication": True,
            "heartbeat_polling_period_s": PERIOD_S,
            "heartbeat_timeout_s": 4 * TIMEOUT_S,
            "lease_s": lease_s,
            "workload": {"name": "job", "replicas": 2, "dwell_s": 0.2, "correlate_s": 0.05},
            **settings,
        }
        config.write_text(json.dumps(values))
        self.log.touch()
        assert self.zygote is not None
        words = ["supervisor", "run", "-f", str(config), "--listen", f"127.0.0.1:{port}"]
        given = {"words": words, "environment": {**os.environ, "RESILIENCY_FAULTS": faults}, "log": str(self.log)}
        self.process = self.zygote.start(f"{MODULE}:run_command", given)

    async def leads(self) -> int:
        """Its term, when it does."""
        found = await until(lambda: re.search(r"leads in term (\d+)", self._text()), within_s=30)
        return int(found[1])

    def _text(self) -> str:
        assert self.process.returncode in (None, -9), self.log.read_text()
        return self.log.read_text()

    async def ended(self) -> int:
        code = await until(lambda: None if (found := self.process.returncode) is None else [found], within_s=30)
        return int(code[0])

    def is_stopped(self) -> bool:
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    async def stop_outside_a_transaction(self, folder: Path) -> None:
        """Stops it when it does not write: else nobody could take over from it."""
        while not await self._stop(folder):
            await asyncio.sleep(0.01)

    async def _stop(self, folder: Path) -> bool:
        self.send(signal.SIGSTOP)
        await until(self.is_stopped)
        other = sqlite3.connect(folder / "supervisor.db", timeout=0, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self.send(signal.SIGCONT)
            return False
        finally:
            other.close()
        return True

    def send(self, number: int) -> None:
        os.killpg(self.process.pid, number)


async def asked(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``resiliency supervisor`` with these words, as an operator would call it. Also a fork."""
    assert Command.zygote is not None
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "output"), Path(folder, "log")
        given = {"words": ["supervisor", *words], "environment": {**os.environ, **variables}}
        arguments = {**given, "log": str(log), "output": str(output)}
        worker = Command.zygote.start(f"{MODULE}:run_command", arguments)
        code = await asyncio.to_thread(worker.wait, timeout_s=60)
        return subprocess.CompletedProcess(words, code, output.read_text(), log.read_text())


@contextlib.asynccontextmanager
async def commands() -> AsyncIterator[list[Command]]:
    started: list[Command] = []
    try:
        yield started
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                one.send(signal.SIGKILL)
            one.process.wait(timeout_s=10)


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work(), 100))


def stored(folder: Path) -> tuple[Any, list[Any]]:
    store = SqliteStore(str(folder / "supervisor.db"))
    try:
        found = store.load()
        # It leads a moment before it has written them down.
        return found.workloads[0] if found.workloads else None, sorted(found.plans, key=lambda plan: plan.number)
    finally:
        store.close()


def runs(folder: Path) -> bool:
    """Whether the one workload runs, as far as it is written down."""
    workload, _ = stored(folder)
    return workload is not None and workload.state.value == "running"
