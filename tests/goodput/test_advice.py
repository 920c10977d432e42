"""Advice: what was measured, what to change, what that would return; nothing where the log does not show it."""

from __future__ import annotations

import pytest

from resiliency.events import EventKind
from resiliency.goodput.advice import Advice, advise
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import Bucket

from .scripted import Job
from .test_start_parts import _job


def said(job: Job, bucket: Bucket) -> Advice:
    found = advise(job.ledger())
    assert bucket in found, {name.value: one.text for name, one in found.items()}
    return found[bucket]


def test_imports_of_restarts_are_counted_and_what_to_do_depends_on_the_launcher() -> None:
    job = Job()
    job.start()
    job.steps(20)
    for _ in range(3):
        job.fail(detection=0.1)
        job.advance(5.0, Bucket.RESTART)
        job.start(startup=10, load=20)
        for event in job.events[-16:]:
            if event.kind == EventKind.JOB_STARTED:
                event.fields.update(since_process_s=5.0, since_callback_s=0.9, opening_s=0.5)  # type: ignore[attr-defined]
        job.steps(20)
    job.finish()
    advice = said(job, Bucket.RESTART)
    assert advice.text.startswith("imports are 4.1 s of each of 3 restarts: `resiliency run`")
    assert advice.text.endswith("would return up to 12.3 s, 5.2 % of the run")
    assert advice.returns_s == pytest.approx(12.3)


def test_under_our_launcher_the_largest_part_of_a_restart_is_named() -> None:
    advice = said(_job(), Bucket.RESTART)
    assert advice.text.startswith("imports are 5.0 s of the restart: `--preload`")


def test_another_interval_between_saves_is_worked_out_from_what_saves_cost() -> None:
    job = Job()
    job.start(startup=1)
    for _ in range(4):  # a save every 100 steps of 2 s, which stalls 0.5 s; each failure loses 60 steps
        for _ in range(2):
            job.steps(99)
            for rank in range(4):
                job.emit(EventKind.CHECKPOINT_STARTED, rank, step=job.step, stall_s=0.5)
            job.steps(1, stall=0.5)
            job.save()
        load = job.step
        job.steps(60, lost=True)
        job.fail(detection=0.1)
        job.start(startup=1, load=load, restore=0.1)
    job.steps(50)
    job.finish()
    advice = said(job, Bucket.LOST_WORK)
    # sqrt(2 x 0.5 s x 2,180 s / 4) = 23 s, some 11 steps.
    assert "a save every 12 steps" in advice.text and "4 failures lost work" in advice.text, advice.text
    assert 350 < advice.returns_s < 480, "480 s are lost now"


def test_saves_that_are_too_frequent_are_told_so() -> None:
    job = Job()
    job.start(startup=1)
    for _ in range(300):
        for rank in range(4):
            job.emit(EventKind.CHECKPOINT_STARTED, rank, step=job.step, stall_s=1.0)
        job.steps(1, stall=1.0)
        job.save()
    job.steps(1, lost=True)
    job.fail(detection=0.1)
    job.start(startup=1, load=300, restore=0.1)
    job.steps(10)
    job.finish()
    assert "a save every 1" in said(job, Bucket.CHECKPOINT_STALL).text
    assert "saves are one step apart" in said(job, Bucket.CHECKPOINT_STALL).text


def test_a_hang_that_was_noticed_late_names_a_timeout() -> None:
    job = Job()
    job.start()
    job.steps(50)
    job.save()
    job.fail(detection=1800, kind=EventKind.HANG_DETECTED)
    job.start(load=50, restore=1)
    job.steps(50)
    job.finish()
    advice = said(job, Bucket.DETECTION)
    assert "`--hang-timeout 60`" in advice.text and "30 m 00 s pass until the hang is noticed" in advice.text
    assert advice.returns_s == pytest.approx(1740)


def test_one_rank_with_a_slow_loader_is_named() -> None:
    job = Job()
    job.start(startup=1)
    for _ in range(50):
        job.step += 1
        job.now += 3.0
        for rank in range(4):
            job.emit(
                EventKind.STEP, rank, step=job.step, step_s=3.0, data_wait_s=1.0 if rank == 2 else 0.2, stall_s=0.0
            )
    job.finish()
    advice = said(job, Bucket.DATA_WAIT)
    assert "rank 2 on host-2 waits 1 s a step for its loader, the others 200 ms" in advice.text
    assert advice.returns_s == pytest.approx(50 * 0.8 / 4), "the others go on waiting"


def test_a_span_that_is_most_of_the_loop_is_named() -> None:
    job = Job(ranks=2)
    job.start(startup=1)
    job.emit(EventKind.SPAN_ENDED, 0, span="check of the data", span_s=90.0, at=job.now)  # in the start
    for _ in range(4):
        job.steps(20)
        job.now += 15.0
        for rank in range(2):
            job.emit(EventKind.SPAN_ENDED, rank, span="evaluation", span_s=15.0)
        job.now -= 15.0
        job.steps(1, loop=18.0)
    job.finish()
    advice = said(job, Bucket.LOOP)
    assert advice.text.startswith(
        "the span `evaluation`, 4 times 15.0 s, is most of the loop overhead: running it half as often"
    )
    assert advice.returns_s == pytest.approx(30.0)


def test_a_tier_that_restores_faster_is_named() -> None:
    job = Job(ranks=1)
    job.start(startup=1)
    for seconds, tier in ((40.0, "gcs"), (2.0, "local"), (40.0, "gcs")):
        job.steps(20)
        job.save()
        job.fail(detection=0.1)
        job.start(startup=1, restore=seconds, load=job.step)
        loaded = next(event for event in reversed(job.events) if event.kind == EventKind.CHECKPOINT_LOADED)
        loaded.fields["source"] = tier  # type: ignore[index]
    job.steps(20)
    job.finish()
    advice = said(job, Bucket.RESTORE)
    assert "from gcs takes 40.0 s, from local 2.0 s: a copy in local" in advice.text
    assert advice.returns_s == pytest.approx(76.0)


def test_parts_of_a_restart_that_are_short_are_not_worth_a_word() -> None:
    job = Job()
    job.start(startup=1)
    job.steps(5)
    for _ in range(5):
        job.fail(detection=0.01)
        job.advance(0.45, Bucket.RESTART)
        job.start(startup=0.1, load=5)
        for event in job.events[-16:]:
            if event.kind == EventKind.JOB_STARTED:
                event.fields.update(since_process_s=0.45, since_callback_s=0.05)  # type: ignore[attr-defined]
        job.steps(5)
    job.finish()
    ledger = job.ledger()
    assert ledger.start_parts(Bucket.RESTART) and ledger.share(Bucket.RESTART) > 0.02
    assert Bucket.RESTART not in advise(ledger)


def test_where_the_log_shows_nothing_there_is_no_advice() -> None:
    job = Job()
    job.start(startup=1000)
    job.steps(50)
    job.save()
    job.fail(detection=1)
    job.start(startup=500, restore=300, load=50)  # not split, from one tier
    job.steps(50)
    job.finish()
    assert advise(job.ledger()) == {}
    summary = summarize(job.ledger())
    assert all(row["advice"] is None for row in summary["buckets"])


def test_no_advice_returns_more_than_its_bucket() -> None:
    for job in (_job(), _job(told_apart=True), _job(marks=False)):
        ledger = job.ledger()
        for bucket, advice in advise(ledger).items():
            assert 0 < advice.returns_s <= ledger.wall[bucket] / 1e6
