"""A supervisor and its hosts on one machine, with launchers that train nothing: what is left, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.cli.inject import main as inject
from resiliency.errors import ConfigError
from resiliency.supervisor.client import OperatorClient
from resiliency.supervisor.sqlite_store import SqliteStore
from resiliency.testing.hosts.local_cluster import _locked
from tests.networks import has_route_to, network_of, processes_in
from tests.patience import PATIENCE
from tests.processes import descendant_pids, wait_ended

pytestmark = [pytest.mark.kill, pytest.mark.long]


class Run:
    """In a session of its own; whatever it has started is killed at the end. The state folder is a relative path with a
    space."""

    def __init__(self, folder: Path, *, hosts: int, fewest: int = 1, namespaces: bool = False) -> None:
        self.state, self.finished = folder / "a state", folder / "finished"
        self.output = folder / f"output-{time.monotonic_ns()}"
        words = [sys.executable, str(Path(__file__).with_name("local_run.py")), self.state.name, str(self.finished)]
        path = os.pathsep.join(filter(None, sys.path))
        with self.output.open("wb") as output:
            self.popen = subprocess.Popen(
                [*words, str(hosts), str(fewest), str(namespaces)],
                env={**os.environ, "PYTHONPATH": path, "RESILIENCY_NODE": "this machine"},
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=folder,
            )
        self.seen: dict[int, psutil.Process] = {}

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def look(self) -> list[psutil.Process]:
        for pid in descendant_pids(self.popen.pid):
            with suppress(psutil.NoSuchProcess):
                if pid not in self.seen or not self.seen[pid].is_running():
                    self.seen[pid] = psutil.Process(pid)
        return list(self.seen.values())

    def until(self, condition: Any, within_s: float = 60.0) -> Any:
        end = time.monotonic() + PATIENCE * within_s
        while not (found := condition()):
            assert time.monotonic() < end, self.text[-6000:]
            self.look()
            time.sleep(0.05)
        return found

    def monitor(self, number: int) -> psutil.Process:
        for one in self.look():
            with suppress(psutil.NoSuchProcess):
                words = one.cmdline()
                if "host-monitor" in words and words[words.index("--host") + 1].endswith(f"-{number}"):
                    return one
        raise AssertionError(f"no monitor {number}")

    def wait(self, within_s: float = 60.0) -> int:
        self.until(lambda: self.popen.poll() is not None, within_s)
        return self.popen.wait()

    def close(self) -> None:
        for one in self.look():
            with suppress(psutil.NoSuchProcess):
                one.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def run(**values: Any) -> Run:
        made.append(Run(tmp_path, **values))
        return made[-1]

    yield run
    for one in made:
        one.close()


def generation_of(run: Run) -> int:
    store = SqliteStore(str(run.state / "supervisor.db"))
    try:
        return store.load().workloads[0].generation
    finally:
        store.close()


def trains(run: Run, *, hosts: int) -> bool:
    """It may start with fewer hosts, and grow."""
    since = run.text.rpartition(", generation")[2]
    return f", {hosts} hosts)" in since and ("its ranks train" in since or "scale_up helped" in since)


@pytest.mark.nightly
def test_a_state_folder_can_be_used_again(start: Any) -> None:
    """The first run has completed, and its supervisor listened somewhere else."""
    for generation in (1, 2):
        run = start(hosts=1)
        run.finished.touch()
        assert run.wait() == 0, run.text[-6000:]
        assert generation_of(run) == generation and not wait_ended(run.seen.values(), timeout_s=10)


def test_a_state_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    fd = _locked(tmp_path)
    with pytest.raises(ConfigError, match="another run uses it"):
        _locked(tmp_path)
    os.close(fd)
    os.close(_locked(tmp_path))


@pytest.mark.nightly
def test_hosts_whose_monitors_are_killed_are_gone_with_all_of_it(start: Any) -> None:
    """Two of three at once: the supervisor alone could not tell that from a network that is cut, and would wait for
    ever. At last no host is left, and the run ends."""
    run = start(hosts=3)
    run.until(lambda: trains(run, hosts=3))
    monitors = {number: run.monitor(number) for number in range(3)}
    left = [child for number in (0, 2) for child in monitors[number].children(recursive=True)]
    assert len(left) >= 2  # launchers, and ranks where they have places
    for number in (0, 2):
        monitors[number].kill()
    run.until(lambda: "hosts have fallen silent" in run.text)
    assert not wait_ended(left, timeout_s=10)
    run.until(lambda: "scale_down helped" in run.text)
    monitors[1].kill()
    assert run.wait() == 3, run.text[-6000:]
    assert "no host is left" in run.text and not wait_ended(run.seen.values(), timeout_s=10)


def test_faults_of_devices_are_put_into_a_job_that_runs_and_its_host_goes(start: Any) -> None:
    """By its class: an application's own fault is no reason to do anything, and a device that is lost is one."""
    run = start(hosts=2)
    run.until(lambda: trains(run, hosts=2))

    def put_in(*words: str) -> None:
        assert inject([*words, "--state-dir", str(run.state / "host-0"), "--host", "this-machine-0"]) == 0

    plans = run.text.count("(plan ")
    put_in("xid", "--code", "45", "--device", "0000:3b:00")  # follows a kill, and is ignored
    run.until(lambda: "XID 45" in run.text)
    put_in("xid", "--code", "79", "--device", "0000:3b:00")
    run.until(lambda: "scale_down this-machine-0" in run.text)
    assert run.text.count("(plan ") == plans + 1
    put_in("ecc", "--errors", "2", "--device", "0000:5e:00")
    run.until(lambda: "2 memory errors were not corrected (injected fault)" in run.text)
    run.finished.touch()
    assert run.wait() == 0, run.text[-6000:]


@pytest.mark.nightly
def test_chain_of_aborts_nobody_ends_because_another_was_killed(start: Any) -> None:
    """Neither at once nor when tries to reach it have failed for a while."""
    run = start(hosts=2)
    run.until(lambda: trains(run, hosts=2))
    everybody = psutil.Process(run.popen.pid).children(recursive=True)
    run.look()
    (supervisor,) = (one for one in everybody if {"supervisor", "run"} <= set(one.cmdline()))
    killed = [supervisor, run.monitor(0)]
    run.popen.kill()  # it would start the supervisor again
    for one in killed:
        one.kill()
    others = [one for one in everybody if one not in killed and one.is_running()]
    assert len(others) >= 5  # a monitor, two launchers with a rank each
    assert wait_ended(others, timeout_s=9) == others
    assert "this is tried again for ever" in run.text


# ---- each host with a network of its own


class Networks:
    """Of two hosts that have places, as they are seen from outside."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.until(lambda: trains(run, hosts=2))
        self.supervisor = (run.state / "address").read_text().strip()
        self.first = self.supervisor.rpartition(".")[0]
        self.namespaces = {network_of(run.monitor(number).pid) for number in range(2)}
        assert len(self.namespaces) == 2 and network_of(os.getpid()) not in self.namespaces
        assert has_route_to(f"{self.first}.0")

    def reaches(self, number: int) -> bool:
        """Nobody listens there: a host that is reached says so."""
        with socket.socket() as end:
            end.settimeout(0.3)
            try:
                end.connect((f"{self.first}.{10 + number}", 1))
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
        raise AssertionError("somebody listens at port 1")

    def cut_off(self, number: int, seconds: int) -> None:
        where = ["--state-dir", str(self.run.state / f"host-{number}"), "--host", f"this-machine-{number}"]
        assert inject(["partition", *where, "--for", str(seconds)]) == 0, self.run.text[-6000:]

    def is_gone(self) -> bool:
        return not has_route_to(f"{self.first}.0") and not processes_in(self.namespaces)


@pytest.mark.namespaces
def test_a_host_is_cut_off_until_its_monitor_says_so_or_is_gone_and_no_network_is_left(start: Any) -> None:
    run = start(hosts=2, namespaces=True)
    networks = Networks(run)
    assert networks.reaches(0) and networks.reaches(1)
    networks.cut_off(0, 1)
    assert not networks.reaches(0) and networks.reaches(1)
    run.until(lambda: networks.reaches(0))
    networks.cut_off(0, 600)
    run.until(lambda: "this-machine-0 is silent" in run.text)
    assert not networks.reaches(0)
    run.monitor(0).kill()
    run.until(lambda: networks.reaches(0))
    os.kill(run.popen.pid, signal.SIGUSR2)
    run.until(lambda: "taking over the launcher" in run.text)  # whose socket is of that host's network alone
    assert {network_of(run.monitor(number).pid) for number in range(2)} == networks.namespaces
    networks.cut_off(1, 600)
    os.kill(run.popen.pid, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.text[-6000:]
    assert not wait_ended(run.seen.values(), timeout_s=10) and networks.is_gone()


@pytest.mark.namespaces
def test_hosts_go_on_when_what_has_made_their_network_is_killed_and_take_it_with_them(start: Any) -> None:
    run = start(hosts=2, namespaces=True)
    networks = Networks(run)
    run.look()
    run.popen.kill()
    run.popen.wait(10)
    assert networks.reaches(0) and networks.reaches(1)
    client = OperatorClient(f"http://{networks.supervisor}", token=(run.state / "operator-token").read_text())
    assert [host["state"] for host in client.get("/v1/status")["hosts"]] == ["ready", "ready"]
    run.finished.touch()
    assert not wait_ended(run.seen.values(), timeout_s=30)
    run.until(networks.is_gone, within_s=10)  # the kernel does it when nobody holds them any more
