"""``resiliency supervisor drain``, ``uncordon`` and ``stop`` while ranks really train, and the hook that sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.e2e.clusters import Cluster

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(240)]

#: Of a workload that was stopped.
STOPPED = 3


@pytest.fixture
def cluster(tmp_path: Path, zygote: Zygote) -> Iterator[Cluster]:
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\necho "$RESILIENCY_REMEDY $RESILIENCY_HOSTS_OUT" >> {tmp_path}/hook-said\n')
    hook.chmod(0o700)
    settings = ["dwell_s=0.5", f"hook={{command: [{hook}], timeout_s: 10}}"]
    flags = [word for each in settings for word in ("--supervisor-set", each)]
    made = Cluster(tmp_path, zygote, "--nnodes", 2, "--spares", 1, *flags)
    yield made
    made.close()


def command(cluster: Cluster, *words: str) -> str:
    address = (cluster.folder / "state" / "address").read_text()
    where = ["-s", f"http://{address}", "--token-file", str(cluster.folder / "state" / "operator-token")]
    found = subprocess.run(
        [sys.executable, "-m", "resiliency.cli", "supervisor", *words, *where],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def state_of(cluster: Cluster, host: str) -> Any:
    return next((each["state"] for each in cluster.status().get("hosts", []) if each["name"] == host), None)


@pytest.mark.nightly
def test_a_host_is_drained_and_given_back_and_the_job_is_stopped_while_it_trains(cluster: Cluster) -> None:
    """Its place goes to the spare and comes back, each time after the hook; nobody trains twice in one place."""
    cluster.wait_beyond(10)
    first, _ = cluster.where(1)
    spare = cluster.spare(3)
    cluster.wait_until(lambda: len(cluster.ready()) == 3, "the spare is ready")
    generation = cluster.progress()[0]  # before the command, which may return after the swap
    command(cluster, "drain", first, "--reason", "new fan")
    cluster.wait_beyond(0, generation=generation + 1)
    cluster.wait_until(lambda: cluster.where(1)[0] == spare or cluster.where(0)[0] == spare, "the spare has a rank")
    newest = max(each for each, *_ in cluster.starts())
    assert first not in {host for each, _, host, _ in cluster.starts() if each == newest}
    assert state_of(cluster, first) == "cordoned"

    command(cluster, "uncordon", first)
    cluster.wait_until(lambda: state_of(cluster, first) == "ready", "the host is given back")
    command(cluster, "drain", spare)
    cluster.wait_beyond(0, generation=newest + 1)
    last = max(each for each, *_ in cluster.starts())
    assert first in {host for each, _, host, _ in cluster.starts() if each == last}
    assert cluster.owned_twice() == {}
    said = (cluster.folder / "hook-said").read_text().splitlines()
    assert said == ["start ", f"hot_swap {first}", f"hot_swap {spare}"]

    command(cluster, "stop", "default", "--reason", "enough")
    assert cluster.job.wait(60) == STOPPED, cluster.job.text[-4000:]
    assert cluster.job.left(60) == []
