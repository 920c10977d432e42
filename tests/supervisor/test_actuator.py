"""Steps that the supervisor carries out itself."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psutil
import pytest

from resiliency.runtime.messages.monitor import StepKind
from resiliency.supervisor.actuator import Actuator
from resiliency.supervisor.clusters.none import NoCluster
from resiliency.supervisor.model import Plan, Remedy, RemedyKind, Step, Workload, WorkloadSpec
from tests.processes import wait_ended

WORKLOADS = {"job": Workload(spec=WorkloadSpec(name="job", replicas=1))}


def plan(timeout_s: float = 30.0) -> Plan:
    return Plan(
        number=1,
        incident=1,
        workload="job",
        remedy=Remedy(kind=RemedyKind.RESTART_WORKLOAD),
        generation=2,
        places=("a",),
        steps=(Step(kind=StepKind.HOOK, timeout_s=timeout_s, required=False),),
    )


def run_hook(script: str, tmp_path: Path, *, timeout_s: float = 30.0) -> tuple[str, float]:
    """What went wrong, and how long it took."""

    async def work() -> tuple[str, float]:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        hook = ("/bin/sh", "-c", script.replace("FOLDER", str(tmp_path)))
        actuator = Actuator(hook=hook, cluster=NoCluster(), ended=lambda number, at, problem: ended.set_result(problem))
        began = time.monotonic()
        actuator.carry_out({1: plan(timeout_s)}, WORKLOADS)
        problem = await asyncio.wait_for(ended, 20)
        took = time.monotonic() - began
        await actuator.close()
        return problem, took

    return asyncio.run(work())


def test_a_hook_has_ended_when_it_has_whatever_it_leaves_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    problem, took = run_hook("sleep 600 & echo $! > FOLDER/pid; echo resized to $RESILIENCY_REPLICAS", tmp_path)
    assert problem == "" and took < 10 and "resized to 1" in caplog.text
    os.kill(int((tmp_path / "pid").read_text()), 9)


def test_a_hook_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    problem, _ = run_hook("sleep 600 & echo $! > FOLDER/pid; wait", tmp_path, timeout_s=0.5)
    assert "took longer than" in problem
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or not wait_ended([psutil.Process(pid)], timeout_s=5)


def test_a_hook_that_fails_or_is_not_there_says_so(tmp_path: Path) -> None:
    assert run_hook("exit 3", tmp_path)[0] == "the hook /bin/sh ended with status 3"
