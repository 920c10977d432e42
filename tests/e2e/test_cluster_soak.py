"""One cluster with real gloo training gets over a series of faults, each in a moment that was chosen for it: nobody is
asked, no rank ever has two owners, and every step is that of a run in which nothing happened.

``RESILIENCY_CLUSTER_SOAK=100 pytest -m kill -s tests/e2e/test_cluster_soak.py`` draws 100 pairs of a fault and a moment
(``RESILIENCY_CLUSTER_SOAK_SEED``) instead of the series.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from resiliency.testing.zygote import Zygote
from tests.e2e.clusters import POLL_S, Cluster, Reference, check_records
from tests.rings import few

DRAWN = int(os.environ.get("RESILIENCY_CLUSTER_SOAK", "0"))
SEED = int(os.environ.get("RESILIENCY_CLUSTER_SOAK_SEED", "11"))
RANKS = 2
FAULTS = (
    "rank killed",
    "rank hangs",
    "host killed",
    "monitor killed",
    "launcher killed",
    "launcher killed while the supervisor is stopped",
    "supervisor killed",
    "spare dead",
    "spare dead, then host killed",
    "partition",
    "garbage on every port",
)
MOMENTS = ("start-up", "training", "saving", "restoring", "remedy", "supervisor restarted")
#: The rest of them nightly.
FIRST = 4
#: Each of them says what no other does.
SERIES = (
    ("supervisor killed", "remedy"),
    ("partition", "training"),
    ("host killed", "start-up"),
    ("rank killed", "saving"),
    ("rank killed", "supervisor restarted"),
    ("garbage on every port", "saving"),
    ("monitor killed", "restoring"),
    ("rank hangs", "training"),
    ("launcher killed while the supervisor is stopped", "saving"),
    ("spare dead, then host killed", "training"),
)
#: Faults that ranks do not notice.
HARMLESS = ("monitor killed", "supervisor killed", "spare dead", "partition", "garbage on every port")
#: For which a launcher that is warm is watched, in which a rank would be there.
UNSEEN_S = 1.0
#: Moments that come only after a rank was lost.
OF_A_RESTART = ("start-up", "restoring", "remedy")

SETTINGS = ("quarantine_s=0.5", "thaw_s=0.5", "hang_floor_s=2.5", "dwell_s=0.5")
FLAGS = ["--nnodes", RANKS, "--spares", 1, "--max-restarts", 1000]
FLAGS += [word for each in SETTINGS for word in ("--supervisor-set", each)]

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(240 + 40 * DRAWN)]


class Series:
    """Puts faults in, one pair after the other, and looks after each what it has come to."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self._cluster, self._draw = cluster, draw
        self._reference = Reference(RANKS)
        self._read = self._away = 0

    def run(self, fault: str, moment: str) -> None:
        cluster = self._cluster
        self._bring_back(self._away)
        # Ranks make steps before the supervisor has heard of it: who dies until then has died in the remedy.
        cluster.wait_until(lambda: len(cluster.ready()) == RANKS + 1 and self._state() == "running", "all is well")
        generation, step = cluster.progress()
        began_s = time.monotonic()
        rank = self._draw.randrange(RANKS)
        with self._moment(moment, rank) as held_in:
            self._away = self._put_in(fault, rank)
        stays = fault in HARMLESS and moment not in OF_A_RESTART
        if stays:
            self._wait_until_noticed(fault, moment)
            cluster.wait_until(lambda: cluster.progress() > (generation, step + 10), "training goes on")
        elif fault in HARMLESS:
            self._bring_back(self._away)
            cluster.wait_until(lambda: cluster.progress()[0] > generation, "training goes on after the remedy")
        else:
            if self._away == 2:
                cluster.wait_until(lambda: self._state() == "waiting", "two of three hosts are gone, and the job waits")
                self._bring_back(1)
            least = max(generation, held_in) + 1
            cluster.wait_until(lambda: cluster.progress()[0] >= least, f"a step of generation {least}")
        now = cluster.progress()
        cluster.wait_until(lambda: cluster.progress() >= (now[0], now[1] + 3), "three more steps")
        after = cluster.progress()
        self._check()
        assert not stays or after[0] == generation, f"{fault} in {moment}: ranks were restarted, and need not have been"
        took_s = time.monotonic() - began_s
        print(f"{fault} in {moment} (rank {rank}): from {(generation, step)} to {after} in {took_s:.1f} s", flush=True)

    @contextmanager
    def _moment(self, moment: str, rank: int) -> Iterator[int]:
        """The job is there. Yields the generation in which a rank stands still; 0: none does."""
        cluster = self._cluster
        if moment == "supervisor restarted":
            self._restart_supervisor()
        if moment in ("training", "supervisor restarted"):
            yield 0
            return
        if moment == "remedy":
            plans = cluster.job.text.count("(plan ")
            cluster.inject("kill", cluster.where(1 - rank)[0])
            cluster.wait_until(lambda: cluster.job.text.count("(plan ") > plans, "a plan begins")
            yield 0
            return
        draft = cluster.folder / "hold~"
        draft.write_text(f"{moment} {rank}")
        draft.rename(cluster.folder / "hold")
        if moment in OF_A_RESTART:
            cluster.inject("kill", cluster.where(1 - rank)[0])
        held = cluster.folder / "held"
        cluster.wait_until(held.exists, f"rank {rank} is in {moment}")
        try:
            yield int(held.read_text().split()[0])
        finally:
            held.unlink()
            (cluster.folder / "hold").unlink()

    def _put_in(self, fault: str, rank: int) -> int:
        """Returns: how many hosts are away until they are brought back."""
        cluster = self._cluster
        host, pid = cluster.where(rank)
        if fault == "rank killed":
            cluster.inject("kill", host)
        elif fault == "rank hangs":
            cluster.inject("hang", host)
        elif fault == "launcher killed":
            cluster.kill(cluster.launcher(host))
        elif fault == "launcher killed while the supervisor is stopped":
            self._kill_unseen(host)
        elif fault == "supervisor killed":
            cluster.kill(cluster.supervisor())
        elif fault == "partition":
            cluster.inject("partition", host, "--for", "3")
        elif fault == "cut off":
            cluster.inject("partition", host, "--for", "5")
        elif fault == "garbage on every port":
            assert cluster.say_garbage() > 0
        elif fault == "monitor killed":
            cluster.kill(cluster.monitor(host))
            return 1
        elif fault == "host killed":
            cluster.kill_host(host)
            return 1
        elif fault == "spare dead":
            cluster.kill_host(cluster.spare(RANKS + 1))
            return 1
        elif fault == "spare dead, then host killed":
            cluster.kill_host(cluster.spare(RANKS + 1))
            self._wait_for_silence(for_s=1.0)  # otherwise both fall at once, which is taken for a fault of the network
            cluster.kill_host(host)
            return 2
        else:
            raise AssertionError(fault)
        return 0

    def _kill_unseen(self, host: str) -> None:
        """The next launcher of the host is there before the supervisor has heard of the end of this one: nobody has told
        it to begin where that one was."""
        cluster, supervisor = self._cluster, self._cluster.supervisor()
        supervisor.suspend()
        try:
            connected = cluster.job.text.count("the launcher has connected")
            cluster.kill(cluster.launcher(host))
            starts = self._starts_on(host)  # in a remedy, ranks of other hosts start meanwhile, as they were told
            cluster.wait_until(lambda: cluster.job.text.count("the launcher has connected") > connected, "the next one")
            cluster.wait_until(
                lambda: len(cluster.launcher(host).children(recursive=True)) > 1, "it has forked a standby"
            )
            deadline = time.monotonic() + UNSEEN_S
            while time.monotonic() < deadline:
                assert self._starts_on(host) == starts, "ranks were started again, and nobody has said so"
                time.sleep(POLL_S)
        finally:
            supervisor.resume()

    def _starts_on(self, host: str) -> int:
        return sum(each == host for _, _, each, _ in self._cluster.starts())

    def _restart_supervisor(self) -> None:
        before = self._cluster.supervisor()
        self._cluster.kill(before)
        self._cluster.wait_until(lambda: not before.is_running(), "the supervisor is gone")
        self._cluster.wait_until(lambda: bool(self._cluster.status()), "the next supervisor answers")

    def _state(self) -> str:
        return str(next((each["state"] for each in self._cluster.status().get("workloads", [])), ""))

    def _wait_until_noticed(self, fault: str, moment: str) -> None:
        """The supervisor has not heard of a host for its timeout, and is not to do anything about it."""
        if fault == "supervisor killed":
            self._cluster.wait_until(lambda: bool(self._cluster.status()), "the next supervisor answers")
        elif fault == "garbage on every port":
            pass  # there is nothing to notice
        elif fault == "spare dead" or moment != "supervisor restarted":  # a new one gives hosts more time
            self._wait_for_silence()
        if fault == "partition":
            self._cluster.wait_until(lambda: len(self._cluster.ready()) == RANKS + 1, "it is heard again")

    def _wait_for_silence(self, *, for_s: float = 0.0) -> None:
        def is_so() -> bool:
            known = self._cluster.status().get("hosts", [])
            return any(host["state"] == "silent" and host["for_s"] >= for_s for host in known)

        self._cluster.wait_until(is_so, "a host is silent")

    def _bring_back(self, hosts: int) -> None:
        for _ in range(hosts):
            self._cluster.bring_back()
        self._away -= hosts

    def _check(self) -> None:
        """Each rank of each generation has had one owner, and each step is that of a run in which nothing happened."""
        assert self._cluster.owned_twice() == {}
        with open(self._cluster.folder / "steps") as file:
            file.seek(self._read)
            for line in file.readlines():
                if line.endswith("\n"):
                    _, step, found = map(int, line.split())
                    assert found == self._reference.after(step), f"the weights after step {step} are others"
                    self._read += len(line)

    def end(self) -> None:
        """The job ends by itself with the weights of a run in which nothing happened, and leaves nothing."""
        if DRAWN:  # of the series the last host may stay away; others have a place in which ranks are to finish
            self._bring_back(self._away)
        (self._cluster.folder / "enough").touch()
        job = self._cluster.job
        job.descendants()
        assert job.wait(120) == 0, job.text[-8000:]
        self._check()
        for rank in range(RANKS):
            ranks, step, found = map(int, (self._cluster.folder / f"end-{rank}").read_text().split())
            assert ranks == RANKS and found == self._reference.after(step)
        check_records(self._cluster.folder, self._reference, RANKS, step)
        assert job.left(60) == []


@pytest.mark.namespaces
@pytest.mark.parametrize("moments", few([["saving"], list(MOMENTS)], [["saving"]]), ids=len)
def test_a_host_is_cut_off_in_each_moment(moments: Sequence[str], tmp_path: Path, zygote: Zygote) -> None:
    """For longer than it may be silent, from the other ranks as well: it is swapped, and a spare when it is back."""
    cluster = Cluster(tmp_path, zygote, *FLAGS, "--network-namespaces")
    try:
        series = Series(cluster, random.Random(SEED))
        cluster.wait_until(lambda: cluster.progress()[1] >= 5, "training begins")
        for moment in moments:
            series.run("cut off", moment)
        series.end()
    finally:
        cluster.close()


def drawn() -> list[tuple[str, str]]:
    draw = random.Random(SEED)
    pairs = [*itertools.product(FAULTS, MOMENTS)]
    draw.shuffle(pairs)
    return [*itertools.islice(itertools.cycle(pairs), DRAWN)]


@pytest.mark.parametrize("part", few([slice(FIRST), slice(FIRST, None)], [slice(FIRST)]), ids=["first", "rest"])
def test_a_cluster_gets_over_each_fault_in_each_moment(part: slice, tmp_path: Path, zygote: Zygote) -> None:
    cluster = Cluster(tmp_path, zygote, *FLAGS)
    try:
        series = Series(cluster, random.Random(SEED))
        cluster.wait_until(lambda: cluster.progress()[1] >= 5, "training begins")
        for fault, moment in drawn() or SERIES[part]:
            series.run(fault, moment)
        series.end()
    finally:
        cluster.close()
