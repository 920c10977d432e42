"""A local cluster under test: ``resiliency run --spares`` in a session of its own, looked at and hurt from outside."""

from __future__ import annotations

import io
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from resiliency.cli.inject import main as inject
from resiliency.errors import ResiliencyError
from resiliency.monitor.launcher_process import find_launcher
from resiliency.monitor.state import StateFolder
from resiliency.supervisor.client import OperatorClient
from resiliency.testing.hosts.inject import Fault, Injector, Target
from resiliency.testing.zygote import Zygote
from tests.e2e import cluster_job
from tests.e2e.cluster_job import BATCH, checksum, loss_of, samples
from tests.launch.launching import Job
from tests.launch.soak_job import SIZE, gradient
from tests.patience import PATIENCE
from tests.processes import wait_ended

__all__ = ["POLL_S", "Cluster", "Reference", "check_records"]

JOB = Path(cluster_job.__file__)
POLL_S = 0.05
#: Nothing, zeros, requests of other protocols, lengths without an end, and bytes by chance.
GARBAGE = (
    b"",
    bytes(64),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"\xff" * 100_000,
    random.Random(1).randbytes(4096),
)
#: Of a monitor's log.
CONNECTED = "connected to the supervisor at"


class Reference:
    """The checksum after each step of a run in which nothing happened, and what its ranks have written of it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._weights = torch.arange(SIZE, dtype=torch.float64)
        self._sums = [checksum(self._weights)]
        self._records: list[list[tuple[str, list[int]]]] = []

    def record(self, step: int, rank: int) -> tuple[str, list[int]]:
        """Loss and samples of a rank in a step."""
        self.after(step)
        return self._records[step - 1][rank]

    def after(self, step: int) -> int:
        while len(self._sums) <= step:
            done = len(self._sums) - 1
            ids = [samples(done * BATCH * self._ranks, rank) for rank in range(self._ranks)]
            self._records.append([(loss_of(self._weights, each, done), each) for each in ids])
            total = sum(gradient(self._weights, done, rank) for rank in range(self._ranks))
            self._weights = (self._weights + total).remainder(65521)
            self._sums.append(checksum(self._weights))
        return self._sums[step]


def check_records(folder: Path, reference: Reference, ranks: int, last: int) -> None:
    """The losses of all ranks up to a step are those of a run in which nothing happened, bit for bit, and so are the
    samples: each was seen once, but in steps that were made again."""
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        records: dict[int, tuple[str, list[int]]] = {}
        for line in (folder / f"records-{rank}").read_text().splitlines():
            _, step, loss, ids = line.split()
            records[int(step)] = loss, [int(one) for one in ids.split(",")]
            assert records[int(step)] == reference.record(int(step), rank), f"rank {rank}, step {step}"
        assert sorted(records) == [*range(1, last + 1)], f"rank {rank} has left out steps"
        seen.update(one for _, ids in records.values() for one in ids)
    assert max(seen.values()) - min(seen.values()) <= 1, "some samples were seen more often than others"
    assert sum(seen.values()) == last * ranks * BATCH


class Cluster:
    """Everything that it has started is killed by :meth:`close`. Hosts are h-0, h-1, ..., with one rank each.

    Args:
        job: the script, which writes ``starts`` and ``steps`` as :mod:`tests.e2e.cluster_job` does.
    """

    def __init__(self, folder: Path, zygote: Zygote, *flags: Any, job: Path = JOB) -> None:
        self.folder, self._back = folder, 0
        self._talking: list[socket.socket] = []
        words = ["--state-dir", folder / "state", *flags, "--nproc-per-node", 1, job, folder]
        self.job = Job("ours", words, folder / "output", zygote, cwd=folder, env={"RESILIENCY_NODE": "h"})

    # -- what is true -------------------------------------------------------------------------------------------------

    def progress(self) -> tuple[int, int]:
        """Newest generation that made a step, and the step."""
        with suppress(FileNotFoundError, IndexError, ValueError), open(self.folder / "steps", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400))
            generation, step, _ = file.read().splitlines()[-1].split()
            return int(generation), int(step)
        return 0, 0

    def starts(self) -> list[tuple[int, int, str, int]]:
        """Generation, rank, host and process of each start of a rank."""
        with suppress(FileNotFoundError):
            lines = [line.split() for line in (self.folder / "starts").read_text().splitlines()]
            return [(int(generation), int(rank), host, int(pid)) for generation, rank, host, pid in lines]
        return []

    def where(self, rank: int) -> tuple[str, int]:
        """Host and process of a rank's newest start."""
        return max((generation, host, pid) for generation, each, host, pid in self.starts() if each == rank)[1:]

    def owned_twice(self) -> dict[tuple[int, int], int]:
        """(generation, rank) that were started more than once."""
        counted = Counter((generation, rank) for generation, rank, _, _ in self.starts())
        return {key: count for key, count in counted.items() if count > 1}

    def status(self) -> dict[str, Any]:
        """What the supervisor says; empty: it does not answer."""
        with suppress(OSError, ResiliencyError):
            address = (self.folder / "state" / "address").read_text()
            token = (self.folder / "state" / "operator-token").read_text()
            return OperatorClient(f"http://{address}", token=token).get("/v1/status")
        return {}

    def ready(self) -> list[str]:
        """Hosts that can have ranks."""
        return [host["name"] for host in self.status().get("hosts", []) if host["state"] == "ready"]

    def spare(self, hosts: int) -> str:
        """The first of so many hosts that has no rank of the newest generation."""
        newest = max(generation for generation, *_ in self.starts())
        placed = {host for generation, _, host, _ in self.starts() if generation == newest}
        return next(host for host in map("h-{}".format, range(hosts)) if host not in placed)

    def wait_until(self, is_so: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        timeout_s *= PATIENCE
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.job.running, f"{what}: the job has ended:\n{self.job.text[-8000:]}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s:\n{self.job.text[-8000:]}"
            self.job.descendants()
            time.sleep(POLL_S)

    def wait_beyond(self, step: int, *, generation: int = 0) -> None:
        self.wait_until(
            lambda: self.progress() > (generation, step),
            f"a step after {step} of generation {generation} or a later one",
        )

    # -- who is who ---------------------------------------------------------------------------------------------------

    def process(self, *words: str) -> psutil.Process:
        """The one whose command line has all these words."""
        for process in self.job.descendants():
            with suppress(psutil.NoSuchProcess):
                if set(words) <= set(process.cmdline()):
                    return process
        raise AssertionError(f"no process {words}:\n{self.job.text[-4000:]}")

    def supervisor(self) -> psutil.Process:
        return self.process("supervisor", "run", "--until-ended")

    def monitor(self, host: str) -> psutil.Process:
        return self.process("host-monitor", host)

    def launcher(self, host: str) -> psutil.Process:
        """Of a host, also when an earlier monitor has started it."""
        state = StateFolder(str(self._state_of(host)), host)
        found = find_launcher(state.socket_name)
        assert found is not None, f"{host} has no launcher:\n{self.job.text[-4000:]}"
        return psutil.Process(found.pid)

    def _state_of(self, host: str) -> Path:
        return self.folder / "state" / f"host-{host.removeprefix('h-')}"

    # -- faults -------------------------------------------------------------------------------------------------------

    def inject(self, fault: str, host: str, *words: str) -> None:
        """By the command line, when the monitor knows its ranks."""
        where = ["--state-dir", str(self._state_of(host)), "--host", host]
        with redirect_stderr(io.StringIO()):
            self.wait_until(lambda: inject([fault, *where, *words]) == 0, f"inject {fault}", timeout_s=40)

    def cut_off(self, hosts: Mapping[str, float]) -> None:
        """Several hosts at once, each for so many seconds. One after the other, on a machine that is busy, they would be
        hosts that are lost one after the other."""

        def cut(host: str) -> None:
            target = Target(state_dir=str(self._state_of(host)), host=host)
            Injector(target, lambda text: None).inject(Fault(kind="partition", seconds=hosts[host]))

        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(cut, hosts))

    def say_garbage(self) -> int:
        """To every port on which something of the job listens, by connections that stay; how many took it."""
        for port in sorted(self._ports()):
            for garbage in GARBAGE:
                self._talking.append(socket.socket())
                self._talking[-1].settimeout(1)
                with suppress(OSError):  # it ends, or has hung up
                    self._talking[-1].connect(("127.0.0.1", port))
                    self._talking[-1].sendall(garbage)
        return len(self._talking)

    def _ports(self) -> set[int]:
        found = set()
        for process in self.job.descendants():
            with suppress(psutil.Error):
                known = process.net_connections("tcp")
                found |= {each.laddr.port for each in known if each.status == psutil.CONN_LISTEN}
        return found

    def kill_host(self, host: str) -> None:
        """All of it at once: monitor, launcher, ranks, agent."""
        monitor, launcher = self.monitor(host), self.launcher(host)
        self.kill(monitor, launcher, *monitor.children(recursive=True), *launcher.children(recursive=True))

    def kill(self, *processes: psutil.Process) -> None:
        """And waits for their ends."""
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert wait_ended(processes, timeout_s=20) == []

    def bring_back(self) -> None:
        """The host that was lost last; until the supervisor hears of it."""
        self._back += 1
        self.wait_until(lambda: self.job.text.count("starts it again") >= self._back, "the end of the host is seen")
        heard = self.job.text.count(CONNECTED)
        os.kill(self.job.pid, signal.SIGUSR2)
        self.wait_until(lambda: self.job.text.count(CONNECTED) > heard, "the host is heard of again")

    def close(self) -> None:
        self.job.close()
        for each in self._talking:
            each.close()
