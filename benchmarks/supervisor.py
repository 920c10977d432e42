"""Measures one supervisor with thousands of hosts: ``python -m benchmarks.supervisor``.

The supervisor is the real command, held on one core. Its hosts are simulated in other processes on this machine, and
send what real ones would. Reported are the time from a report until it is handled, processor time and memory, the time
until a lost host has a remedy, and the time from a burst of failures until all hosts were told what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

__all__ = ["Figures", "main", "measure"]

_DEADLINE_S = 120.0
_P99_S, _MEMORY_BYTES, _BURST_S = 0.050, 1 << 30, 5.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one supervisor takes for its hosts.

    Attributes:
        p50_s, p99_s: median and 99th percentile, in steady state, of the time from a report until its host knows that
            it was handled: network, queue and handling together.
        core: share of one core in steady state.
        lost_s: from a host's end until its workload has a generation without it.
        burst: number of ranks lost at once.
        burst_s: from their loss until every host of their workloads was told its new place.
    """

    hosts: int
    ranks: int
    messages_per_s: float
    p50_s: float
    p99_s: float
    core: float
    memory_bytes: int
    lost_s: float
    lost_target_s: float
    burst: int
    burst_s: float


class _Cluster:
    """The supervisor and the processes with simulated hosts."""

    def __init__(self, folder: Path, *, hosts: int, ranks: int, jobs: int, processes: int, period_s: float) -> None:
        self.hosts, self.ranks, self.period_s, self.jobs = hosts, ranks, period_s, jobs
        self.timeout_s = 2 * period_s
        size = hosts // jobs - 1  # one spare for each
        config = {
            "listen": "127.0.0.1:0",
            "state": str(folder / "supervisor.db"),
            "insecure_no_authentication": True,
            "heartbeat_polling_period_s": period_s,
            "heartbeat_timeout_s": self.timeout_s,
            "workloads": [
                {"name": f"job-{n}", "replicas": size, "ranks_per_host": ranks, "dwell_s": 60.0} for n in range(jobs)
            ],
        }
        (folder / "supervisor.yaml").write_text(json.dumps(config))
        self.log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "resiliency.cli", "supervisor", "run", "-f", str(folder / "supervisor.yaml")]
        self.supervisor = subprocess.Popen(command, stderr=self.log, preexec_fn=_on_one_core)
        self.process = psutil.Process(self.supervisor.pid)
        self.clients: list[subprocess.Popen[str]] = []
        found = _until(lambda: re.search(r"listens on 127\.0\.0\.1:(\d+)", Path(self.log.name).read_text()))
        self.url = f"http://127.0.0.1:{found[1]}"
        share = -(-hosts // processes)
        for first in range(0, hosts, share):
            words = ["127.0.0.1", found[1], str(first), str(min(share, hosts - first)), str(ranks), str(period_s)]
            self.clients.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks._supervisor_hosts", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for client in self.clients:
            _line(client)

    def close(self) -> None:
        for process in [*self.clients, self.supervisor]:
            process.kill()
            process.wait(30)
            for end in (process.stdin, process.stdout):
                if end is not None:
                    end.close()
        self.log.close()

    def tell(self, text: str) -> list[str]:
        for client in self.clients:
            assert client.stdin is not None
            client.stdin.write(text + "\n")
            client.stdin.flush()
        return [_line(client) for client in self.clients]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get("/v1/status?hosts=0"))
        return found

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def messages(self) -> float:
        """Number of messages that the supervisor has handled so far."""
        found = re.search(r"resiliency_supervisor_message_seconds_count (\S+)", self._get("/metrics"))
        assert found is not None
        return float(found[1])

    def times(self) -> list[float]:
        """Seconds from a report until its host knows that it was handled, of all since the last call, sorted."""
        return sorted(one for line in self.tell("times") for one in json.loads(line))

    def told_s(self) -> float:
        """When the last host was told of another place, in monotonic seconds."""
        return max(json.loads(line) for line in self.tell("told"))

    def places(self) -> dict[str, tuple[int, list[str], str]]:
        return {one["name"]: (one["generation"], one["hosts"], one["state"]) for one in self.status()["workloads"]}


def measure(
    *,
    hosts: int = 10_000,
    ranks: int = 8,
    jobs: int = 20,
    processes: int = 1,
    period_s: float = 5.0,
    steady_s: float = 30.0,
    burst: int = 500,
) -> Figures:
    """Starts a supervisor and its simulated hosts, measures, and ends them all."""
    _raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        cluster = _Cluster(Path(folder), hosts=hosts, ranks=ranks, jobs=jobs, processes=processes, period_s=period_s)
        try:
            _until(lambda: all(state == "running" for _, _, state in cluster.places().values()), every_s=1.0)
            return _measure(cluster, steady_s, burst)
        except BaseException:
            print(Path(cluster.log.name).read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            cluster.close()


def _measure(cluster: _Cluster, steady_s: float, burst: int) -> Figures:
    cluster.times()
    count, cpu, began_s = cluster.messages(), sum(cluster.process.cpu_times()[:2]), time.monotonic()
    time.sleep(steady_s)  # the reports of this time are what is measured
    took_s, times = time.monotonic() - began_s, cluster.times()
    cpu, count = sum(cluster.process.cpu_times()[:2]) - cpu, cluster.messages() - count

    places = cluster.places()
    victim = places["job-0"][1][1]
    generation = places["job-0"][0]
    began_s = time.monotonic()
    cluster.tell(f"kill {victim} job-0 {generation}")
    _until(lambda: cluster.places()["job-0"][0] > generation, every_s=0.05)
    lost_s = time.monotonic() - began_s
    _until(lambda: all(state == "running" for _, _, state in cluster.places().values()), every_s=0.5)

    places = cluster.places()
    all_hosts = [host for _, of_job, _ in places.values() for host in of_job]
    victims = all_hosts[:: max(1, len(all_hosts) // burst)][:burst]
    hit = {name for name, (_, of_job, _) in places.items() if set(of_job) & set(victims)}
    generations = {name: places[name][0] for name in hit}
    began_s = time.monotonic()
    cluster.tell("lose " + " ".join(victims))
    _until(lambda: all(cluster.places()[name][0] > generations[name] for name in hit), every_s=0.5)
    _until(lambda: all(state == "running" for _, _, state in cluster.places().values()), every_s=0.5)
    burst_s = cluster.told_s() - began_s
    return Figures(
        hosts=cluster.hosts,
        ranks=cluster.ranks,
        messages_per_s=count / took_s,
        p50_s=times[len(times) // 2],
        p99_s=times[len(times) * 99 // 100],
        core=cpu / took_s,
        memory_bytes=cluster.process.memory_info().rss,
        lost_s=lost_s,
        lost_target_s=cluster.timeout_s + cluster.period_s,
        burst=len(victims),
        burst_s=burst_s,
    )


def _until(condition: Any, *, every_s: float = 0.1) -> Any:
    end_s = time.monotonic() + _DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {_DEADLINE_S:.0f} s")
        time.sleep(every_s)
    return found


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _DEADLINE_S)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise RuntimeError("a process with hosts has ended, or does not answer")
    return line


def _raise_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.supervisor", description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=8, help="of each host")
    parser.add_argument("--jobs", type=int, default=20, help="workloads that the hosts are divided among")
    parser.add_argument("--processes", type=int, default=1, help="that the hosts are simulated in")
    parser.add_argument("--period", type=float, default=5.0, help="seconds between heartbeats")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds to measure for")
    parser.add_argument("--burst", type=int, default=500, help="ranks lost at once")
    parser.add_argument("--quick", action="store_true", help="200 hosts, a few seconds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    values = {"hosts": args.hosts, "ranks": args.ranks, "jobs": args.jobs, "processes": args.processes}
    values |= {"period_s": args.period, "steady_s": args.steady, "burst": args.burst}
    if args.quick:
        values |= {"hosts": 200, "jobs": 4, "period_s": 0.5, "steady_s": 1.0, "burst": 50}
    figures = measure(**values)
    if args.json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        _print(figures)
    good = figures.p99_s <= _P99_S and figures.memory_bytes <= _MEMORY_BYTES and figures.burst_s <= _BURST_S
    return int(not (good and figures.lost_s <= figures.lost_target_s))


def _print(figures: Figures) -> None:
    table = Table(title=f"{figures.hosts} hosts with {figures.ranks} ranks each, one supervisor on one core")
    for name in ("figure", "measured", "promised"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    table.add_row("messages a second", f"{figures.messages_per_s:.0f}", "")
    table.add_row("a report is handled, median", f"{figures.p50_s * 1e3:.1f} ms", "")
    table.add_row("a report is handled, 99th percentile", f"{figures.p99_s * 1e3:.1f} ms", f"{_P99_S * 1e3:.0f} ms")
    table.add_row("share of the core", f"{figures.core:.0%}", "")
    table.add_row("memory", f"{figures.memory_bytes / 2**20:.0f} MiB", f"{_MEMORY_BYTES / 2**20:.0f} MiB")
    table.add_row("a lost host has a remedy after", f"{figures.lost_s:.1f} s", f"{figures.lost_target_s:.0f} s")
    burst = f"{figures.burst} ranks lost at once, and all hosts told what to do"
    table.add_row(burst, f"{figures.burst_s:.2f} s", f"{_BURST_S:.0f} s")
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
