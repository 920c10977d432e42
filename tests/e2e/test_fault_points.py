"""SIGKILL at every named point of a save, in the rank or in the agent: the next start goes on from a committed step.

With replicated states (DDP) and with sharded ones (FSDP2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

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
#: The points of an agent in each run with FSDP2: where its files differ from those of DDP.
OF_SHARDED = ("agent.record.write", "agent.manifest.write", "agent.name.write", "agent.prune.shard")

STEPS = 15

#: Strategy and, for one point after the other, the ranks that are killed there.
VICTIMS = [
    ("ddp", [0]),
    ("ddp", [1]),
    ("fsdp2", [0]),
    ("fsdp2", [1]),
    ("fsdp2", ["all"]),
    ("fsdp2", [0, 1, "all"]),
]


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Weights of the undisturbed run with a strategy."""
    known: dict[str, str] = {}

    def weights(strategy: str) -> str:
        if strategy not in known:
            job = job_of(strategy, zygote, tmp_path_factory.mktemp("reference"))
            known[strategy] = str(job.run_to_end()["hash"])
            # Some of these saves fall between two optimizer steps, while gradients accumulate.
            assert not [event for event in job.events("rank-*.jsonl") if event["event_type"] == "checkpoint_failed"]
        return known[strategy]

    return weights


def job_of(strategy: str, zygote: Zygote, folder: Path, steps: int = STEPS, **arguments: Any) -> Job:
    return Job(zygote, folder / "run", steps=steps, arguments={"strategy": strategy, **arguments})


def _killed(job: Job, victim: int | str, fault: str) -> bool:
    """One attempt in which a rank, or "all", are killed. False when the point was not passed."""
    ranks = range(job.world_size) if victim == "all" else [victim]
    # A rank that outlives its peer for a moment may fail for want of it, before it passes the point itself.
    statuses = job.attempt(*map(int, ranks), rank_faults={int(rank): fault for rank in ranks})
    return -9 in statuses and 0 not in statuses


def _resumes_right(job: Job, committed: int, reference: str) -> None:
    assert job.run_to_end()["hash"] == reference
    resumed = job.resumed_from()
    assert (resumed[-1] if resumed else 0) >= committed


@pytest.mark.kill
@pytest.mark.parametrize(("strategy", "victims"), few(VICTIMS, [VICTIMS[0], VICTIMS[-1]]))
def test_a_rank_killed_at_any_point_changes_no_weight(
    strategy: str, victims: list[int | str], zygote: Zygote, tmp_path: Path
) -> None:
    """One job is killed at one point after the other, each time in the third save of an attempt."""
    # Each attempt gets nine steps further than the last save it found, which is that of the sixth or the ninth.
    steps = 9 * len(IN_RANK) + 3
    reference = job_of(strategy, zygote, tmp_path / "reference", steps).run_to_end()["hash"]
    job, committed = job_of(strategy, zygote, tmp_path, steps), [0]
    for point, victim in zip(IN_RANK, cycle(victims), strict=False):
        assert _killed(job, victim, f"{point}:kill@3"), f"{point} was not passed three times"
        committed.append(job.newest_committed())
        assert committed[-1] > committed[-2], f"nothing was committed before the third save, in which {point} is"
    assert job.run_to_end()["hash"] == reference, f"resumed from {job.resumed_from()}"
    assert (job.directory / "last.ckpt").is_dir() == (strategy == "fsdp2"), "a folder where the state was sharded"
    resumed = job.resumed_from()
    assert len(resumed) == len(IN_RANK)
    for point, newest, step in zip(IN_RANK, committed[1:], resumed, strict=True):
        assert step >= newest, f"after the kill at {point}"


#: Strategy and point; the shards of a sharded step are not joined.
AGENT_CASES = [
    *(("ddp", point) for point in IN_AGENT),
    *(("fsdp2", point) for point in IN_AGENT if not point.startswith("agent.join.")),
]


def _passage(point: str) -> int:
    """In the third save of an agent, so that too few agents die for saves to be skipped."""
    return 6 if point.removeprefix("agent.") in OF_EACH_RANK else 3


@pytest.mark.kill
@pytest.mark.parametrize(
    ("strategy", "point"), few(AGENT_CASES, [case for case in AGENT_CASES if case[0] == "ddp" or case[1] in OF_SHARDED])
)
def test_an_agent_killed_at_any_point_changes_no_weight(
    strategy: str, point: str, zygote: Zygote, reference: Callable[[str], str], tmp_path: Path
) -> None:
    """Training outlives the agent's death; what the agent left half done is finished or discarded by its successor."""
    job = job_of(strategy, zygote, tmp_path)
    assert job.attempt(faults=f"{point}:kill@{_passage(point)}") == [0, 0]
    assert 1 <= max(_lost(job).values()) <= 3 and job.outcome()["hash"] == reference(strategy)
    assert job.newest_committed() == STEPS, "the last save of a run that ended in order is not there"


@pytest.mark.kill
@pytest.mark.parametrize(("strategy", "point"), few(AGENT_CASES, [("fsdp2", "agent.manifest.write")]))
def test_a_host_lost_at_any_point_of_its_agent_changes_no_weight(
    strategy: str, point: str, zygote: Zygote, reference: Callable[[str], str], tmp_path: Path
) -> None:
    """The ranks are killed as soon as one has lost the agent, so that no successor tidies up for them."""
    job = job_of(strategy, zygote, tmp_path, steps=STEPS)
    workers = job.start(faults=f"{point}:kill@{_passage(point)}")
    try:
        job.wait_for(lambda: bool(_lost(job)), "a rank has lost its agent", timeout_s=60)
    finally:
        job.kill(workers)
    _resumes_right(job, job.newest_committed(), reference(strategy))


def _lost(job: Job) -> Counter[int]:
    """Rank -> number of agents that it has lost."""
    return Counter(event["rank"] for event in job.events("rank-*.jsonl") if event["event_type"] == "agent_lost")


UPLOAD_CASES = [(strategy, point) for strategy in ("ddp", "fsdp2") for point in IN_UPLOAD]


@pytest.mark.kill
@pytest.mark.parametrize(
    ("strategy", "point"),
    few(UPLOAD_CASES, [case for case in UPLOAD_CASES if case[0] == "ddp" or case[1] == "agent.upload.name"]),
)
def test_an_agent_killed_in_an_upload_changes_no_weight(
    strategy: str, point: str, zygote: Zygote, reference: Callable[[str], str], tmp_path: Path
) -> None:
    job = job_of(strategy, zygote, tmp_path, local_dir=str(tmp_path / "fast"))
    passage = 4 if point.removeprefix("agent.upload.") in ("shard", "record") else 2  # these are passed for each rank
    assert job.attempt(faults=f"{point}:kill@{passage}") == [0, 0]
    assert _lost(job) and job.outcome()["hash"] == reference(strategy)


@pytest.mark.kill
@pytest.mark.parametrize(("strategy", "victims"), few([("ddp", [1]), *VICTIMS[2:]], [("ddp", [1]), VICTIMS[-1]]))
def test_a_rank_killed_while_restoring_changes_no_weight(
    strategy: str, victims: list[int | str], zygote: Zygote, reference: Callable[[str], str], tmp_path: Path
) -> None:
    """At one point after the other: each start finds what the one before it has left."""
    job = job_of(strategy, zygote, tmp_path)
    assert _killed(job, 0, "save.begin:kill@4")
    for point, victim in zip(IN_RESTORE, cycle(victims), strict=False):
        committed = job.newest_committed()
        assert committed > 0
        assert _killed(job, victim, f"{point}:kill"), f"{point} was not passed"
        assert job.newest_committed() >= committed, f"after the kill at {point}"
    _resumes_right(job, committed, reference(strategy))


@pytest.mark.kill
def test_without_any_agent_lightnings_own_code_saves(
    zygote: Zygote, reference: Callable[[str], str], tmp_path: Path
) -> None:
    job = job_of("ddp", zygote, tmp_path)
    assert job.attempt(faults="agent.start:kill") == [0, 0]
    assert not job.agents()
    assert job.outcome()["hash"] == reference("ddp")
    assert torch.load(job.directory / "last.ckpt", weights_only=False)["global_step"] == STEPS
