"""Launchers below a supervisor: real launchers and ranks, and monitors that say what a test tells them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.monitors import FakeMonitor, FakeSupervisor
from tests.patience import PATIENCE
from tests.processes import wait_ended
from tests.rings import few

pytestmark = pytest.mark.timeout(180)

#: Sums over all ranks again and again, until a file lets it go. Writes down that it has met the others.
SUMMING = """
    import json, os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from resiliency.launch import beat, restartable
    from resiliency.runtime.heartbeat import worked

    folder = Path(sys.argv[1])

    def main():
        generation, rank = os.environ["RESILIENCY_ATTEMPT"], os.environ["RANK"]
        if (folder / f"slow-{generation}").exists():
            (folder / f"came-{generation}-{rank}").touch()
            time.sleep(100)
        if (folder / f"finish-{generation}-{rank}").exists():
            return
        if (folder / f"preempt-{generation}").exists():
            sys.exit(75)
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        names = ("RESILIENCY_", "TORCHELASTIC_RESTART_COUNT", "MASTER_", "WORLD_SIZE", "GROUP_")
        there = {name: value for name, value in os.environ.items() if name.startswith(names)}
        path = folder / f"there-{generation}-{rank}"
        path.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), "sum": int(total), **there}))
        path.with_suffix(".new").rename(path)
        done = torch.zeros(1)
        while not done:
            time.sleep(0.005)
            if (folder / f"leave-{rank}").exists():
                os._exit(0)
            beat()
            worked(0.25)
            done.fill_(float((folder / "go").exists()))
            dist.all_reduce(done)
        dist.destroy_process_group()

    (restartable(main) if os.environ["STAYS"] == "1" else main)()
"""


class Cluster:
    """Hosts of one job on this machine."""

    def __init__(self, launch: Any, folder: Path) -> None:
        self._launch = launch
        self.folder = folder
        self.supervisor = FakeSupervisor()
        self.jobs: dict[FakeMonitor, Any] = {}

    def host(self, *, ranks: int = 1, stays: bool = True, script: str = SUMMING, flags: tuple[Any, ...] = ()) -> Any:
        monitor = self.supervisor.monitor()
        flags = ("--rdzv-backend", "supervised", "--rdzv-endpoint", monitor.name, "--local-addr", "127.0.0.1", *flags)
        if "--leave-timeout" not in flags:
            flags = (*flags, "--leave-timeout", 10 * PATIENCE)  # 10 is its default
        env = {"STAYS": str(int(stays)), "RESILIENCY_NODE": f"host-{len(self.jobs)}"}
        self.jobs[monitor] = self._launch(script, *flags, "--nproc-per-node", ranks, arguments=[self.folder], env=env)
        return monitor

    def there(self, generation: int, rank: int, timeout_s: float = 60.0) -> Any:
        """What a rank wrote when it had met the others."""
        path, deadline = self.folder / f"there-{generation}-{rank}", time.monotonic() + PATIENCE * timeout_s
        while not path.exists():
            assert time.monotonic() < deadline, f"{path.name} was not written:\n{self.text}"
            time.sleep(0.005)
        return json.loads(path.read_text())

    @property
    def text(self) -> str:
        return "\n".join(f"-- host {at}\n{job.text}" for at, job in enumerate(self.jobs.values()))

    def finish(self, *hosts: FakeMonitor) -> None:
        """Lets the ranks end, and then the launchers; nothing is left of them."""
        for job in self.jobs.values():
            job.descendants()
        (self.folder / "go").touch()
        for host in hosts:
            assert host.wait("ended", generation=self.supervisor.generation)[1]["preempted"] is False
        self.supervisor.complete()
        for job in self.jobs.values():
            if job.running:
                assert job.wait() == 0, job.text
            assert job.left() == []
            assert 'elastic/agent/server/api.py", line' not in job.text, "the launcher has raised"


@pytest.fixture
def cluster(launch: Any, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(launch, tmp_path)
    yield made
    made.supervisor.close()


def _kill(pid: int) -> float:
    """Seconds of the monotonic clock when the kernel says that the process has ended."""
    fd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([fd], [], [], 30)[0]
        return time.monotonic()
    finally:
        os.close(fd)


@pytest.mark.parametrize("stays", few([True, False], [True]), ids=["ranks stay", "plain script"])
def test_a_lost_rank_is_said_at_once_and_the_next_place_starts_all_again(stays: bool, cluster: Cluster) -> None:
    hosts = [cluster.host(stays=stays), cluster.host(stays=stays)]
    for host in hosts:
        assert host.wait("waiting")[1]["generation"] == 0
    cluster.supervisor.place(*hosts, replicas=2, replicas_before=3)
    before = [cluster.there(1, rank) for rank in range(2)]
    for rank, (host, one) in enumerate(zip(hosts, before, strict=True)):
        assert host.wait("running", generation=1)[1]["ranks"] == {"0": [rank, one["pid"]]}
        assert one["sum"] == 2
        said = {name: one[f"RESILIENCY_{name}"] for name in ("JOB", "ATTEMPT", "REPLICAS", "REPLICAS_BEFORE")}
        assert said == {"JOB": "job", "ATTEMPT": "1", "REPLICAS": "2", "REPLICAS_BEFORE": "3"}
        assert (one["TORCHELASTIC_RESTART_COUNT"], one["MASTER_ADDR"]) == ("0", "127.0.0.1")
    pages = hosts[1].wait("pages", generation=1)[1]["ranks"]
    assert [page["rank"] for page in pages] == [1]

    ended_s = _kill(before[1]["pid"])
    said_s, lost = hosts[1].wait("lost", generation=1, rank=1)
    print(f"said {1000 * (said_s - ended_s):.1f} ms after the end of the process")
    assert lost["signal"] == signal.SIGKILL and said_s - ended_s < 5
    assert hosts[1].wait("waiting")[1]["generation"] == 1
    if stays:
        assert hosts[0].wait("lost_peers", generation=1)[1]["ranks"] == [0]
    else:
        assert hosts[0].wait("lost", generation=1, rank=0)[1]["exit_code"] == 1
    cluster.supervisor.place(*hosts)
    after = [cluster.there(2, rank) for rank in range(2)]
    assert (after[0]["pid"] == before[0]["pid"]) is stays
    assert after[1]["pid"] != before[1]["pid"]
    for one in after:
        assert [one["TORCHELASTIC_RESTART_COUNT"], one["RESILIENCY_ATTEMPT"]] == ["1", "2"]
        assert one["RESILIENCY_LAUNCHER_STARTS"] == "1"
        assert one["MASTER_PORT"] != before[0]["MASTER_PORT"]
    if stays:
        cluster.finish(*hosts)


def test_a_warm_spare_takes_the_place_of_a_launcher_that_was_killed_and_fewer_hosts_go_on(cluster: Cluster) -> None:
    hosts = [cluster.host(), cluster.host()]
    spare = cluster.host()
    assert spare.wait("waiting", warm=True)[1]["generation"] == 0
    cluster.supervisor.place(*hosts)
    before = [cluster.there(1, rank) for rank in range(2)]
    killed = cluster.jobs[hosts[1]]
    killed.descendants()
    os.kill(killed.pid, signal.SIGKILL)
    hosts[0].wait("lost_peers", generation=1)
    assert killed.left() == []
    # It may take the supervisor long to find a host: nobody waits in the attempt that has ended.
    assert hosts[0].wait("waiting", generation=1)
    assert hosts[0].said_of("lost") == []
    cluster.supervisor.place(hosts[0], spare)
    after = [cluster.there(2, rank) for rank in range(2)]
    assert after[0]["pid"] == before[0]["pid"]
    assert [one["TORCHELASTIC_RESTART_COUNT"] for one in after] == ["1", "1"], "a spare knows that it is a restart"
    assert [one["RESILIENCY_LAUNCHER_STARTS"] for one in after] == ["1", "1"]
    cluster.supervisor.withdraw(hosts[0])
    cluster.supervisor.place(spare)  # alone, and node rank 0 now
    alone = cluster.there(3, 0)
    assert (alone["sum"], alone["WORLD_SIZE"], alone["pid"]) == (1, "1", after[1]["pid"])
    assert hosts[0].wait("waiting", generation=2)
    cluster.finish(spare)


def test_a_place_is_withdrawn_and_given_again(cluster: Cluster) -> None:
    host = cluster.host(ranks=2)
    cluster.supervisor.place(host)
    pids = [cluster.there(1, rank)["pid"] for rank in range(2)]
    ranks = [psutil.Process(pid) for pid in pids]
    cluster.supervisor.withdraw(host)
    assert host.wait("waiting", generation=1)
    assert wait_ended(ranks, timeout_s=0) == [], "it waits when they have ended"
    cluster.supervisor.place(host, generation=1)  # of the past: its ranks have ended
    (cluster.folder / "slow-2").touch()
    cluster.supervisor.place(host, generation=2)
    assert host.wait("running", generation=2)
    assert len(host.said_of("running")) == 2
    # Ranks that were told to leave, and wait for what follows, end with the place, too.
    _wait_for(cluster.folder / "came-2-0")
    os.kill(host.said_of("running")[-1]["ranks"]["1"][1], signal.SIGKILL)
    assert host.wait("waiting", generation=2)
    stays = psutil.Process(host.said_of("running")[-1]["ranks"]["0"][1])
    assert stays.is_running()
    cluster.supervisor.withdraw(host)
    assert wait_ended([stays], timeout_s=30) == []
    cluster.supervisor.place(host)
    assert [cluster.there(3, rank)["sum"] for rank in range(2)] == [2, 2]
    cluster.finish(host)


def test_ranks_go_on_while_the_monitor_is_away_and_it_is_told_again_what_is_true(cluster: Cluster) -> None:
    host = cluster.host(ranks=2)
    host.wait("waiting", generation=0)
    host.close()  # while it waits
    host.open()
    assert host.wait("waiting", generation=0)
    cluster.supervisor.place(host)
    pids = [cluster.there(1, rank)["pid"] for rank in range(2)]
    host.wait("pages", generation=1)
    host.close()  # in the middle of the training
    host.open()
    assert host.wait("master", generation=1)
    again = host.wait("running", generation=1)[1]["ranks"]
    assert [again[str(rank)] for rank in range(2)] == [[rank, pid] for rank, pid in enumerate(pids)]
    beats = _page_when(host, lambda page: page["beats"] > 0)["beats"]
    assert _page_when(host, lambda page: True)["beats"] > beats, "they train on"
    host.close()
    os.kill(pids[1], signal.SIGKILL)  # while nobody hears it
    host.open()
    assert host.wait("lost", generation=1)[1]["rank"] == 1
    cluster.supervisor.place(host)
    assert cluster.there(2, 0)["pid"] == pids[0]
    cluster.finish(host)


@pytest.mark.parametrize("stays", few([True, False], [True]), ids=["ranks stay", "plain script"])
def test_a_rank_that_ends_with_status_0_before_the_others_is_named(stays: bool, cluster: Cluster) -> None:
    host = cluster.host(ranks=2, stays=stays)
    cluster.supervisor.place(host)
    cluster.there(1, 0)
    cluster.there(1, 1)
    (cluster.folder / "leave-1").touch()
    if stays:
        said = host.wait("lost_peers", generation=1)[1]
        assert (said["ranks"], said["ended"]) == ([0], [1])
    else:
        said = host.wait("lost", generation=1)[1]
        assert said["rank"] == 0 and said["reason"].endswith("rank 1 ended with status 0 before the others")
    (cluster.folder / "leave-1").unlink()
    cluster.supervisor.place(host)
    cluster.there(2, 0)
    cluster.finish(host)


def test_a_rank_that_has_finished_runs_again_when_a_peer_fails(cluster: Cluster) -> None:
    hosts = [cluster.host(), cluster.host()]
    (cluster.folder / "finish-1-0").touch()
    cluster.supervisor.place(*hosts)
    assert hosts[0].wait("ended", generation=1)[1]["preempted"] is False
    _, running = hosts[1].wait("running", generation=1)
    os.kill(running["ranks"]["0"][1], signal.SIGKILL)
    hosts[1].wait("lost", generation=1)
    cluster.supervisor.place(*hosts)
    assert [cluster.there(2, rank)["sum"] for rank in range(2)] == [2, 2]
    assert {one["generation"] for one in hosts[0].said_of("waiting")} == {0}, "that it has finished says as much"
    cluster.finish(*hosts)


@pytest.mark.parametrize("stays", few([True, False], [True]), ids=["ranks stay", "plain script"])
def test_ranks_that_were_told_to_go_have_ended_and_are_not_lost(stays: bool, cluster: Cluster) -> None:
    host = cluster.host(ranks=2, stays=stays)
    (cluster.folder / "preempt-1").touch()
    cluster.supervisor.place(host)
    assert host.wait("ended", generation=1)[1]["preempted"] is True
    assert host.said_of("lost") == []
    cluster.supervisor.place(host)  # the machine stays after all
    assert [cluster.there(2, rank)["sum"] for rank in range(2)] == [2, 2]
    cluster.finish(host)


def test_of_two_places_the_newer_one_counts_also_while_ranks_start(cluster: Cluster) -> None:
    hosts = [cluster.host(ranks=2), cluster.host(ranks=2)]
    for host in hosts:
        host.wait("waiting", warm=True)
    (cluster.folder / "slow-3").touch()
    cluster.supervisor.place(*hosts)
    cluster.supervisor.place(*hosts)
    cluster.supervisor.place(*hosts)  # ranks of this one are slow to start
    for host in hosts:
        host.wait("running", generation=3)
    cluster.supervisor.place(*reversed(hosts))
    there = [cluster.there(4, rank) for rank in range(4)]
    assert [one["sum"] for one in there] == [4] * 4
    assert [one["GROUP_RANK"] for one in there] == ["0", "0", "1", "1"]
    assert there[0]["pid"] == hosts[1].wait("running", generation=4)[1]["ranks"]["0"][1]
    cluster.finish(*hosts)


def test_another_place_ends_the_wait_of_a_launcher_whose_ranks_train(cluster: Cluster) -> None:
    host = cluster.host()
    cluster.supervisor.place(host)
    cluster.there(1, 0)
    took_s = []
    for _ in range(2):
        _page_when(host, lambda page: page["beats"] > 0, generation=cluster.supervisor.generation)
        host.wait("pages")  # it looks again in a second
        given_s = time.monotonic()
        generation = cluster.supervisor.place(host)
        took_s.append(host.wait("running", generation=generation)[0] - given_s)
        cluster.there(generation, 0)
    print(f"ranks were told {', '.join(f'{1000 * one:.0f}' for one in took_s)} ms after the place was given")
    assert min(took_s) < 0.8
    cluster.finish(host)


def test_a_rank_that_hangs_is_killed_with_its_successors_place(cluster: Cluster) -> None:
    hosts = [cluster.host(), cluster.host()]
    cluster.supervisor.place(*hosts)
    before = [cluster.there(1, rank)["pid"] for rank in range(2)]
    page = _page_when(hosts[1], lambda page: page["own_steps"] > 0)
    assert page["own_s"] == pytest.approx(0.25 * page["own_steps"], abs=0.25), "its own work"
    os.kill(before[1], signal.SIGSTOP)
    page = _page_when(hosts[1], lambda page: page["stopped_s"] > 0)
    assert page["rank"] == 1 and page["beats"] > 0
    cluster.supervisor.place(*hosts, replace=[1])
    after = [cluster.there(2, rank)["pid"] for rank in range(2)]
    assert after[1] != before[1]
    assert "rank 1 (process" in cluster.jobs[hosts[1]].text and "it hangs" in cluster.jobs[hosts[1]].text
    assert hosts[1].said_of("lost") == [], "who ordered it need not be told"
    cluster.finish(*hosts)


def test_what_is_not_understood_is_refused_and_ends_nothing(cluster: Cluster) -> None:
    host = cluster.host()
    host.wait("waiting")
    _say_nonsense(host)
    cluster.supervisor.place(host)
    pid = cluster.there(1, 0)["pid"]
    _page_when(host, lambda page: page["beats"] > 0)
    _say_nonsense(host)
    host.tell({"kind": "place", "generation": 9}, {"kind": "stacks"}, {"kind": "save", "step": 7})
    assert "has no callback that saves on request" in host.wait("saved", generation=1)[1]["problem"]
    deadline = time.monotonic() + 30
    while "Thread 0x" not in cluster.jobs[host].text:  # the rank writes its stacks when it gets to it
        assert time.monotonic() < deadline, cluster.jobs[host].text
        time.sleep(0.02)
    text = cluster.jobs[host].text
    assert text.count("is not understood") == 9, text
    assert "Place lacks the field 'workload'" in text
    cluster.supervisor.place(host)
    assert cluster.there(2, 0)["pid"] == pid
    cluster.finish(host)


def _say_nonsense(host: FakeMonitor) -> None:
    host.send_raw(b"garbage")  # without a text
    for text in (b"{", b"[]", b'{"kind": "reboot"}'):
        with tempfile.TemporaryFile() as file:
            file.write(text)
            file.flush()
            host.send_raw(b"m", [file.fileno(), 1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
def test_a_monitor_of_another_user_is_not_obeyed(cluster: Cluster) -> None:
    host = cluster.host()
    host.wait("waiting")
    host.close()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind("\0" + host.name)
                listener.listen()
                connection = listener.accept()[0]
                select.select([connection], [], [], 30)
                os._exit(len(connection.recv(1)))
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it was told something"
    host.open()
    host.wait("waiting")
    assert "belongs to user 65534" in cluster.jobs[host].text
    cluster.finish()


@pytest.mark.parametrize(
    "number", few([signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]), ids=lambda number: number.name
)
def test_nothing_is_left_of_a_launcher_that_is_ended(number: signal.Signals, cluster: Cluster) -> None:
    trains, waits = cluster.host(ranks=2), cluster.host()
    cluster.supervisor.place(trains)
    cluster.there(1, 0)
    waits.wait("waiting", warm=True)
    for host in (trains, waits):
        job = cluster.jobs[host]
        job.descendants()
        os.kill(job.pid, number)
        assert job.wait() == (-number if number == signal.SIGKILL else 128 + number), job.text
        assert job.left() == []


def test_flags_that_contradict_a_supervisor_are_refused(launch: Any) -> None:
    job = launch("", "--rdzv-backend", "supervised", "--nnodes", 2, "--standalone", arguments=["train.py"])
    assert job.wait() == 2, job.text
    assert "the monitor of the host says who takes part; leave out --standalone, --nnodes" in job.text
    job = launch("", "--rdzv-backend", "supervised", arguments=["train.py"])
    assert job.wait() == 2 and "is no name of a monitor's socket" in job.text, job.text


def _wait_for(path: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + PATIENCE * timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, path.name
        time.sleep(0.005)


def _page_when(host: FakeMonitor, shows: Callable[[dict[str, Any]], bool], generation: int = 1) -> dict[str, Any]:
    """What is said of the host's first rank when it shows that."""
    for _ in range(30):
        page: dict[str, Any] = host.wait("pages", generation=generation)[1]["ranks"][0]
        if shows(page):
            return page
    raise AssertionError(f"the last page was {page}")
