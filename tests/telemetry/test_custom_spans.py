"""Work that a script names itself: in the log, in the report, on the time line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from resiliency.events import EventKind, EventWriter, JsonlSink
from resiliency.goodput.ledger import account
from resiliency.goodput.named_spans import span_rows, spans_of
from resiliency.goodput.page import render_page
from resiliency.goodput.summary import summarize
from resiliency.goodput.table import print_report
from resiliency.goodput.windows import Moment, Windows
from resiliency.telemetry import custom_spans
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.custom_spans import span, spans_go_to
from resiliency.telemetry.reader import read_logs
from tests.goodput.scripted import START, Job


def writer_to(path: Path, rank: int = 0) -> EventWriter:
    return EventWriter(run="mine", attempt=2, rank=rank, host="h", sinks=(JsonlSink(path),))


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_spans, "_log", None)


def test_a_span_from_before_the_log_has_its_own_time_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    before = time.time()
    with span("check of the data"):
        time.sleep(0.02)
    after = time.time()
    writer = writer_to(path, rank=3)
    spans_go_to(path, writer)
    with pytest.raises(KeyError), span("evaluation"):
        raise KeyError("of the script")
    writer.close()
    with span("after the fit"):
        pass
    found = lines_of(path)
    assert [(line["event_type"], line["span"]) for line in found] == [
        (kind, name)
        for name in ("check of the data", "evaluation", "after the fit")
        for kind in (EventKind.SPAN_STARTED, EventKind.SPAN_ENDED)
    ]
    assert all((line["job_name"], line["attempt"], line["rank"]) == ("mine", 2, 3) for line in found)
    (run,) = read_logs([path]).collector.runs.values()
    first = spans_of(account(run))[0]
    assert before - 0.01 <= first.start and first.end <= after + 0.01 and first.end - first.start >= 0.02


def test_without_a_log_a_span_is_nothing_and_a_fork_has_none(tmp_path: Path) -> None:
    for _ in range(1000):
        with span("for nobody"):
            pass
    path = tmp_path / "rank.jsonl"
    spans_go_to(path, writer_to(path))
    kept = len(lines_of(path))
    assert kept == 256
    script = """
import os, sys
from resiliency.events import EventWriter, NullSink
from resiliency.telemetry.custom_spans import span, spans_go_to
spans_go_to(sys.argv[1], EventWriter(run="r", attempt=0, rank=0, host="h", sinks=()))
if os.fork() == 0:
    with span("of a loader's worker"): pass
    os._exit(0)
os.wait()
with span("of the rank"): pass
"""
    other = tmp_path / "other.jsonl"
    subprocess.run([sys.executable, "-c", script, other], check=True, timeout=60)
    assert {line["span"] for line in lines_of(other)} == {"of the rank"}


def test_a_name_that_is_no_text_does_not_end_a_training(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    with span(12, writer=writer_to(path)), span(None, writer=writer_to(path)):  # type: ignore[arg-type]
        pass
    assert [line["span"] for line in lines_of(path)] == ["12", "None", "None", "12"]


def named() -> Job:
    job = Job(ranks=2)
    job.start()
    for _ in range(3):
        job.steps(20)
        for rank in range(2):
            job.emit(EventKind.SPAN_STARTED, rank, span="evaluation")
        job.now += 12.0
        for rank in range(2):
            job.emit(EventKind.SPAN_ENDED, rank, span="evaluation", span_s=12.0)
    job.emit(EventKind.SPAN_STARTED, 0, span="killed here")
    job.steps(10)
    return job


def test_spans_are_in_the_report_and_on_the_time_line() -> None:
    ledger = named().ledger()
    assert ledger.wall_us == sum(ledger.wall.values())
    rows = {row["span"]: row for row in span_rows(ledger)}
    evaluation = rows["evaluation"]
    assert (evaluation["count"], evaluation["ranks"], evaluation["total_s"]) == (6, 2, 72.0)
    assert evaluation["mean_s"] == evaluation["longest_s"] == 12.0
    assert rows["killed here"]["total_s"] == pytest.approx(20.0)
    assert [one.start for one in spans_of(ledger) if one.rank == 0][:2] == [START + 70, START + 122]
    summary = summarize(ledger)
    text = io.StringIO()
    print_report([summary], Console(file=text, width=120))
    assert "evaluation" in text.getvalue()
    page = render_page([(summary, ledger)])
    assert page.count("evaluation 12.0 s") == 3 and "did not end" in page


def test_spans_of_a_part_of_the_run_are_cut_with_it() -> None:
    collector = Collector()
    for event in named().events:
        collector.add(event)
    windows = Windows(since=Moment(76, is_offset=True), until=Moment(100, is_offset=True))
    (row,) = span_rows(account(collector.runs["job"], windows=windows))
    assert (row["span"], row["count"], row["total_s"]) == ("evaluation", 2, 12.0)


def test_very_many_spans_are_summed_and_bounded() -> None:
    collector = Collector()
    job = Job(ranks=1)
    job.start()
    for number in range(2000):
        job.now += 1.0
        job.emit(EventKind.SPAN_ENDED, 0, span=f"name {number % 100}", span_s=0.5)
    for event in job.events:
        collector.add(event)
    (segment,) = collector.runs["job"].segments
    assert len(segment.spans) <= 256 and len(segment.span_sums) <= 33
    assert sum(count for count, _ in segment.span_sums.values()) == 2000
