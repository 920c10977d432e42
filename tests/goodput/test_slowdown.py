"""Steps that became slower for good are not productive; what only varies is."""

from __future__ import annotations

import random

import pytest

from resiliency.goodput.advice import advise
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.collect import Collector

from .scripted import STEP_S, Job, assert_matches
from .test_ledger_property import check


def with_reference(job: Job, seconds: float) -> Ledger:
    collector = Collector()
    for event in job.events:
        collector.add(event)
    return account(collector.runs[job.run], reference_step_s=seconds)


def from_the_middle_on(extra: float = 1.0) -> Job:
    job = Job()
    job.start()
    job.steps(300)
    job.steps(300, extra=extra, extra_bucket=Bucket.SLOWDOWN)
    job.finish()
    return job


def test_every_step_half_as_long_again_from_the_middle_on_is_slowdown() -> None:
    job = from_the_middle_on()
    ledger = job.ledger()
    assert_matches(ledger, job)
    check(ledger)
    assert ledger.best_step_s == pytest.approx(STEP_S)
    text = advise(ledger)[Bucket.SLOWDOWN].text
    assert "steps take 3 s to compute instead of 2 s, from step 304 on" in text


def test_a_slow_attempt_is_compared_with_the_others() -> None:
    job = Job()
    job.start()
    job.steps(200)
    job.save()
    job.fail(detection=1)
    job.start(startup=10, restore=1, load=200)
    job.steps(200, extra=1.0, extra_bucket=Bucket.SLOWDOWN)
    job.finish()
    assert_matches(job.ledger(), job)


def test_one_fast_stretch_is_not_the_measure_and_one_slow_stretch_no_slowdown() -> None:
    job = Job()
    job.start()
    job.steps(160)
    job.steps(8, extra=-1.2)
    job.steps(160)
    job.steps(6, extra=3.0)
    job.steps(160)
    job.finish()
    ledger = job.ledger()
    assert ledger.best_step_s == pytest.approx(STEP_S)
    assert ledger.gpu[Bucket.SLOWDOWN] == 0


def test_a_fast_spell_of_less_than_a_tenth_is_not_the_measure() -> None:
    job = Job(ranks=1)
    job.start()
    job.steps(320)
    job.steps(48, extra=-0.8)
    job.steps(320)
    job.finish()
    ledger = job.ledger()
    assert ledger.best_step_s == pytest.approx(STEP_S)
    assert ledger.gpu[Bucket.SLOWDOWN] == 0


def test_steps_that_vary_are_productive() -> None:
    rng = random.Random(5)
    job = Job(ranks=2)
    job.start()
    for _ in range(640):
        job.steps(1, extra=rng.gauss(0, 0.15))
    job.finish()
    ledger = job.ledger()
    assert ledger.share(Bucket.SLOWDOWN) < 0.002
    assert summarize(ledger)["step_times"]["deviation_s"] == pytest.approx(0.15, rel=0.1)


def test_a_smaller_job_has_a_measure_of_its_own() -> None:
    job = Job()
    job.start()
    job.steps(100)
    job.save()
    job.fail(detection=1, worker=3)
    job.start(ranks=3, startup=10, restore=1, load=100)
    job.steps(100, extra=0.7)
    job.finish()
    assert job.ledger().gpu[Bucket.SLOWDOWN] == 0


def test_what_has_a_cause_of_its_own_is_no_slowdown() -> None:
    job = Job()
    job.start()
    job.steps(100)
    job.steps(100, extra=0.6, extra_bucket=Bucket.INTERFERENCE, in_flight=True)
    job.steps(100, stall=0.6)
    job.steps(100, data=0.6)
    job.finish()
    ledger = job.ledger()
    assert ledger.gpu[Bucket.SLOWDOWN] == 0
    assert_matches(ledger, job)


def test_a_straggler_that_comes_late_is_counted_once() -> None:
    job = Job()
    job.start()
    for step in range(320):
        late = 1.0 if step >= 160 else 0.0
        job.step += 1
        job.now += STEP_S + late
        for rank in range(4):
            busy = 1.0 + (late if rank == 3 else 0.0)
            job.emit("step", rank, step=job.step, step_s=STEP_S + late, busy_s=busy, data_wait_s=0.0, stall_s=0.0)
    job.finish()
    ledger = job.ledger()
    assert ledger.gpu[Bucket.STRAGGLER] / 1e6 == pytest.approx(640, rel=0.05)
    assert ledger.gpu[Bucket.SLOWDOWN] / 1e6 < 40


def test_against_a_reference_all_that_is_longer_is_slowdown() -> None:
    job = Job()
    job.start()
    job.steps(320)
    job.finish()
    ledger = with_reference(job, 1.5)
    check(ledger)
    assert ledger.gpu[Bucket.SLOWDOWN] / 1e6 == pytest.approx(320 * 0.5 * 4)
    assert with_reference(job, 3.0).gpu[Bucket.SLOWDOWN] == 0


def test_too_few_steps_have_no_best() -> None:
    job = Job()
    job.start()
    job.steps(30)
    job.steps(30, extra=1.0)
    job.finish()
    assert job.ledger().best_step_s is None
