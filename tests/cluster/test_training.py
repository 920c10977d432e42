"""The charts, a real API server, and a Lightning training on nodes that die."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.client import wait_for
from tests.cluster.release import Release, uninterrupted
from tests.cluster.rig import Rig

STEPS = 600


def is_ready(pod: dict[str, Any]) -> bool:
    return all(each["ready"] for each in pod["status"]["containerStatuses"])


@pytest.mark.timeout(400)
def test_a_node_dies_and_its_ranks_train_on_a_spare(rig: Rig, tmp_path: Path) -> None:
    reference = uninterrupted(tmp_path / "reference", ranks=3, steps=STEPS)
    (tmp_path / "job").mkdir()
    release = Release(rig, tmp_path / "job", hosts=3, spares=1, steps=STEPS)
    release.until_step(60)
    wait_for("spares and hosts that train are Ready", lambda: all(map(is_ready, release.pods().values())))
    before, lost = release.uids(), release.host_of(1)
    node = release.node_of(lost)
    assert release.writes() == []

    attempt, killed_s = release.steps()[-1].attempt, time.monotonic()
    node.kill()
    first = release.until_attempt_after(attempt)
    print(f"the first new step {first.at_s - killed_s:.1f} s after the death of the node")

    wait_for("the node's cordon and the pod's deletion", lambda: len(release.writes()) == 2)
    assert [(each.verb, each.resource, each.code) for each in release.writes()] == [
        ("patch", "nodes", 200),
        ("delete", "pods", 200),
    ]
    kept = {name: uid for name, uid in before.items() if name != lost}
    assert kept.items() <= release.uids().items()

    # All supervisors, and their state with them.
    attempt, step = release.steps()[-1].attempt, release.steps()[-1].number
    gone = {pod["metadata"]["uid"] for pod in release.cluster.pods(release.system)}
    release.cluster.kubectl("delete", "pods", "--all", "--force", "-n", release.system)
    wait_for(
        "new supervisors", lambda: release.status()["hosts"] and release.status()["workloads"][0]["state"] == "running"
    )
    assert not gone & {pod["metadata"]["uid"] for pod in release.cluster.pods(release.system)}
    release.until_step(step + 20)
    assert {each.attempt for each in release.steps() if each.number > step} == {attempt}, "training has noticed it"

    result = release.result()
    assert reference.wait(120) == 0
    assert result == (tmp_path / "reference" / "result").read_text()
    wait_for("the JobSet's completion", release.is_completed)
    release.uninstall()
    release.until_nothing_is_left()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_script_that_fails_at_its_first_line_costs_no_node_and_its_error_is_said(rig: Rig, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import module_that_nobody_has\n")
    few = {"max_in_job_restarts": 1, "max_workload_restarts": 1}
    release = Release(rig, tmp_path, hosts=2, spares=1, steps=1, script=script, **few)
    wait_for("the JobSet fails", lambda: release.has_condition("Failed"), timeout_s=150)
    error = "exit status 1: ModuleNotFoundError: No module named 'module_that_nobody_has'"
    workload = release.status()["workloads"][0]
    assert workload["state"] == "stopped" and error in workload["reason"]
    assert workload["generation"] == 3
    events = release.cluster.get(f"/api/v1/namespaces/{release.jobs}/events")["items"]
    assert any(error in each["message"] for each in events if each["reason"] == "GivenUp")
    assert error in release.supervisor_log()
    assert [each for each in release.writes() if each.resource in ("nodes", "pods")] == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_a_spare_it_trains_with_fewer_hosts_until_the_node_is_back(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    release = Release(rig, tmp_path / "job", hosts=2, spares=0, steps=100_000)
    release.until_step(30)
    node = release.node_of(release.host_of(1))
    node.kill()
    wait_for("one host trains", lambda: release.status()["workloads"][0]["replicas"] == 1)
    release.until_attempt_after(1)
    # Which no rank has waited for.
    wait_for("the cordon", lambda: release.cluster.get(f"/api/v1/nodes/{node.name}")["spec"].get("unschedulable"))
    node.reboot()
    release.cluster.kubectl("uncordon", node.name)
    wait_for("both train", lambda: release.status()["workloads"][0]["replicas"] == 2)
    release.until_attempt_after(2)
    release.uninstall()
    release.until_nothing_is_left()
