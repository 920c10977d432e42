"""Starts ``resiliency run`` for the demo, and kills all of its processes however the demo ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from recipes.quickstart.follow import Follower

__all__ = ["Launch"]

REPOSITORY = Path(__file__).parents[2]


class Launch:
    """``resiliency run -m recipes.quickstart.train`` in its own process group, with a deadline.

    Thread: one. Use as a context manager: leaving it kills all processes of the launch (not only the process
    group: the launcher gives workers sessions of their own, and the host agent outlives them by design).

    Attributes:
        folder: where checkpoints, event logs, ``result.json`` and ``output.log`` go.
        started_s: monotonic time of the start.
    """

    def __init__(self, folder: Path, *, ranks: int, restarts: int, arguments: Sequence[str], deadline_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._output = (folder / "output.log").open("wb")
        command = [
            sys.executable,
            "-m",
            "resiliency.cli",
            "run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
            "--crash-loop=0",  # the demo kills it every few seconds
            "-m",
            "recipes.quickstart.train",
            "--dir",
            str(folder),
            "--ranks",
            str(ranks),
            *arguments,
        ]
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "RESILIENCY_RUN": folder.name,
        }
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        self.started_s = time.monotonic()
        self._deadline_s = self.started_s + deadline_s
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.follower = Follower(folder)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def running(self) -> bool:
        """True while the launcher runs. Raises SystemExit with the end of the output when it passed its deadline."""
        if self._process.poll() is not None:
            return False
        if time.monotonic() > self._deadline_s:
            raise SystemExit(
                f"the run in {self.folder} passed its deadline; the end of its output:\n{self.output_tail()}"
            )
        return True

    def check(self) -> None:
        """Raises SystemExit with the end of the output when the launcher failed."""
        if self._process.returncode != 0:
            raise SystemExit(
                f"the launcher exited with {self._process.returncode}; the end of its output:\n{self.output_tail()}"
            )

    def worker_pids(self) -> set[int]:
        """Processes below the launcher."""
        try:
            return {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()

    def output_tail(self, lines: int = 40) -> str:
        text = (self.folder / "output.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Ends everything this launch started. Blocks: up to 10 s. Idempotent."""
        pids = self.worker_pids() | ({self._process.pid} if self._process.poll() is None else set())
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)] + self.follower.living_agents()
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=10)
        self._process.wait(timeout=10)
        self._output.close()
