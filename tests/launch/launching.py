"""Launchers for tests, in processes of their own."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from resiliency.cli.main import main
from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.launch.forked_commands import prepare_commands
from tests.patience import PATIENCE
from tests.processes import descendant_pids, described, wait_ended

__all__ = ["ROOT", "Job", "run_launcher", "wait_for"]

ROOT = Path(__file__).parents[2]


class Job:
    """A launcher in a session of its own; everything it has started is killed at the end of the test.

    Ours is forked from the tests' zygote, because an import of torch costs more than most of these tests.
    """

    def __init__(
        self,
        launcher: str,
        words: Sequence[Any],
        output: Path,
        zygote: Zygote,
        *,
        cwd: Path,
        env: Mapping[str, str] = {},
    ) -> None:
        self.output = output
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
        given = [*map(str, words)]
        self._popen: subprocess.Popen[bytes] | None = None
        self._worker: WorkerProcess | None = None
        self._seen: dict[int, psutil.Process] = {}
        if launcher == "ours":
            self._worker = zygote.start(
                "tests.launch.launching:run_launcher",
                {"words": given, "output": str(output), "cwd": str(cwd)},
                env=environment,
            )
            self.pid = self._worker.pid
            return
        words = {"torchrun": ["torch.distributed.run"], "ours, not forked": ["resiliency.cli", "run"]}[launcher]
        with open(output, "wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", *words, *given],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=cwd,
                env=os.environ | environment,
            )
        self.pid = self._popen.pid

    def wait(self, timeout_s: float = 90) -> int:
        if self._worker is not None:
            return self._worker.wait(timeout_s=timeout_s)
        assert self._popen is not None
        return self._popen.wait(timeout_s)

    @property
    def running(self) -> bool:
        if self._worker is not None:
            return self._worker.returncode is None
        assert self._popen is not None
        return self._popen.poll() is None

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        found = []
        for pid in descendant_pids(self.pid):
            with suppress(psutil.NoSuchProcess):
                if pid not in self._seen or not self._seen[pid].is_running():
                    self._seen[pid] = psutil.Process(pid)
                found.append(self._seen[pid])
        return found

    def left(self, timeout_s: float = 10) -> list[str]:
        """What still runs of all that was seen, after a wait for its end: in words, for the assertion."""
        return [described(process) for process in wait_ended(self._seen.values(), timeout_s=timeout_s)]

    def close(self) -> None:
        self.descendants()
        for pid in (self.pid, *self._seen):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(10)


def run_launcher(*, words: list[str], output: str, cwd: str) -> None:
    """``resiliency run`` in a fork."""
    os.chdir(cwd)
    sys.stdout.flush()
    with open(output, "wb") as file, open(os.devnull) as nothing:
        for number, source in enumerate((nothing, file, file)):
            os.dup2(source.fileno(), number)
    prepare_commands(["run", *words])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.exit(main(["run", *words]))


def wait_for(path: Path, timeout_s: float = 60) -> str:
    deadline = time.monotonic() + PATIENCE * timeout_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)
    return path.read_text()
