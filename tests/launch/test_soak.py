"""Compound faults on a job under ``resiliency run``, some of them while it recovers: it ends unaided, with the weights of
a run in which nothing happened.

``RESILIENCY_SOAK=300 pytest -m kill tests/launch/test_soak.py`` makes 300 of them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from resiliency.agent._command import AGENT_WORD
from tests.launch import soak_job
from tests.launch.launching import ROOT, Job
from tests.patience import PATIENCE
from tests.rings import few

FAULTS = int(os.environ.get("RESILIENCY_SOAK", "6"))
KINDS = ("rank", "rank", "rank", "ranks", "agent", "zygote", "stop and go on", "stop", "SIGTERM")
RANKS = 4

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(300 + 60 * FAULTS)]


class Soak:
    """Draws faults and makes them. A compound is one to three of them, at once or up to a second apart."""

    def __init__(self, job: Job, folder: Path, draw: random.Random) -> None:
        self._job, self._folder, self._draw = job, folder, draw
        self.made: Counter[str] = Counter()
        #: Kinds that come before any comes again; a short run has one of those that differ most.
        self._kinds = ["agent", "zygote", "ranks", "stop", "rank"]

    def step(self) -> tuple[int, int]:
        """Newest attempt and step."""
        with suppress(FileNotFoundError, IndexError, ValueError):
            attempt, step, _ = (self._folder / "steps").read_text().splitlines()[-1].split()
            return int(attempt), int(step)
        return 0, 0

    def wait_beyond(self, attempt: int, step: int, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + PATIENCE * timeout_s
        while self.step() <= (attempt, step) and self._job.running:
            if time.monotonic() > deadline:
                self._show_stacks()
            assert time.monotonic() < deadline, (
                f"no step after {attempt, step} for {timeout_s} s:\n{self._job.text[-6000:]}"
            )
            time.sleep(0.01)

    def _show_stacks(self) -> None:
        with open(self._job.output, "a") as output:
            for process, words in self._processes().items():
                output.write(f"process {process.pid} {process.status()} {' '.join(words)[-200:]}\n")
        for pid in (self._job.pid, *(process.pid for process in self._ranks())):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)  # they write into the output of the job

    def compound(self) -> None:
        for number in range(self._draw.choice((1, 1, 2, 3))):
            if number:
                time.sleep(self._draw.choice((0.0, self._draw.uniform(0, 0.2), self._draw.uniform(0, 1.0))))
            self._kinds = self._kinds or self._draw.sample(KINDS, len(KINDS))
            kind = self._kinds.pop()
            victims = self._victims(kind)
            self.made[kind] += bool(victims)
            for victim in victims:
                with suppress(psutil.NoSuchProcess):
                    if kind in ("stop", "stop and go on"):
                        victim.suspend()
                    if kind == "stop and go on":
                        time.sleep(self._draw.uniform(0, 0.5))
                        victim.resume()
                    elif kind != "stop":
                        victim.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)

    def _processes(self) -> dict[psutil.Process, list[str]]:
        """Words of the command line of each."""
        words = {}
        for process in self._job.descendants():
            with suppress(psutil.NoSuchProcess):
                words[process] = [*filter(None, process.cmdline())]
        return words

    def _ranks(self) -> list[psutil.Process]:
        return [
            process for process, words in self._processes().items() if str(self._folder) in words and "-c" not in words
        ]

    def _victims(self, kind: str) -> list[psutil.Process]:
        if kind in ("agent", "zygote"):
            found = [
                process
                for process, words in self._processes().items()
                if (AGENT_WORD in words if kind == "agent" else "-c" in words and AGENT_WORD not in words)
            ]
            return found[:1]
        ranks = self._ranks()
        count = self._draw.randint(2, len(ranks)) if kind == "ranks" and len(ranks) > 2 else min(1, len(ranks))
        return self._draw.sample(ranks, count)


@pytest.mark.parametrize("count", few([FAULTS // 2, 25], [FAULTS // 2]))
@pytest.mark.parametrize("stays", [True, False], ids=["restartable", "plain"])
def test_compound_faults_change_nothing(stays: bool, count: int, tmp_path: Path, zygote: Any) -> None:
    seed = int(os.environ.get("RESILIENCY_SOAK_SEED", "7"))
    draw = random.Random(f"{seed} {stays}")
    steps = 40 + 25 * count
    flags = ["--nproc-per-node", RANKS, "--max-restarts", 20 * count, "--crash-loop", 0, "--leave-timeout", 5]
    flags += ["--hang-timeout", 3]
    words = [*flags, Path(soak_job.__file__), tmp_path, steps, *(["--restartable"] if stays else [])]
    env = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    job = Job("ours", words, tmp_path / "output", zygote, cwd=tmp_path, env=env)
    try:
        soak = Soak(job, tmp_path, draw)
        soak.wait_beyond(0, 1)
        for _ in range(count):
            before = soak.step()
            soak.compound()
            soak.wait_beyond(before[0], before[1] + draw.randint(1, 12))
            if not job.running:
                break
        assert job.wait(180) == 0, job.text[-6000:]
        expected = soak_job.weights_after(steps, RANKS)
        for rank in range(RANKS):
            assert torch.equal(torch.load(tmp_path / f"weights-{rank}"), expected)
        assert job.left(60) == []
    finally:
        job.close()
    recovered = int((tmp_path / "steps").read_text().splitlines()[-1].split()[0])
    print(f"{'restartable' if stays else 'plain'}: {dict(soak.made)}, {recovered} restarts")
    assert sum(soak.made.values()) >= count and recovered >= count // 3
