"""The processes around one folder: jobs with their ranks, readers, agents, forked children. By pid, never by name."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from resiliency.agent._command import AGENT_WORD
from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.ports import free_port

_ROOT = Path(__file__).parents[3]
_SITE = Path(__file__).parent / "agent_site"
#: What else befalls the agents of a job, in turn by its seed: killed between the manifest of a step and its names.
_FAULTS = ("agent.name.write:kill@4", "", "")
#: A process ends by itself after this time, should the driver be killed.
LIFE_S = 300


@dataclass
class RunningJob:
    """One start of the training.

    Attributes:
        host: the name of the host it believes to run on; jobs of different hosts do not see each other's processes.
        disturbed: we did something to one of its ranks, or to the folder while it was starting.
        elsewhere: something was away when it was started, so its attempt may have been counted in a folder made anew.
    """

    name: str
    host: str
    ranks: list[WorkerProcess]
    disturbed: bool = False
    elsewhere: bool = False

    @property
    def alive(self) -> list[WorkerProcess]:
        return [rank for rank in self.ranks if rank.returncode is None]


@dataclass
class Processes:
    """Starts them and remembers them; :meth:`end` ends whatever is left."""

    zygote: Zygote
    directory: Path
    ledger: Path
    clock: Path
    model: str
    jobs: list[RunningJob] = field(default_factory=list)
    readers: list[WorkerProcess] = field(default_factory=list)
    stopped: dict[int, psutil.Process] = field(default_factory=dict)  # by number, which others may get later
    children: list[int] = field(default_factory=list)
    _number: int = 0

    def start_job(self, host: str, world_size: int, seed: int) -> RunningJob:
        self._number += 1
        name, port = f"job-{self._number}", free_port()
        ranks = [
            self.zygote.start(
                "tests.e2e.chaos.trainer:train",
                {
                    "directory": str(self.directory),
                    "ledger": str(self.ledger),
                    "job": name,
                    "rank": rank,
                    "world_size": world_size,
                    "port": port,
                    "model": self.model,
                    "seed": seed,
                    "life_s": LIFE_S,
                },
                env={
                    "RESILIENCY_NODE": host,
                    "CHAOS_CLOCK": str(self.clock),
                    "RESILIENCY_FAULTS": _FAULTS[seed % len(_FAULTS)],
                    "PYTHONPATH": f"{_SITE}{os.pathsep}{_ROOT}",  # of the agents
                },
                timeout_s=180,  # the first one waits for the imports, on a machine that may be busy
            )
            for rank in range(world_size)
        ]
        job = RunningJob(name, host, ranks)
        self.jobs.append(job)
        return job

    def start_reader(self, seed: int, loads: int) -> WorkerProcess:
        self._number += 1
        reader = self.zygote.start(
            "tests.e2e.chaos.reader:read",
            {
                "directory": str(self.directory),
                "ledger": str(self.ledger),
                "name": f"reader-{self._number}",
                "seed": seed,
                "loads": loads,
                "life_s": LIFE_S,
            },
        )
        self.readers.append(reader)
        return reader

    # -- signals --------------------------------------------------------------------------------------------------

    def stop(self, pid: int) -> bool:
        """False when it was stopped already, or has ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process != self.stopped.get(pid):
                process.suspend()
                self.stopped[pid] = process
                return True
        return False

    def wake(self, pid: int) -> None:
        """Nothing, if it has ended: its number may be that of a process which another test has stopped."""
        with suppress(psutil.NoSuchProcess):
            self.stopped.pop(pid).resume()

    def wake_all(self) -> int:
        woken = list(self.stopped)
        for pid in woken:
            self.wake(pid)
        return len(woken)

    def kill(self, pids: list[int]) -> int:
        return sum(send(pid, signal.SIGKILL) for pid in pids)

    def end_job(self, job: RunningJob) -> None:
        """Kills what is left of a job, as a launcher does."""
        self.kill([rank.pid for rank in job.alive])
        for rank in job.ranks:
            rank.wait(timeout_s=20)
            self.stopped.pop(rank.pid, None)

    def running(self) -> list[RunningJob]:
        """Jobs of which a rank is alive and not stopped."""
        return [job for job in self.jobs if any(rank.pid not in self.stopped for rank in job.alive)]

    def agents(self) -> list[int]:
        """Agents of this folder: they have its path in their arguments."""
        found = []
        folder = str(self.directory).encode()
        needle = json.dumps(str(self.directory)).encode()  # of an interpreter of its own: in its configuration
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with suppress(OSError):
                arguments = Path("/proc", entry, "cmdline").read_bytes()
                words = arguments.split(b"\0")
                if AGENT_WORD.encode() in words and (folder in words or needle in arguments):
                    found.append(int(entry))
        return sorted(found)

    def end(self) -> list[int]:
        """Ends everything that was started here. Returns pids that are still there ten seconds later."""
        deadline, pause = time.monotonic() + 10, threading.Event()
        workers = [*(rank for job in self.jobs for rank in job.ranks), *self.readers]
        while time.monotonic() < deadline:
            # A fork or an agent may have been under way while the others were killed.
            left = [worker.pid for worker in workers if worker.returncode is None]
            left += self.agents() + [child for child in self.children if _is_child_of_ours(child)]
            for pid in left:
                send(pid, signal.SIGCONT)
                send(pid, signal.SIGKILL)
            if not left:
                return []
            pause.wait(0.05)
        return left


def send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _is_child_of_ours(pid: int) -> bool:
    """True while it lives and is what a zygote forked (a later process of its number is not)."""
    with suppress(OSError):
        state = Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" and b"resiliency.testing.zygote" in Path("/proc", str(pid), "cmdline").read_bytes()
    return False
