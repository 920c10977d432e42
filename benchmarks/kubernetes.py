"""Measures the supervisor on a large Kubernetes cluster: ``python -m benchmarks.kubernetes``.

The control plane (etcd, API server, controllers, JobSet) and the supervisor are real, with the settings and rights that
the charts make; nodes and pods are simulated, with a host monitor's real connection for each, in one process. All share
this machine. One node dies. Needs the programs that tests/cluster needs.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from resiliency.testing.zygote import Zygote
from tests.cluster.client import wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rig import Rig
from tests.cluster.simulated_release import SimulatedJob, SimulatedRelease

__all__ = ["Figures", "main", "measure"]

_DEADLINE_S = 900.0
#: What a supervisor imports, and nothing else: the tests' fork server has torch, whose memory would count.
_PRELOAD = (
    "aiohttp.web",
    "tests.supervisor.supervisor_command",
    "resiliency.cli.supervisor",
    "resiliency.supervisor.service",
)
_CONFIRMED_S, _WRITES, _MEMORY_BYTES = 5.0, 2, 300_000_000


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one lost node takes.

    Attributes:
        noticed_s: from the death of a node to the decision; the timeout is a part of it.
        confirmed_s: from the decision until all hosts have confirmed their new places.
        cpu_s: of the supervisor, from the death of the node until then, heartbeats included.
        writes: of the supervisor, for the swap.
        renewals_per_min, others_per_min: requests to the API server in steady state: of the Lease, and all others but
            the two watches, which begin anew every five minutes.
        memory_bytes: of the supervisor.
    """

    nodes: int
    hosts: int
    noticed_s: float
    timeout_s: float
    confirmed_s: float
    cpu_s: float
    writes: int
    renewals_per_min: float
    others_per_min: float
    memory_bytes: int


def measure(*, nodes: int = 1000, period_s: float = 5.0, steady_s: float = 60.0) -> Figures:
    """Starts a cluster, measures, and ends it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with (
            ControlPlane(root / "control-plane") as cluster,
            Zygote(_PRELOAD, log=str(root / "log"), path=[str(Path(__file__).parents[1])]) as forks,
        ):
            settings = {
                "heartbeat_polling_period_s": period_s,
                "heartbeat_timeout_s": 2 * period_s,
                "lease_s": 5,
                "thaw_s": 5,
                "correlate_s": 0.2,
            }
            rig = Rig(cluster, root)
            release = SimulatedRelease(rig, root / "release", forks, nodes=nodes, hosts=nodes - 2, **settings)
            _say(f"{nodes} nodes are made")
            job = release.job(spares=1, timeout_s=_DEADLINE_S)
            try:
                return _measure(job, nodes, 2 * period_s, steady_s)
            except BaseException:
                print(job.logs()[-3000:], file=sys.stderr)
                raise
            finally:
                job.simulated.close()
                for each in job.supervisors:
                    each.kill()


def _measure(job: SimulatedJob, nodes: int, timeout_s: float, steady_s: float) -> Figures:
    supervisor = job.supervisors[0]
    _say("the job trains")
    time.sleep(2 * timeout_s)  # the last tokens are reviewed, and the first reports heard
    user = f"system:serviceaccount:{job.release.system}:supervisor"
    before = len(job.cluster.requests(user))
    time.sleep(steady_s)  # the requests of this time are what is measured
    requests = [each for each in job.cluster.requests(user)[before:] if each.verb != "watch"]
    renewals = sum(each.resource == "leases" for each in requests)

    generation, places = job.generation(), job.places()
    process = psutil.Process(supervisor.process.pid)
    died_at, used_s = time.time(), sum(process.cpu_times()[:2])
    job.kill_nodes(places[len(places) // 2])
    wait_for("places", lambda: _has_placed(job, generation), timeout_s=_DEADLINE_S, every_s=0.02)
    confirmed_at, used_s = time.time(), sum(process.cpu_times()[:2]) - used_s
    decided_at = _decided_at(supervisor.log.read_text())
    wait_for("the writes", lambda: len(supervisor.writes()) >= _WRITES, timeout_s=_DEADLINE_S)
    job.until_it_trains(after=generation, timeout_s=_DEADLINE_S)
    return Figures(
        nodes=nodes,
        hosts=len(places),
        noticed_s=decided_at - died_at,
        timeout_s=timeout_s,
        confirmed_s=confirmed_at - decided_at,
        cpu_s=used_s,
        writes=len(supervisor.writes()),
        renewals_per_min=60 * renewals / steady_s,
        others_per_min=60 * (len(requests) - renewals) / steady_s,
        memory_bytes=process.memory_info().rss,
    )


def _has_placed(job: SimulatedJob, generation: int) -> bool:
    """Whether all hosts have confirmed the places of a later generation."""
    workload = job.workload()
    if workload["generation"] <= generation:
        return False
    plan = workload["plan"]
    return plan is None or any(each["kind"] == "place" and each["state"] == "done" for each in plan["steps"])


def _decided_at(log: str) -> float:
    found = re.findall(r"^(\S+ \S+) WARNING .*: hot_swap ", log, re.MULTILINE)
    return datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S,%f").timestamp()  # noqa: DTZ007 - the log has local times


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kubernetes", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--period", type=float, default=5.0, help="seconds between heartbeats")
    parser.add_argument("--steady", type=float, default=60.0, help="seconds to count requests for")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    figures = measure(nodes=args.nodes, period_s=args.period, steady_s=args.steady)
    if args.json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        _print(figures)
    good = figures.confirmed_s <= _CONFIRMED_S and figures.memory_bytes <= _MEMORY_BYTES
    return int(not (good and figures.writes == _WRITES and figures.others_per_min == 0))


def _print(figures: Figures) -> None:
    table = Table(title=f"{figures.nodes} nodes, a job of {figures.hosts} hosts, one node is lost")
    for name in ("figure", "measured", "promised"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    table.add_row(f"until it is decided (timeout {figures.timeout_s:.0f} s)", f"{figures.noticed_s:.1f} s", "")
    table.add_row("until all places are confirmed", f"{figures.confirmed_s:.2f} s", f"{_CONFIRMED_S:.0f} s")
    table.add_row("CPU of the supervisor until then", f"{figures.cpu_s:.2f} s", "")
    table.add_row("writes to the API server", str(figures.writes), str(_WRITES))
    table.add_row("renewals of the Lease a minute", f"{figures.renewals_per_min:.0f}", "")
    table.add_row("other requests a minute", f"{figures.others_per_min:.1f}", "0")
    memory, most = figures.memory_bytes / 1e6, _MEMORY_BYTES / 1e6
    table.add_row("memory of the supervisor", f"{memory:.0f} MB", f"{most:.0f} MB")
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
