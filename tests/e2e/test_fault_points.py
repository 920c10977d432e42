"""SIGKILL at every named point of a save, in the rank or in the agent: the next start goes on from a committed step."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from resiliency import faultpoints
from resiliency.testing.zygote import Zygote
from tests.e2e.driver import Job
from tests.rings import few

IN_RANK = [name for name in faultpoints.KNOWN if name.startswith("save.")]
#: Not those of the end of a fit without a launcher, for which tests/agent/test_join.py has an agent killed.
IN_AGENT = [name for name in faultpoints.KNOWN if re.match(r"agent\.(?!upload|drop|start)", name)]
IN_UPLOAD = [name for name in faultpoints.KNOWN if name.startswith("agent.upload.")]
IN_RESTORE = [name for name in faultpoints.KNOWN if name.startswith("restore.")]

#: An agent passes these for each rank.
OF_EACH_RANK = ("seal.received", "record.write", "fsync", "durable", "prune.record", "prune.shard")

STEPS = 15


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of the undisturbed run."""
    return str(Job(zygote, tmp_path_factory.mktemp("reference") / "run", steps=STEPS).run_to_end()["hash"])


def _resumes_right(job: Job, committed: int, reference: str) -> None:
    assert job.run_to_end()["hash"] == reference
    resumed = job.resumed_from()
    assert (resumed[-1] if resumed else 0) >= committed


@pytest.mark.kill
@pytest.mark.parametrize("victim", few([0, 1], [0]))
def test_a_rank_killed_at_any_point_changes_no_weight(victim: int, zygote: Zygote, tmp_path: Path) -> None:
    """One job is killed at one point after the other, each time in the third save of an attempt."""
    # Each attempt gets nine steps further than the last save it found, which is that of the sixth or the ninth.
    steps = 9 * len(IN_RANK) + 3
    reference = Job(zygote, tmp_path / "reference", steps=steps).run_to_end()["hash"]
    job, committed = Job(zygote, tmp_path / "run", steps=steps), [0]
    for point in IN_RANK:
        assert job.attempt(victim, rank_faults={victim: f"{point}:kill@3"}) == [-9], (
            f"{point} was not passed three times"
        )
        committed.append(job.newest_committed())
        assert committed[-1] > committed[-2], f"nothing was committed before the third save, in which {point} is"
    assert job.run_to_end()["hash"] == reference, f"resumed from {job.resumed_from()}"
    resumed = job.resumed_from()
    assert len(resumed) == len(IN_RANK)
    for point, newest, step in zip(IN_RANK, committed[1:], resumed, strict=True):
        assert step >= newest, f"after the kill at {point}"


@pytest.mark.kill
@pytest.mark.parametrize("point", IN_AGENT)
def test_an_agent_killed_at_any_point_changes_no_weight(
    point: str, zygote: Zygote, reference: str, tmp_path: Path
) -> None:
    """Training outlives the agent's death; what the agent left half done is finished or discarded by its successor."""
    job = Job(zygote, tmp_path / "run", steps=STEPS)
    # In the third save of an agent, so that too few agents die for saves to be skipped.
    passage = 6 if point.removeprefix("agent.") in OF_EACH_RANK else 3
    assert job.attempt(faults=f"{point}:kill@{passage}") == [0, 0]
    assert 1 <= max(_lost(job).values()) <= 3 and job.outcome()["hash"] == reference
    assert job.newest_committed() == STEPS, "the last save of a run that ended in order is not there"


def _lost(job: Job) -> Counter[int]:
    """Rank -> number of agents that it has lost."""
    return Counter(event["rank"] for event in job.events("rank-*.jsonl") if event["event_type"] == "agent_lost")


@pytest.mark.kill
@pytest.mark.parametrize("point", IN_UPLOAD)
def test_an_agent_killed_in_an_upload_changes_no_weight(
    point: str, zygote: Zygote, reference: str, tmp_path: Path
) -> None:
    job = Job(zygote, tmp_path / "store", steps=STEPS, arguments={"local_dir": str(tmp_path / "fast")})
    passage = 4 if point.removeprefix("agent.upload.") in ("shard", "record") else 2  # these are passed for each rank
    assert job.attempt(faults=f"{point}:kill@{passage}") == [0, 0]
    assert _lost(job) and job.outcome()["hash"] == reference


@pytest.mark.kill
def test_a_rank_killed_while_restoring_changes_no_weight(zygote: Zygote, reference: str, tmp_path: Path) -> None:
    """At one point after the other: each start finds what the one before it has left."""
    job = Job(zygote, tmp_path / "run", steps=STEPS)
    assert job.attempt(0, rank_faults={0: "save.begin:kill@4"}) == [-9]
    for point in IN_RESTORE:
        committed = job.newest_committed()
        assert committed > 0
        assert job.attempt(1, rank_faults={1: f"{point}:kill"}) == [-9], f"{point} was not passed"
        assert job.newest_committed() >= committed, f"after the kill at {point}"
    _resumes_right(job, committed, reference)


@pytest.mark.kill
def test_without_any_agent_lightnings_own_code_saves(zygote: Zygote, reference: str, tmp_path: Path) -> None:
    job = Job(zygote, tmp_path / "run", steps=STEPS)
    assert job.attempt(faults="agent.start:kill") == [0, 0]
    assert not job.agents()
    assert job.outcome()["hash"] == reference
    assert torch.load(job.directory / "last.ckpt", weights_only=False)["global_step"] == STEPS
