"""Goodput over time: rolling, of the run so far, in the table, in JSON and on the page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from resiliency.goodput.ledger import account
from resiliency.goodput.over_time import COLUMNS, ROLLING, columns_of, over_time
from resiliency.goodput.summary import summarize
from resiliency.goodput.table import print_report
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.windows import Moment, Windows
from resiliency.telemetry.collect import Collector

from .scripted import Job
from .test_ledger_truth import SCRIPTS, week_long


def good_then_bad() -> Job:
    job = Job()
    job.start(startup=0.1)
    job.steps(200)
    job.steps(200, data=2.0)
    job.finish()
    return job


def test_the_curve_falls_where_the_job_gets_worse() -> None:
    points = over_time(good_then_bad().ledger())
    assert len(points) == COLUMNS
    third = COLUMNS // 3
    assert all(point.goodput > 0.99 for point in points[1 : third - 1])
    assert all(point.goodput == pytest.approx(0.5, abs=0.02) for point in points[third + ROLLING + 1 :])
    assert points[-1].worst is Bucket.DATA_WAIT
    assert points[-1].so_far == pytest.approx(good_then_bad().ledger().goodput, abs=1e-6)


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one is not week_long], ids=lambda script: script.__name__)
def test_columns_hold_all_time_and_the_buckets_of_the_ledger(script: object) -> None:
    ledger = script().ledger()  # type: ignore[operator]
    columns = columns_of(ledger)
    for column in columns:
        assert column.whole == pytest.approx((column.end_us - column.start_us) * ledger.capacity, rel=1e-6)
    for bucket in Bucket:
        assert sum(c.parts.get(bucket, 0.0) for c in columns) == pytest.approx(ledger.gpu[bucket], abs=10)


def test_time_that_is_left_out_has_no_points() -> None:
    collector = Collector()
    for event in good_then_bad().events:
        collector.add(event)
    hole = (Moment(300, is_offset=True), Moment(900, is_offset=True))
    ledger = account(collector.runs["job"], windows=Windows(exclude=(hole,)))
    times = [point.time - ledger.start for point in over_time(ledger)]
    assert times and not any(320 < time < 880 for time in times)


def test_the_report_and_watch_show_it_as_a_row() -> None:
    summary = summarize(good_then_bad().ledger())
    text = io.StringIO()
    print_report([summary], Console(file=text, width=140))
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("Goodput over time")]
    assert line.count("█") >= 12 and line.count("▅") >= 24, line
    assert "50.0 % at the end" in line


def test_a_run_without_time_has_no_curve() -> None:
    job = Job(ranks=1)
    job.alive = 1
    job.emit("made_up", 0)
    assert over_time(job.ledger()) == []
