"""Hosts of a real gloo training with networks of their own are cut off, one and many, for a moment and for long."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.e2e.clusters import Cluster, Reference, check_records
from tests.networks import has_route_to, network_of, processes_in

RANKS, HOSTS = 3, 4

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.namespaces, pytest.mark.timeout(240)]


def state_of(cluster: Cluster, host: str) -> str:
    return next((each["state"] for each in cluster.status().get("hosts", []) if each["name"] == host), "")


def remedies(cluster: Cluster) -> int:
    return cluster.job.text.count("(plan ")


def silent(cluster: Cluster) -> int:
    return cluster.job.text.count(" is silent (was ")


def goes_on(cluster: Cluster, what: str) -> None:
    """Steps that need all ranks, twenty more of them."""
    generation, step = cluster.progress()
    cluster.wait_until(lambda: cluster.progress() > (generation, step + 20), what)


def test_a_partition_is_waited_out_frozen_or_got_over_and_nobody_from_before_it_writes(
    tmp_path: Path, zygote: Zygote
) -> None:
    settings = ["quarantine_s=0.5", "thaw_s=0.5"]
    flags = [word for each in settings for word in ("--supervisor-set", each)]
    cluster = Cluster(tmp_path, zygote, "--nnodes", RANKS, "--spares", HOSTS - RANKS, "--network-namespaces", *flags)
    try:
        cluster.wait_until(lambda: cluster.progress()[1] >= 5, "training begins")
        cluster.wait_until(lambda: len(cluster.ready()) == HOSTS, "all hosts are there")
        cluster.wait_until(lambda: "the start is over" in cluster.job.text, "the start is over")
        namespaces = {network_of(cluster.monitor(f"h-{number}").pid) for number in range(HOSTS)}
        assert len(namespaces) == HOSTS and network_of(os.getpid()) not in namespaces
        before = remedies(cluster), silent(cluster)
        generation, said = cluster.progress()[0], len(cluster.job.text)

        cluster.inject("partition", cluster.where(1)[0], "--for", "0.7")
        goes_on(cluster, "training goes on over the connections that it had")
        assert (remedies(cluster), silent(cluster)) == before, cluster.job.text[said:]
        assert cluster.progress()[0] == generation, cluster.job.text[said:]

        said = len(cluster.job.text)
        trains = sorted(cluster.where(rank)[0] for rank in range(RANKS))
        cluster.cut_off(dict(zip(trains, (4.0, 4.5, 5.0), strict=True)))  # the network is not whole again at once
        cluster.wait_until(lambda: bool(cluster.status().get("frozen")), "three of four hosts are silent at once")
        goes_on(cluster, "they are heard again")
        cluster.wait_until(lambda: len(cluster.ready()) == HOSTS, "all hosts are well")
        assert remedies(cluster) == before[0], cluster.job.text[said:]
        assert cluster.progress()[0] == generation, cluster.job.text[said:]
        assert silent(cluster) >= before[1] + 3, cluster.job.text[said:]

        host, pid = cluster.where(0)  # it has the store, and writes what steps there were
        cluster.inject("partition", host, "--for", "600")
        cluster.wait_until(lambda: cluster.progress()[0] > generation, "the host is swapped for the spare")
        goes_on(cluster, "the others train with the spare")
        assert "hot_swap" in cluster.job.text and cluster.where(0)[0] != host
        assert network_of(pid) in namespaces  # its rank is there still, and was told nothing
        cluster.inject("partition", host, "--for", "0.1")  # the time of the last one counts
        cluster.wait_until(lambda: state_of(cluster, host) == "ready", "the host is back, as a spare")
        cluster.wait_until(lambda: network_of_or_none(pid) is None, "its rank has ended")
        after = cluster.progress()[0]
        goes_on(cluster, "the others have noticed nothing")
        assert cluster.progress()[0] == after

        check_steps(cluster)
        network = (cluster.folder / "state" / "address").read_text().rpartition(".")[0] + ".0"
        assert has_route_to(network)
        (cluster.folder / "enough").touch()
        cluster.job.descendants()
        assert cluster.job.wait(60) == 0, cluster.job.text[-8000:]
        check_steps(cluster, ended=True)
        assert cluster.job.left(20) == [] and not has_route_to(network) and not processes_in(namespaces)
    finally:
        cluster.close()


def test_a_host_that_trains_on_alone_behind_a_partition_commits_nothing_after_its_place_was_given_away(
    tmp_path: Path, zygote: Zygote
) -> None:
    cluster = Cluster(tmp_path, zygote, "--nnodes", 1, "--spares", 2, "--network-namespaces")
    try:
        cluster.wait_until(lambda: cluster.progress()[1] >= 5, "training begins")
        cluster.wait_until(lambda: len(cluster.ready()) == 3, "all hosts are there")
        host, pid = cluster.where(0)
        cluster.inject("partition", host, "--for", "600")
        cluster.wait_until(lambda: len(cluster.starts()) == 2, "another host has its place")
        refused = re.compile(r"cannot commit to .*attempt 2 of this job has started; attempt 1 is over")
        cluster.wait_until(lambda: refused.search(cluster.job.text) is not None, "its save is refused")
        assert network_of_or_none(pid) is not None
        cluster.inject("partition", host, "--for", "0.1")
        cluster.wait_until(lambda: network_of_or_none(pid) is None, "it is told, and its rank ends")
        goes_on(cluster, "the other one trains")
        (cluster.folder / "enough").touch()
        assert cluster.job.wait(60) == 0, cluster.job.text[-8000:]
        ranks, step, found = (cluster.folder / "end-0").read_text().split()
        assert (int(ranks), int(found)) == (1, Reference(1).after(int(step)))
        assert cluster.owned_twice() == {} and [generation for generation, *_ in cluster.starts()] == [1, 2]
    finally:
        cluster.close()


def network_of_or_none(pid: int) -> int | None:
    try:
        return network_of(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # of a zombie, too
        return None


def check_steps(cluster: Cluster, *, ended: bool = False) -> None:
    """Each rank of each generation had one owner, none of an earlier generation has made a step after it, and each step is that of
    a run in which nothing happened."""
    assert cluster.owned_twice() == {}
    reference, newest = Reference(RANKS), 0
    text = (cluster.folder / "steps").read_text()
    for line in text[: text.rindex("\n")].splitlines():
        generation, step, found = map(int, line.split())
        assert generation >= newest, f"generation {generation} has made step {step} after generation {newest} had begun"
        assert found == reference.after(step), f"the weights after step {step} are others"
        newest = generation
    ends: list[Any] = [(cluster.folder / f"end-{rank}").read_text().split() for rank in range(RANKS) if ended]
    assert all((int(ranks), int(found)) == (RANKS, reference.after(int(step))) for ranks, step, found in ends)
    if ended:
        check_records(cluster.folder, reference, RANKS, int(ends[0][1]))
