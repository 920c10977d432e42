"""Which saves go to which slower tier; a store that is gone costs a save there, never the training."""

from __future__ import annotations

from datetime import timedelta

import pytest

from resiliency.checkpoint import upload_schedule
from resiliency.checkpoint.coordinator import SoloCoordinator
from resiliency.checkpoint.options import RemoteTierOptions
from resiliency.checkpoint.upload_schedule import RemoteSchedule
from resiliency.storage.interval import Interval


def remote(name: str, **interval: object) -> RemoteTierOptions:
    return RemoteTierOptions(address="memory://x", name=name, interval=Interval(**interval))  # type: ignore[arg-type]


def test_by_steps_and_what_failed_is_due_again() -> None:
    schedule = RemoteSchedule([remote("every"), remote("tens", steps=10)], SoloCoordinator())
    assert schedule.due(3)[0] == ["every"]
    assert schedule.due(7)[0] == ["every"]
    due, undo = schedule.due(10)
    assert due == ["every", "tens"]
    undo()
    assert schedule.due(13)[0] == ["every", "tens"], "the save that failed is not made up for"
    assert schedule.due(15)[0] == ["every"]


def test_a_start_goes_on_counting_from_the_step_it_has_loaded() -> None:
    schedule = RemoteSchedule([remote("tens", steps=10)], SoloCoordinator())
    schedule.loaded(13)
    assert [step for step in range(16, 46, 3) if schedule.due(step)[0] and not schedule.count_save()] == [22, 31, 40]
    schedule.loaded(22)  # to look at it
    assert schedule.due(46)[0] == []


def test_by_the_clock_rank_0_speaks_one_save_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(upload_schedule.time, "monotonic", lambda: now[0])
    schedule = RemoteSchedule([remote("slow", time=timedelta(seconds=60))], SoloCoordinator())

    def save(step: int) -> list[str]:
        due, _ = schedule.due(step)
        schedule.count_save()
        return due

    assert save(1) == ["slow"]
    now[0] += 30
    assert save(2) == []
    now[0] += 31
    assert save(3) == [], "nobody else could know at this save yet"
    assert save(4) == ["slow"]
    assert save(5) == []


def test_a_store_that_is_gone_is_no_reason_to_stop() -> None:
    class Gone(SoloCoordinator):
        def count(self, topic: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    schedule = RemoteSchedule([remote("clock", time=timedelta(seconds=1)), remote("steps", steps=5)], Gone())
    schedule.count_save()
    assert schedule.due(5)[0] == ["steps"]
