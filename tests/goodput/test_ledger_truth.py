"""Scripted timelines with known truth: every bucket within 1 % or one step, sums exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resiliency.events import EventKind
from resiliency.goodput.ledger import account
from resiliency.goodput.summary import summarize
from resiliency.goodput.table import unit_word
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.collect import Collector

from .scripted import Job, assert_matches


def crash() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(100)
    job.save()
    job.steps(30, lost=True)
    job.fail(detection=3)
    job.advance(20, Bucket.RESTART)
    job.start(startup=10, restore=15, load=100)
    job.steps(80)
    job.finish()
    return job


def hang() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(60)
    job.save()
    job.steps(10, lost=True)
    job.fail(detection=600, kind=EventKind.HANG_DETECTED)
    job.start(startup=25, restore=5, load=60)
    job.steps(60)
    job.finish()
    return job


def preemption() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(50)
    # The notice arrives, all ranks stop after the step, save for 6 s and leave.
    job.training = False
    job.advance(6, Bucket.CHECKPOINT_STALL)
    for rank in range(4):
        job.emit(EventKind.CHECKPOINT_FENCED, rank, step=50, stall_s=6.0)
        job.emit(EventKind.JOB_TERMINATED, rank, reason="signal")
    job.advance(300, Bucket.RESTART)
    job.start(startup=30, restore=10, load=50)
    job.steps(50)
    job.finish()
    return job


def hot_swap() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(100)
    job.save()
    job.steps(5, lost=True)
    job.fail(detection=2, kind=EventKind.HOST_LOST, lost_host="host-2")
    job.hosts[2] = "spare-0"
    job.advance(4, Bucket.RESTART)
    job.start(startup=8, restore=3, load=100)
    job.steps(100)
    job.finish()
    return job


def scale_down() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(50)
    job.save()
    job.fail(detection=5, worker=3)
    job.start(ranks=3, startup=20, restore=5, load=50)
    job.steps(100)
    job.save()
    job.training = False
    for rank in range(3):
        job.emit(EventKind.JOB_TERMINATED, rank, reason="signal")
    job.start(ranks=4, startup=20, restore=5, load=150)
    job.steps(50)
    job.finish()
    return job


def failed_save() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(20)
    job.save()
    job.steps(20, lost=True)
    job.emit(EventKind.CHECKPOINT_FAILED, 0, step=40, tier="local", reason="no space left on device", will_retry=True)
    job.steps(18, lost=True)
    job.fail(detection=1)
    job.start(startup=10, restore=2, load=20)
    job.steps(60)
    job.finish()
    return job


def badput_inside_training() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(1, extra=30, extra_bucket=Bucket.WARM_UP)
    job.steps(1, extra=5, extra_bucket=Bucket.WARM_UP)
    job.steps(100)
    job.steps(20, data=0.5)
    job.steps(20, stall=0.25)
    job.steps(20, extra=0.4, extra_bucket=Bucket.INTERFERENCE, in_flight=True)
    job.steps(1, extra=120, extra_bucket=Bucket.UNKNOWN)
    job.steps(100)
    job.finish()
    return job


def lost_twice() -> Job:
    """Two failures in a row, the second restoring an older step than the first."""
    job = Job()
    job.start(startup=40)
    job.steps(30)
    job.steps(40, lost=True)  # the first failure goes back to 50, the second to 30: all beyond 30 is lost in the end
    job.fail(detection=2)
    job.start(startup=10, restore=5, load=50)
    job.steps(10, lost=True)
    job.fail(detection=2)
    job.start(startup=10, restore=5, load=30)
    job.steps(100)
    job.finish()
    return job


def crash_while_starting() -> Job:
    job = Job()
    job.start(startup=40)
    job.steps(20)
    job.save()
    job.fail(detection=1)
    job.attempt += 1
    for rank in range(4):
        job.emit(EventKind.JOB_STARTED, rank, world_size=4)
    job.advance(15, Bucket.RESTART)
    for rank in range(4):
        job.emit(EventKind.JOB_TERMINATED, rank, reason="exception")
    job.advance(15, Bucket.RESTART)
    job.start(startup=10, restore=5, load=20)
    job.steps(20)
    job.finish()
    return job


def week_long() -> Job:
    job = Job(ranks=2)
    job.start(startup=60)
    for day in range(7):
        for _ in range(20):
            job.steps(100)
            job.save()
        job.steps(50, lost=True)
        job.fail(detection=30)
        job.advance(3600, Bucket.RESTART)
        job.start(startup=60, restore=20, load=(day + 1) * 2000)
        # Quiet stretches are written as aggregated lines.
    job.steps(100)
    job.finish()
    return job


def callbacks_between_the_steps() -> Job:
    job = Job()
    job.start()
    job.steps(60, loop=0.75, data=0.25)
    job.finish()
    return job


SCRIPTS: list[Callable[[], Job]] = [
    crash,
    hang,
    preemption,
    hot_swap,
    scale_down,
    failed_save,
    badput_inside_training,
    lost_twice,
    crash_while_starting,
    week_long,
    callbacks_between_the_steps,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_bucket_matches_the_script(script: Callable[[], Job]) -> None:
    job = script()
    assert_matches(job.ledger(), job)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_files_on_disk_give_the_same_account(script: Callable[[], Job], tmp_path: Path) -> None:
    job = script()
    job.write(tmp_path)
    ledger = job.read(tmp_path)
    assert_matches(ledger, job)
    assert ledger.gpu == job.ledger().gpu


def _gpu_seconds(found: object) -> Iterator[float]:
    """All GPU time in a summary."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key.endswith("gpu_s"):
                yield from value.values() if isinstance(value, dict) else [value]
            elif key != "ranks":
                yield from _gpu_seconds(value)
    elif isinstance(found, list):
        for one in found:
            yield from _gpu_seconds(one)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_gpu_time_is_that_of_all_gpus_of_a_rank_everywhere(script: Callable[[], Job]) -> None:
    job, collector = script(), Collector()
    for event in job.events:
        collector.add(event)
    run = collector.runs[job.run]
    one, eight = summarize(account(run)), summarize(account(run, gpus_per_rank=8))
    assert list(_gpu_seconds(eight)) == pytest.approx([8 * seconds for seconds in _gpu_seconds(one)])
    texts = [[row["advice"] and row["advice"]["text"] for row in each["buckets"]] for each in (one, eight)]
    assert texts[0] == texts[1]
    assert (one["goodput"], 8 * one["capacity"]) == (eight["goodput"], eight["capacity"])
    assert unit_word(eight) == "GPU"
