"""Measures the recovery when a host is killed under a supervisor and a spare takes its place, in seconds beyond the
heartbeat timeout."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from benchmarks._machine import cores
from resiliency.errors import ResiliencyError
from resiliency.supervisor.client import OperatorClient

__all__ = ["BEYOND_S", "HostDeath", "host_table", "measure_hosts"]

#: The target: at most so many seconds from the end of the timeout to the first new step.
BEYOND_S = 2.0
_RANKS, _DEADLINE_S = 2, 90.0


@dataclass(frozen=True, kw_only=True)
class HostDeath:
    """One kill of a host. ``total_s``: seconds from the kill to the first step that all ranks end in a later
    attempt."""

    timeout_s: float
    total_s: float

    @property
    def beyond_s(self) -> float:
        return self.total_s - self.timeout_s


def measure_hosts(
    job: Path, *, kills: int, timeout_s: float, seed: int, advance: Callable[[], None]
) -> list[HostDeath]:
    """Runs two hosts with a rank each and a spare, all on this machine, and kills one of them again and again; it comes
    back as a spare before the next kill. ``advance`` is called after each kill."""
    from benchmarks.restart import Marks, _has_stepped, _running, _steps_of

    draw = random.Random(seed)
    deaths: list[HostDeath] = []
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        marks = Marks(folder, _RANKS)
        given = {"heartbeat_polling_period_s": timeout_s / 4, "heartbeat_timeout_s": timeout_s, "quarantine_s": 0.5}
        words = [
            sys.executable,
            "-m",
            "resiliency.cli",
            "run",
            "--nnodes",
            "2",
            "--spares",
            "1",
            "--nproc-per-node",
            "1",
        ]
        words += ["--max-restarts", "1000", "--state-dir", str(folder / "state")]
        words += [word for key, value in given.items() for word in ("--supervisor-set", f"{key}={value:g}")]
        with _running([*words, str(job), str(folder), "--restartable"], folder) as running:
            attempt = 0
            for _ in range(kills):
                _wait(lambda: _ready(folder) == _RANKS + 1)
                current = marks.wait(lambda found: _steps_of(found, attempt) >= 10)  # noqa: B023 - called at once
                time.sleep(draw.uniform(0, timeout_s / 4))  # anywhere between two heartbeats
                monitor = _monitor_of(int(current[draw.randrange(_RANKS)][attempt]["pid"][0]))
                at = time.monotonic()
                for process in (monitor, *monitor.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                later = marks.wait(lambda found: any(_has_stepped(of, attempt) for of in found))  # noqa: B023
                attempt = max(number for of in later for number in of)
                later = marks.wait(lambda found: all("step" in of.get(attempt, {}) for of in found))  # noqa: B023
                total_s = max(of[attempt]["step"][0] for of in later) - at
                deaths.append(HostDeath(timeout_s=timeout_s, total_s=total_s))
                advance()
                os.kill(running.pid, signal.SIGUSR2)  # it comes back, as a spare
    return deaths


def _monitor_of(pid: int) -> psutil.Process:
    return next(process for process in psutil.Process(pid).parents() if "host-monitor" in process.cmdline())


def _ready(folder: Path) -> int:
    with suppress(OSError, ResiliencyError):
        address, token = ((folder / "state" / name).read_text() for name in ("address", "operator-token"))
        hosts: list[dict[str, Any]] = OperatorClient(f"http://{address}", token=token).get("/v1/status")["hosts"]
        return sum(host["state"] == "ready" for host in hosts)
    return 0


def _wait(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all hosts are ready within {_DEADLINE_S:.0f} s")
        time.sleep(0.1)


def host_table(deaths: Sequence[HostDeath]) -> Table:
    made = Table(title=f"Seconds from a host's death to the first new step, with a spare, {cores()} cores")
    for column in (
        "kills",
        "heartbeat timeout",
        "median",
        "longest",
        "beyond the timeout: median",
        "longest",
        "target",
    ):
        made.add_column(column, justify="right")
    totals, beyond = [one.total_s for one in deaths], [one.beyond_s for one in deaths]
    figures = [deaths[0].timeout_s, statistics.median(totals), max(totals), statistics.median(beyond), max(beyond)]
    verdict = "met" if max(beyond) <= BEYOND_S else "missed"
    made.add_row(str(len(deaths)), *(f"{figure:.2f}" for figure in figures), f"{BEYOND_S:.0f}, {verdict}")
    return made
