"""A job whose checkpoints live in a bucket (a real server on this machine): kill everything, lose the local tier, resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resiliency.storage.catalog import scan
from resiliency.storage.tiers import open_tier
from resiliency.testing.gcs_server import FakeGcs
from resiliency.testing.zygote import Zygote
from tests.e2e.driver import Job

STEPS = 21


@pytest.mark.long
@pytest.mark.kill
def test_a_job_resumes_from_a_bucket_on_another_machine(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Job(zygote, tmp_path / "reference", steps=STEPS).run_to_end()["hash"]
    with FakeGcs() as gcs:
        gcs.create_bucket("bucket")
        env = {"STORAGE_EMULATOR_HOST": gcs.url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        fast = tmp_path / "fast"
        job = Job(zygote, tmp_path / "run", steps=STEPS, env=env)
        job.arguments = {"directory": "gs://bucket/job", "local_dir": str(fast)}
        job.env["RESILIENCY_EVENTS_DIR"] = str(tmp_path / "run" / ".resiliency" / "default" / "events")
        workers = job.start(rank_faults={0: "save.begin:kill@5"})
        try:
            assert workers[0].wait(timeout_s=90) == -9
        finally:
            job.kill(workers)
        job.wait_for_agents(timeout_s=60)  # they finish the uploads of what was sealed
        tier = open_tier("gs://bucket/job")
        stored = max((listing.id.step for listing in scan(tier, "default") if listing.committed), default=0)
        assert stored > 0, "nothing reached the bucket"
        shutil.rmtree(fast)
        assert job.run_to_end()["hash"] == reference
        assert job.resumed_from()[-1] >= stored
        left = [listing.id.step for listing in scan(tier, "default") if listing.committed]
        assert max(left) == STEPS
        assert len(left) <= 4, f"the bucket is not pruned: {left}"
