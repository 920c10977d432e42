"""A job that dies of its newest step goes on from an older one; another job does not hear of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resiliency.callbacks.checkpointing.set_aside import Loads, without
from resiliency.checkpoint.restore import Inventory
from resiliency.storage.step_id import StepId
from resiliency.testing.zygote import Zygote

ONE, TWO = (StepId(step=step, attempt=1, token="abcdef", serial=0, line=1) for step in (1, 2))


def test_a_step_is_set_aside_after_the_third_process_that_ended_in_its_restore() -> None:
    twice = Loads().begun(TWO).begun(TWO)
    assert twice.judged() == twice
    assert twice.ended().begun(TWO).judged().aside == {}, "one of them went well"
    assert twice.begun(ONE).judged().aside == {}, "another step"
    thrice = twice.begun(TWO).judged()
    assert list(thrice.aside) == [TWO.dirname] and thrice.loading == ""


def test_the_only_step_is_taken_all_the_same() -> None:
    both = Inventory(entries=(), saved=None, steps=((TWO, ()), (ONE, ())))
    assert without(both, {TWO.dirname: "why"}).steps == ((ONE, ()),)
    assert without(both, {TWO.dirname: "why"}).saved == TWO, "what is saved next is newer"
    assert without(both, {TWO.dirname: "why", ONE.dirname: "why"}) == both
    assert without(both, {}) == both


class Job:
    """A job whose process is started again and again, as torchrun does."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder, self.restarts = zygote, folder, 0

    def process(self, *, name: str = "a", faults: str = "", **arguments: Any) -> dict[str, Any] | None:
        """What the process has written; None when it was killed."""
        result = self.folder / f"result-{name}-{self.restarts}"
        launched = {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(self.restarts)}
        worker = self.zygote.start(
            "tests.callbacks.set_aside_job:fit",
            {"directory": str(self.folder / "run"), "result": str(result), **arguments},
            env={**launched, "RESILIENCY_FAULTS": faults},
        )
        worker.wait(timeout_s=60)
        self.restarts += 1
        found: dict[str, Any] | None = json.loads(result.read_text()) if result.exists() else None
        return found


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Job:
    return Job(zygote, tmp_path)


def started(found: dict[str, Any] | None) -> int:
    assert found is not None
    return int(found["started"])


def test_a_step_with_a_nan_loss_is_left_in_the_next_restart(job: Job) -> None:
    first = job.process(max_steps=20, poisons=4)
    assert first is not None and first["step"] == 5 and started(first) == 0
    second = job.process(max_steps=20)
    assert second is not None and started(second) == 4
    assert any("first loss after step 4" in line and "is NaN" in line for line in second["lines"])
    job.restarts = 0
    assert started(job.process(max_steps=20, auto_resume=True)) == 4, "started anew it is another job"
    third = job.process(max_steps=7)
    assert third is not None and (started(third), third["step"]) == (2, 7), third["lines"]
    assert any("step 4" in line and "is set aside in this job" in line for line in third["lines"])
    assert started(job.process(max_steps=8)) == 6, "what was saved since is the newest"


@pytest.mark.kill
def test_a_step_whose_restore_kills_the_process_is_left_after_the_third_time(job: Job) -> None:
    assert started(job.process(max_steps=4)) == 0
    for _ in range(3):
        assert job.process(max_steps=9, faults="restore.load:kill") is None
    went_back = job.process(max_steps=5)
    assert went_back is not None and (started(went_back), went_back["step"]) == (2, 5)
    assert any("3 processes in a row ended while they restored it" in line for line in went_back["lines"])
