"""Measures the time from the death of a rank to the first new step: ``python -m benchmarks.restart``.

torchrun, ``resiliency run`` and, where it is installed, NVRx's ``ft_launcher`` run the same Lightning job with the same
kills on the same machine, one after the other. A kill is a SIGKILL to one rank, in the middle of the training; the
first new step is the first that every rank ends in a later attempt, restored from a checkpoint. Each part of that time
is measured on the rank that is last to end it. After that whole hosts are killed, below a supervisor with a spare.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks._host_death import HostDeath, host_table, measure_hosts
from benchmarks._machine import cores

__all__ = ["Marks", "Recovery", "main", "measure"]

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("_restart_job.py")
DEADLINE_S = 60.0
#: ``resiliency run`` with a job whose other ranks stay in their processes.
STAYING = "resiliency run, restartable"
#: Marks of the job, in order, and the part of a recovery that ends with each.
PARTS = {"script": "noticed, process up", "imports": "imports", "group": "process group", "restored": "model, restore"}
PARTS["step"] = "first step"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One kill. ``marks``: seconds from the kill until the last rank reached each mark. ``total_s``: until its first
    step."""

    launcher: str
    ranks: int
    total_s: float
    marks: dict[str, float]


def launchers() -> dict[str, list[str]]:
    """Command lines to which the ranks, the script and its arguments are added."""
    common = ["--standalone", "--max-restarts=1000"]
    found = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *common],
        "resiliency run": [sys.executable, "-m", "resiliency.cli", "run", *common, "--crash-loop=0"],
    }
    found[STAYING] = found["resiliency run"]
    other = shutil.which("ft_launcher", path=os.path.dirname(sys.executable))
    if other:
        endpoint = [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            "--max-restarts=1000",
            "--monitor-interval=0.1",
        ]
        found["ft_launcher"] = [other, "--nnodes=1", *endpoint, "--ft-enable-nic-monitor=false"]
    return found


class Marks:
    """Reads the marks that the ranks of a job have written so far."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._paths = [folder / f"marks-{rank}" for rank in range(ranks)]

    def read(self) -> list[dict[int, dict[str, list[float]]]]:
        """For each rank: attempt -> mark -> values, which are times; those of ``pid`` are process ids."""
        found = []
        for path in self._paths:
            attempts: dict[int, dict[str, list[float]]] = {}
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines:
                words = line.split()
                if len(words) == 4:  # not cut off by a kill
                    name, attempt, step, at = words
                    value = float(step) if name == "pid" else float(at)
                    attempts.setdefault(int(attempt), {}).setdefault(name, []).append(value)
            found.append(attempts)
        return found

    def wait(
        self, ready: Callable[[list[dict[int, dict[str, list[float]]]]], bool]
    ) -> list[dict[int, dict[str, list[float]]]]:
        deadline = time.monotonic() + DEADLINE_S
        while not ready(found := self.read()):
            if time.monotonic() > deadline:
                written = [path.read_text().splitlines()[-1:] for path in self._paths if path.exists()]
                output = (self._folder / "output").read_text(errors="replace")[-4000:]
                raise TimeoutError(f"no step within {DEADLINE_S:.0f} s; last marks {written}; its output:\n{output}")
            time.sleep(0.01)  # files are all that this benchmark shares with the job
        return found


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Without this torchrun 2.13 keeps one store for all attempts, and gloo finds addresses of dead processes in it.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, cwd=folder
        )
    try:
        yield process
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in below:
            with_child_ended(child)
        process.wait(10)


def with_child_ended(process: psutil.Process) -> None:
    """Kills a process; no error when it has ended."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@dataclass(frozen=True, kw_only=True)
class StandbyCost:
    """What the zygote, from which ranks are forked, and the standbys, which wait to become ranks, cost.

    Attributes:
        own_mib: memory that the largest of them shares with no other process.
        cpu_s: processor time of all of them in ``waited_s`` seconds of training.
    """

    own_mib: float
    cpu_s: float
    waited_s: float


def standby_cost(launcher: int, *, wait_s: float = 5.0) -> StandbyCost | None:
    """Measures the zygote and standbys of a launcher; None when it has none. Blocks for ``wait_s``."""
    waiting = [
        process
        for process in psutil.Process(launcher).children(recursive=True)
        if any("resiliency.launch.standby" in word for word in process.cmdline())
    ]
    if not waiting:
        return None

    def spent() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in waiting)

    before = spent()
    time.sleep(wait_s)
    own = [process.memory_full_info().uss for process in waiting]
    return StandbyCost(own_mib=max(own) / 2**20, cpu_s=spent() - before, waited_s=wait_s)


def measure(
    launcher: str, command: Sequence[str], *, ranks: int, kills: int, seed: int, advance: Callable[[], None]
) -> tuple[list[Recovery], StandbyCost | None]:
    """Runs the job under one launcher and kills one of its ranks again and again; then measures its standbys."""
    draw = random.Random(seed)
    recoveries: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        folder = Path(name)
        marks = Marks(folder, ranks)
        words = [*command, f"--nproc-per-node={ranks}", str(JOB), str(folder)]
        words += ["--restartable"] if launcher == STAYING else []
        with _running(words, folder) as running:
            attempt = 0
            for _ in range(kills):
                steps = draw.randint(8, 20)
                current = marks.wait(lambda found: _steps_of(found, attempt) >= steps)  # noqa: B023 - called at once
                time.sleep(draw.uniform(0, 0.05))
                victim = draw.randrange(ranks)
                at = time.monotonic()
                os.kill(int(current[victim][attempt]["pid"][0]), signal.SIGKILL)
                later = marks.wait(lambda found: any(_has_stepped(of, attempt) for of in found))  # noqa: B023
                attempt = max(number for of in later for number in of)
                # Wait for all ranks, so that each part is that of the last one.
                later = marks.wait(lambda found: all("step" in of.get(attempt, {}) for of in found))  # noqa: B023
                last = {name: max(of[attempt][name][0] for of in later) - at for name in PARTS}
                recoveries.append(Recovery(launcher=launcher, ranks=ranks, total_s=last["step"], marks=last))
                advance()
            cost = standby_cost(running.pid)
    return recoveries, cost


def _steps_of(found: list[dict[int, dict[str, list[float]]]], attempt: int) -> int:
    return min(len(of.get(attempt, {}).get("step", [])) for of in found)


def _has_stepped(of: dict[int, dict[str, list[float]]], attempt: int) -> bool:
    return any(number > attempt and "step" in marks for number, marks in of.items())


def table(recoveries: Sequence[Recovery]) -> Table:
    made = Table(title=f"Seconds from a kill to the first new step, {cores()} cores")
    for column in ("launcher", "ranks", "kills", "median", "99 %", *PARTS.values()):
        made.add_column(column, justify="left" if column == "launcher" else "right")
    for launcher, ranks in dict.fromkeys((one.launcher, one.ranks) for one in recoveries):
        rows = [one for one in recoveries if (one.launcher, one.ranks) == (launcher, ranks)]
        totals = sorted(one.total_s for one in rows)
        parts = [statistics.median(one.marks[name] for one in rows) for name in PARTS]
        spent = [after - before for before, after in zip([0.0, *parts], parts, strict=False)]
        late = totals[min(len(totals) - 1, int(0.99 * len(totals)))]
        figures = [statistics.median(totals), late, *spent]
        made.add_row(launcher, str(ranks), str(len(rows)), *(f"{figure:.2f}" for figure in figures))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kills", type=int, default=20, help="kills for each launcher and number of ranks")
    parser.add_argument("--host-kills", type=int, default=5, help="kills of a host that a spare takes the place of")
    parser.add_argument("--heartbeat-timeout", type=float, default=2.0, help="seconds until a silent host is lost")
    parser.add_argument("--launchers", nargs="*", choices=list(launchers()), default=list(launchers()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(argv)
    recoveries: list[Recovery] = []
    costs: dict[tuple[str, int], StandbyCost] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("kills", total=options.kills * len(options.ranks) * len(options.launchers))
        for ranks in options.ranks:
            for name in options.launchers:
                found, cost = measure(
                    name,
                    launchers()[name],
                    ranks=ranks,
                    kills=options.kills,
                    seed=options.seed,
                    advance=lambda: progress.advance(task),
                )
                recoveries += found
                if cost is not None:
                    costs[name, ranks] = cost
        deaths: list[HostDeath] = []
        if options.host_kills:
            deaths_task = progress.add_task("hosts", total=options.host_kills)
            deaths = measure_hosts(
                JOB,
                kills=options.host_kills,
                timeout_s=options.heartbeat_timeout,
                seed=options.seed,
                advance=lambda: progress.advance(deaths_task),
            )
    console = Console(width=150)
    if recoveries:
        console.print(table(recoveries))
    if deaths:
        console.print(host_table(deaths))
    for (name, ranks), cost in costs.items():
        console.print(
            f"{name}, {ranks} ranks: a process that waits has at most {cost.own_mib:.1f} MiB of its own; all of them"
            f" took {cost.cpu_s:.2f} s of processor time in {cost.waited_s:.0f} s"
        )
    if options.json is not None:
        waiting = [{"launcher": name, "ranks": ranks, **asdict(cost)} for (name, ranks), cost in costs.items()]
        figures = {"cores": cores(), "kills": [asdict(one) for one in recoveries], "standbys": waiting}
        figures["hosts"] = [{**asdict(one), "beyond_s": one.beyond_s} for one in deaths]
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
