"""Two hosts, each with its own agent: on one shared folder, and on folders of their own with a common slower tier."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.testing.zygote import Zygote
from tests.e2e.driver import Job

STEPS = 21
HOSTS = {0: {"RESILIENCY_NODE": "host-a"}, 1: {"RESILIENCY_NODE": "host-b"}}


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(Job(zygote, tmp_path_factory.mktemp("reference") / "run", steps=STEPS).run_to_end()["hash"])


def _kill_in_fourth_save(job: Job) -> None:
    workers = job.start(rank_faults={1: "save.begin:kill@4"})
    try:
        assert workers[1].wait(timeout_s=60) == -9
    finally:
        job.kill(workers)


@pytest.mark.kill
def test_two_hosts_resume_from_a_shared_folder(zygote: Zygote, reference: str, tmp_path: Path) -> None:
    """Whoever writes the last record commits; each host deletes its own part, so the folder does not grow."""
    job = Job(zygote, tmp_path / "run", steps=STEPS, rank_env=HOSTS)
    _kill_in_fourth_save(job)
    committed = job.newest_committed()
    assert committed > 0
    assert job.run_to_end()["hash"] == reference
    assert job.resumed_from()[-1] >= committed
    nodes = {event["host"] for event in job.events("agent-*.jsonl")}
    assert nodes == {"host-a", "host-b"}
    shards = list((tmp_path / "run").glob(".resiliency/default/steps/*/shard-*.shard"))
    assert len(shards) <= 6, f"steps that should have been deleted are still there: {shards}"


@pytest.mark.kill
def test_a_host_that_lost_its_folder_resumes_from_the_common_tier(
    zygote: Zygote, reference: str, tmp_path: Path
) -> None:
    """A host that lost its disk gets everything from the common tier; both resume from one step."""
    fast = {rank: {"local_dir": str(tmp_path / f"fast-{rank}")} for rank in HOSTS}
    job = Job(zygote, tmp_path / "store", steps=STEPS, rank_env=HOSTS, rank_arguments=fast)
    _kill_in_fourth_save(job)
    stored = job.newest_committed()
    assert stored > 0, "nothing reached the common tier"
    job.wait_for_agents(timeout_s=60)  # they finish what was sealed
    shutil.rmtree(tmp_path / "fast-1")
    assert job.run_to_end()["hash"] == reference
    resumed = {
        rank: [e["step"] for e in job.events(f"rank-{rank:05d}.jsonl") if e["event_type"] == "checkpoint_loaded"][-1]
        for rank in HOSTS
    }
    assert resumed[0] == resumed[1] >= stored


@pytest.mark.nightly
def test_beside_another_job_on_one_host_the_stock_class_writes_for_all(
    zygote: Zygote, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host b waits 20 s for that job, and host a must not wait for a save that never comes, or write beside it."""
    fast = {rank: {"local_dir": str(tmp_path / f"fast-{rank}")} for rank in HOSTS}
    job = Job(zygote, tmp_path / "store", steps=STEPS, rank_env=HOSTS, rank_arguments=fast)
    monkeypatch.setenv("RESILIENCY_NODE", "host-b")
    with Checkpointer(tmp_path / "fast-1") as other:
        other.save(1, {"x": torch.zeros(1)}).wait()
        assert job.run_to_end()["hash"] == reference
    assert torch.load(tmp_path / "store" / "last.ckpt")["global_step"] == STEPS
    assert {event["event_type"] for event in job.events("*.jsonl")} <= {"agent_started"}
    assert not list(tmp_path.glob("fast-0/**/*.shard"))
