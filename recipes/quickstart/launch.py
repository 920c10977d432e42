"""Starts ``resiliency run`` for the demo, and kills all of its processes however the demo ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from recipes.quickstart.follow import Follower
from resiliency.runtime.processes import become_subreaper

__all__ = ["Launch", "kill_all"]

REPOSITORY = Path(__file__).parents[2]
#: Seconds that processes get to be gone after SIGKILL.
KILL_S = 10.0


class Launch:
    """``resiliency run ... -m recipes.quickstart.train`` in a session of its own, with a deadline.

    Thread: one. Use as a context manager: leaving it kills all processes that it has started. The process group would
    not do, because launchers give ranks sessions of their own, and host agents outlive them by design.

    Args:
        flags: flags of ``resiliency run``.
        arguments: arguments of train.py, besides its folder.
        variables: added to the environment.
        logs: pattern of the event logs, see :class:`Follower`.

    Attributes:
        folder: where checkpoints, event logs, ``result.json`` and ``output.log`` go.
        started_s: monotonic time of the start, in seconds.
        pid: process id of the launcher.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        arguments: Sequence[str],
        *,
        deadline_s: float,
        variables: Mapping[str, str] = {},
        logs: str = ".resiliency/*/events/*.jsonl",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._output = (folder / "output.log").open("wb")
        command = [sys.executable, "-m", "resiliency.cli", "run", *flags]
        command += ["-m", "recipes.quickstart.train", "--dir", str(folder), *arguments]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RESILIENCY_RUN": folder.name} | variables
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        become_subreaper()  # orphans of a killed process become children of this one, so that they can be found
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
        self.pid = self._process.pid
        self.follower = Follower(folder, logs)

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

    def output_tail(self, lines: int = 40) -> str:
        text = (self.folder / "output.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Kills all processes that this launch has started. Blocks: up to 30 s. Idempotent."""
        deadline_s = time.monotonic() + KILL_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_s:
            kill_all(left)
        self._process.wait(timeout=KILL_S)
        self._output.close()


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kills all ``processes`` and waits until they have ended. Blocks: up to 10 s."""
    known = list(processes)
    for process in known:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(known, timeout=KILL_S)
