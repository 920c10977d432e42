"""Starts, kills and restarts the job of :mod:`tests.e2e.job`, and knows what must hold after each restart."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resiliency.storage.catalog import scan
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.patience import PATIENCE
from tests.ports import free_port


@dataclass
class Job:
    """One training run over as many attempts as it takes."""

    zygote: Zygote
    directory: Path
    steps: int = 40
    every: int = 3
    world_size: int = 2
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    rank_env: dict[int, dict[str, str]] = field(default_factory=dict)
    rank_arguments: dict[int, dict[str, Any]] = field(default_factory=dict)
    attempts: int = 0

    @property
    def result(self) -> Path:
        return self.directory.parent / f"{self.directory.name}.result.json"

    def attempt(
        self, *ranks: int, timeout_s: float = 90.0, faults: str = "", rank_faults: dict[int, str] | None = None
    ) -> list[int | None]:
        """One attempt: waits until these ranks (none named: all) have ended, then kills what is left. Returns their statuses."""
        workers = self.start(faults=faults, rank_faults=rank_faults)
        try:
            return [workers[rank].wait(timeout_s=timeout_s) for rank in ranks or range(self.world_size)]
        finally:
            self.kill(workers)

    def start(self, *, faults: str = "", rank_faults: dict[int, str] | None = None) -> list[WorkerProcess]:
        port = str(free_port())
        workers: list[WorkerProcess] = []
        for rank in range(self.world_size):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "kill-test",
                "TORCHELASTIC_RESTART_COUNT": str(self.attempts),
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                "RESILIENCY_FAULTS": (rank_faults or {}).get(rank, faults),
                **self.env,
                **self.rank_env.get(rank, {}),
            }
            arguments = {
                "directory": str(self.directory),
                "steps": self.steps,
                "every": self.every,
                "result": str(self.result),
                **self.arguments,
                **self.rank_arguments.get(rank, {}),
            }
            workers.append(self.zygote.start("tests.e2e.job:train", arguments, env=env))
        self.attempts += 1
        return workers

    def run_to_end(self, *, timeout_s: float = 120) -> dict[str, Any]:
        """Runs one attempt undisturbed and returns its result."""
        workers = self.start()
        try:
            codes = [worker.wait(timeout_s=timeout_s) for worker in workers]
        finally:
            self.kill(workers)
        assert codes == [0] * self.world_size, f"attempt ended with {codes}"
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.result.read_text())
        return loaded

    def kill(self, workers: list[WorkerProcess]) -> None:
        """Ends what is left of an attempt, as a launcher does when one rank dies."""
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait(timeout_s=20)

    def agents(self) -> list[int]:
        """Pids of live agents of this directory, from what the agents wrote into the event log."""
        pids = []
        for event in self.events("agent-*.jsonl"):
            if event["event_type"] == "agent_started" and _alive(event["pid"]):
                pids.append(int(event["pid"]))
        return sorted(set(pids))

    def wait_for_agents(self, *, timeout_s: float) -> None:
        """Waits until the agents have ended by themselves."""
        self.wait_for(lambda: not self.agents(), "no agent runs", timeout_s=timeout_s)

    def wait_for(self, true: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + PATIENCE * timeout_s
        pause = threading.Event()
        while not true():
            assert time.monotonic() < deadline, f"not after {timeout_s} s: {what}; agents {self.agents()}"
            pause.wait(0.05)

    def events(self, pattern: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.directory.glob(f".resiliency/*/events/{pattern}")):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue  # a line cut by SIGKILL
        return found

    def newest_committed(self) -> int:
        """Newest step whose manifest is on disk now; 0 when there is none."""
        tier = LocalTier(str(self.directory), durable=False)
        complete = [listing.id.step for listing in scan(tier, "default") if listing.manifest is not None]
        return max(complete, default=0)

    def resumed_from(self) -> list[int]:
        """Step each attempt of rank 0 resumed from, oldest first."""
        return [
            event["step"] for event in self.events("rank-00000.jsonl") if event["event_type"] == "checkpoint_loaded"
        ]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resiliency.agent" in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_agents(job: Job) -> int:
    killed = 0
    for pid in job.agents():
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            continue
    return killed


def wait_ended(workers: list[WorkerProcess], *, seconds: float) -> bool:
    """Waits until a worker ends; True when all have ended with status 0."""
    deadline = time.monotonic() + PATIENCE * seconds
    for worker in workers:
        worker._ended.wait(max(0.0, deadline - time.monotonic()))
    return all(worker.returncode == 0 for worker in workers)


def chance(seed: int) -> random.Random:
    return random.Random(seed)
