"""For how long a node is out, and what is forgiven; and which JobSets are to have pods."""

from __future__ import annotations

from typing import Any

import pytest

from resiliency.supervisor.clusters.kubernetes.facts import (
    FAILED,
    UNTIL,
    Node,
    Pod,
    cordon_patch,
    jobset_of,
    node_of,
    uncordon_patch,
    unwanted_because,
)

from .fake_api import merged

WALL, QUARANTINE_S, DAY_S = 1_800_000_000.0, 100.0, 86_400.0


def fresh() -> dict[str, Any]:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "n", "uid": "u", "resourceVersion": "1"}, "spec": {}, "status": ready}


def falls(item: dict[str, Any], wall: float) -> dict[str, Any]:
    return merged(item, cordon_patch(item, "lost", QUARANTINE_S, wall))


def comes_back(item: dict[str, Any], wall: float) -> dict[str, Any]:
    patch = uncordon_patch(item, wall)
    assert patch is not None
    return merged(item, patch)


def out_for_s(item: dict[str, Any], wall: float) -> int:
    """Seconds from this time on."""
    return next(s for s in range(1_000_000) if node_of(item, "").may_return(wall + s))


def test_each_failure_doubles_the_quarantine_until_a_day_has_passed_without_one() -> None:
    item, wall = fresh(), WALL
    for expected in (100, 200, 400, 800):
        item = falls(item, wall)
        assert out_for_s(item, wall) == expected
        wall += expected
        item = comes_back(item, wall)
    item = falls(item, wall + DAY_S - 1)
    assert out_for_s(item, wall + DAY_S - 1) == 1600
    wall += DAY_S + 1600
    item = falls(comes_back(item, wall), wall + DAY_S + 1)
    assert out_for_s(item, wall + DAY_S + 1) == 100


def test_a_quarantine_has_a_longest_time() -> None:
    item = fresh()
    item["metadata"]["annotations"] = {"resiliency/falls": "99999999", UNTIL: "2027-01-15T08:00:00Z"}
    assert out_for_s(falls(item, WALL), WALL) == 100 * 2**8


@pytest.mark.parametrize("falls_said", ["x", "-1", ""])
@pytest.mark.parametrize("until_said", ["tomorrow", "", None])
def test_annotations_that_nobody_can_read_keep_no_node_out(falls_said: str, until_said: str | None) -> None:
    item = fresh()
    item["metadata"]["annotations"] = {"resiliency/falls": falls_said, UNTIL: until_said}
    if until_said is None:
        del item["metadata"]["annotations"][UNTIL]
    item["spec"] = {"taints": [{"key": FAILED, "effect": "NoSchedule"}]}
    assert until_said is None or node_of(item, "").may_return(WALL)
    assert out_for_s(falls(item, WALL), WALL) == 100


def test_a_node_that_does_not_come_back_from_its_quarantine_has_failed_once_more_when_it_fails_then() -> None:
    item = falls(fresh(), WALL)
    later = falls(item, WALL + 101)
    assert out_for_s(later, WALL + 101) == 200
    back = comes_back(later, WALL + 302)
    assert "unschedulable" not in back["spec"] and back["spec"]["taints"] == []


@pytest.mark.parametrize(
    ("key", "leaves"),
    [
        ("ToBeDeletedByClusterAutoscaler", True),
        ("DeletionCandidateOfClusterAutoscaler", False),
        ("aws-node-termination-handler/spot-itn", True),
        ("cloud.google.com/impending-node-termination", True),
        ("karpenter.sh/disrupted", True),
        ("node.kubernetes.io/out-of-service", True),
        ("node.kubernetes.io/unreachable", False),
        ("nvidia.com/gpu", False),
    ],
)
def test_hosts_of_a_node_that_will_be_taken_away_are_not_wanted_there(key: str, leaves: bool) -> None:
    """A node that is not ready is none of these: its hosts may well train on."""
    node = Node(name="n", uid="u", taints=((key, ""),), ready=False)
    reason = unwanted_because(node, Pod(name="p", uid="v", node="n"))
    assert reason == (f"node n will be taken away (taint {key})" if leaves else "")


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ({"type": "Failed", "status": "True"}, False),
        ({"type": "Completed", "status": "True"}, False),
        ({"type": "Failed", "status": "False"}, True),
        ({"type": "StartupPolicyCompleted", "status": "True"}, True),
    ],
)
def test_a_jobset_that_has_ended_is_to_have_no_pods(condition: dict[str, str], wanted: bool) -> None:
    item = {"metadata": {"name": "train", "uid": "u"}, "spec": {}, "status": {"conditions": [condition]}}
    assert jobset_of(item).wants_pods is wanted
