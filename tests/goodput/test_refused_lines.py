"""Lines that none of our writers can have written: refused, counted, and named in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.reader import LogReader

from .scripted import Job, assert_matches


def _launcher(job: Job, kind: str, host: str = "", **fields: Any) -> None:
    for name in [host] if host else ["host-0", "host-1"]:
        job.hosts[-1] = name
        job.emit(kind, -1, **fields)


def _start(job: Job, load: int | None = None) -> None:
    first = job.attempt < 0
    bucket = Bucket.FIRST_START if first else Bucket.RESTART
    job.alive, job.training = job.ranks, False
    if first:
        job.advance(2.0, bucket)
        _launcher(job, EventKind.LAUNCHER_STARTED, boot="b", since_process_s=2.0)
    _launcher(job, EventKind.RANKS_STARTED, count=2)
    job.attempt += 1
    job.advance(10.0, bucket)
    ages = {"since_process_s": 9.5, "since_callback_s": 3.0, "since_group_s": 2.0, "group_s": 1.0, "opening_s": 0.5}
    launched = {"since_launcher_s": job.now - job.events[0].time + 2.0}
    for rank in range(4):
        job.emit(EventKind.JOB_STARTED, rank, world_size=4, boot="b", imports_s=5.0, **ages, **launched)
    _launcher(job, EventKind.AGENT_STARTED)
    job.advance(2.0, bucket)
    if load is not None:
        for rank in range(4):
            job.emit(EventKind.RESTORE_STARTED, rank)
        job.advance(3.0, Bucket.RESTORE)
        for rank in range(4):
            job.emit(EventKind.CHECKPOINT_LOADED, rank, step=load, duration_s=3.0, source="local", bytes=1000)
        job.step = load
    for rank in range(4):
        job.emit(EventKind.SPAN_STARTED, rank, span="check")
    job.advance(1.0, bucket)
    for rank in range(4):
        job.emit(EventKind.SPAN_ENDED, rank, span="check", span_s=1.0)
        job.emit(EventKind.TRAIN_STARTED, rank, step=job.step, world_size=4)
    job.training = True


def _save(job: Job) -> None:
    for rank in range(4):
        job.emit(EventKind.CHECKPOINT_STARTED, rank, step=job.step, stall_s=0.1, bytes=1000)
        job.emit(EventKind.CHECKPOINT_FENCED, rank, step=job.step, stall_s=0.05)
        job.emit(EventKind.CHECKPOINT_SAVED, rank, step=job.step, tier="local", bytes=1000)
    _launcher(job, EventKind.CHECKPOINT_DURABLE, step=job.step, tier="local", duration_s=0.3)


def _supervised() -> Job:
    """Two hosts, three attempts, everything that writes today."""
    job = Job(ranks_per_host=2)
    _start(job)
    job.steps(20, data=0.2)
    _save(job)
    job.steps(10, data=0.2, lost=True)
    job.training = False
    job.advance(1.5, Bucket.DETECTION)
    _launcher(job, EventKind.WORKER_LOST, "host-0", worker=1, exit_code=1)
    _launcher(job, EventKind.HANG_DETECTED, "supervisor", worker=1, quiet_s=3.0, incident=1)
    _launcher(job, EventKind.PLAN_ENDED, "supervisor", incident=1, plan=1, remedy="restart", outcome="done")
    job.advance(3.0, Bucket.RESTART)
    _start(job, load=20)
    job.steps(25, loop=0.1)
    _save(job)
    job.steps(5, loop=0.1, lost=True)
    job.training = False
    job.advance(1.0, Bucket.DETECTION)
    _launcher(job, EventKind.WORKER_LOST, "host-1", worker=3, exit_code=1)
    job.advance(3.0, Bucket.RESTART)
    _start(job, load=45)
    job.steps(30, stall=0.1, in_flight=True)
    _save(job)
    job.steps(10)
    job.finish()
    job.advance(1.0, Bucket.IDLE)
    for rank in range(4):
        job.emit(EventKind.PROCESS_ENDED, rank)
    _launcher(job, EventKind.LAUNCHER_ENDED)
    _launcher(job, EventKind.PROCESS_ENDED)
    return job


JOB = _supervised()
LINES = [event.to_json().encode() for event in JOB.events]


def _read(lines: list[bytes]) -> Ledger:
    reader = LogReader()
    reader._block(b"\n".join(lines) + b"\n")
    return account(reader.collector.runs["job"])


def _changed(line: bytes, **change: object) -> bytes:
    return json.dumps({**json.loads(line), **change}, separators=(",", ":")).encode()


def _line(kind: str, *, rank: int, attempt: int) -> bytes:
    """The first line of this kind."""
    found = (n for n, e in enumerate(JOB.events) if (e.kind, e.rank, e.attempt) == (kind, rank, attempt))
    return LINES[next(found)]


def test_a_log_of_everything_that_writes_is_the_truth_and_nothing_of_it_is_refused() -> None:
    ledger = _read(LINES)
    assert_matches(ledger, JOB)
    assert not ledger.notes
    assert not ledger.facts.quality


@pytest.mark.parametrize("kind", [EventKind.STEP, EventKind.CHECKPOINT_LOADED, EventKind.CHECKPOINT_STARTED])
@pytest.mark.parametrize("first", [True, False], ids=["read first", "read last"])
def test_a_line_from_before_the_start_of_its_process_is_refused(kind: str, first: bool) -> None:
    """It names the attempt after its own. A step that is read before that start is of a process without one."""
    source = _line(kind, rank=1, attempt=0 if kind != EventKind.CHECKPOINT_LOADED else 1)
    wrong = _changed(source, attempt=2)
    ledger = _read([wrong, *LINES] if first and kind != EventKind.STEP else [*LINES, wrong])
    assert_matches(ledger, JOB)
    assert ledger.facts.quality["refused_outside_life"] == 1
    assert ledger.notes == ("Refused lines, which do not count: 1 from outside the life of their process.",)


@pytest.mark.parametrize("kind", [EventKind.STEP, EventKind.CHECKPOINT_FENCED, EventKind.TRAIN_ENDED])
def test_a_line_from_after_the_end_of_its_process_is_refused(kind: str) -> None:
    source = json.loads(_line(kind, rank=1, attempt=2))
    late = {"step": 10_000, "monotonic_s": source["monotonic_s"] + 9000.0, "timestamp": "2025-10-09T12:00:00+00:00"}
    ledger = _read([*LINES, _changed(_line(kind, rank=1, attempt=2), **late)])
    assert_matches(ledger, JOB)
    assert ledger.facts.quality["refused_outside_life"] == 1


def test_an_attempt_that_one_line_alone_names_and_that_never_started_is_none() -> None:
    ledger = _read([*LINES, _changed(_line(EventKind.RESTORE_STARTED, rank=1, attempt=1), attempt=10**6)])
    assert_matches(ledger, JOB)
    assert len(ledger.timings) == 3
    assert ledger.facts.quality["refused_outside_life"] == 1


@pytest.mark.parametrize("rank", [4, 10**6])
def test_ranks_beyond_the_size_of_their_attempt_are_refused_with_all_they_wrote(rank: int) -> None:
    wrong = [_changed(line, rank=rank) for line, event in zip(LINES, JOB.events, strict=True) if event.rank == 3]
    lost = _changed(_line(EventKind.WORKER_LOST, rank=-1, attempt=0), event_type="checkpoint_failed", rank=rank)
    ledger = _read([*LINES, *wrong, lost])
    assert_matches(ledger, JOB)
    assert ledger.facts.quality["refused_rank"] == len(wrong) + 1
    assert len(ledger.facts.marks) == len(_read(LINES).facts.marks)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rank": 1.5}, "bad_values"),
        ({"rank": -2}, "bad_values"),
        ({"rank": "first"}, "bad_values"),
        ({"attempt": None}, "bad_values"),
        ({"event_type": 7}, "bad_values"),
        ({"timestamp": None}, "bad_times"),
    ],
)
def test_a_line_that_does_not_fit_the_schema_is_refused(change: dict[str, Any], reason: str) -> None:
    for kind in (EventKind.STEP, EventKind.CHECKPOINT_STARTED):
        ledger = _read([*LINES, _changed(_line(kind, rank=1, attempt=1), **change)])
        assert_matches(ledger, JOB)
        assert ledger.facts.quality == {reason: 1}


def test_the_report_names_what_was_refused_in_one_line(tmp_path: Path) -> None:
    wrong = [
        _changed(_line(EventKind.STEP, rank=1, attempt=0), attempt=2),
        _changed(_line(EventKind.STEP, rank=1, attempt=0), rank=9),
        _changed(_line(EventKind.STEP, rank=1, attempt=0), step=-1),
        _changed(_line(EventKind.JOB_STARTED, rank=1, attempt=0), timestamp=None),
    ]
    (tmp_path / "job.jsonl").write_bytes(b"\n".join([*LINES, *wrong]) + b"\n")
    page = tmp_path / "page.html"
    told = (
        "Refused lines, which do not count: 1 with a kind, attempt, rank or step that cannot be, 1 without a time,"
        " 1 from outside the life of their process, 1 of a rank beyond the size of the job."
    )
    table = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(page)])
    assert told in " ".join(table.output.split())
    assert told in page.read_text()
    (run,) = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).output)["runs"]
    assert told in run["notes"]
    assert run["quality"] == {"bad_values": 1, "bad_times": 1, "refused_outside_life": 1, "refused_rank": 1}


def test_a_line_of_a_new_attempt_is_refused_until_that_attempt_starts_and_afterwards() -> None:
    """As ``watch`` reads: the account is made between two lines."""
    job = Job()
    job.start()
    job.steps(10)
    for rank in range(4):
        job.emit(EventKind.CHECKPOINT_STARTED, rank, step=10, stall_s=0.1)
    job.fail(detection=2.0)
    seen = len(job.events)
    job.start(load=10)
    job.steps(5)
    job.finish()
    lines = [event.to_json().encode() + b"\n" for event in job.events]
    reader = LogReader()
    stray = {**json.loads(lines[seen - 2]), "attempt": 1}
    reader._block(b"".join([*lines[:seen], json.dumps(stray).encode() + b"\n"]))
    assert len(account(reader.collector.runs["job"]).timings) == 1
    reader._block(lines[seen])  # the start of a process
    assert len(account(reader.collector.runs["job"]).timings) == 2
    reader._block(b"".join(lines[seen + 1 :]))
    ledger = account(reader.collector.runs["job"])
    assert len(ledger.timings) == 2
    assert ledger.facts.quality["refused_outside_life"] == 1
    assert_matches(ledger, job)


def test_spans_from_before_the_start_is_logged_are_not_refused() -> None:
    """They are kept until there is a log; a process that no launcher started does not tell when it began."""
    job = Job(ranks=1)
    job.attempt, job.alive = 0, 1
    job.emit(EventKind.SPAN_STARTED, 0, span="check of the data")
    job.advance(60.0, Bucket.FIRST_START)
    job.emit(EventKind.SPAN_ENDED, 0, span="check of the data", span_s=60.0)
    job.advance(5.0, Bucket.FIRST_START)
    job.attempt = -1
    job.start()
    job.steps(10)
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert summarize(ledger)["spans"][0]["total_s"] == 60.0
    assert "refused_outside_life" not in ledger.facts.quality


def test_a_process_that_dies_at_once_is_an_attempt_of_one_line() -> None:
    job = Job(ranks=1)
    job.start()
    job.steps(10)
    job.fail(detection=1.0)
    job.attempt += 1
    job.emit(EventKind.JOB_STARTED, 0, world_size=1)
    job.advance(5.0, Bucket.RESTART)
    job.start(load=10)
    job.steps(5)
    job.finish()
    assert len(job.ledger().timings) == 3


def test_the_account_of_a_run_changes_nothing_in_it() -> None:
    job = Job(skew={"host-1": 3600.0})
    job.start()
    job.steps(10)
    collector = Collector()
    for event in job.events:
        collector.add(event)
    first, second = (account(collector.runs["job"]) for _ in range(2))
    assert first.wall == second.wall
    assert first.facts.quality == second.facts.quality
    assert first.offsets == second.offsets != {}
