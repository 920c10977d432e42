"""A restart in its parts, scripted with known truth."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from resiliency.events import Event, EventKind
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.summary import summarize
from resiliency.goodput.table import print_report
from resiliency.goodput.taxonomy import Bucket

from .scripted import START, Job

#: Seconds of each part of the scripted restart.
TRUTH = {
    StartPart.RANKS_END: 3.0,
    StartPart.PROCESSES: 2.0,
    StartPart.IMPORTS: 5.0,
    StartPart.GROUP: 4.0,
    StartPart.AGENT: 4.0,
    StartPart.MODEL: 2.0,
    StartPart.FIRST_BATCH: 1.5,
}


def _launcher(job: Job, kind: str, **fields: Any) -> None:
    event = Event(
        kind=kind,
        time=job.now,
        monotonic_s=job.now - START + 1000.0,
        run=job.run,
        attempt=max(job.attempt, 0),
        rank=-1,
        host="host-0",
        fields=fields,
    )
    job.events.append(event)


def _start(job: Job, *, load: int | None, marks: bool = True, told_apart: bool = False) -> None:
    """A start by a launcher, whose ranks take the times of TRUTH from there on."""
    bucket = Bucket.FIRST_START if job.attempt < 0 else Bucket.RESTART
    _launcher(job, EventKind.RANKS_STARTED, count=4, kept=0)
    job.alive, job.training = job.ranks, False
    spent = {part: TRUTH[part] for part in (StartPart.PROCESSES, StartPart.IMPORTS, StartPart.GROUP)}
    for seconds in spent.values():
        job.advance(seconds, bucket)
    job.advance(TRUTH[StartPart.AGENT], bucket)
    job.attempt += 1
    opening = TRUTH[StartPart.AGENT]
    ages = {
        "opening_s": opening,
        "since_callback_s": opening + TRUTH[StartPart.GROUP],
        "since_process_s": opening + TRUTH[StartPart.GROUP] + TRUTH[StartPart.IMPORTS],
    }
    if told_apart:
        ages |= {"imports_s": 3.5, "since_group_s": opening + 2.5, "group_s": 1.5}
    for rank in range(job.ranks):
        job.emit(EventKind.JOB_STARTED, rank, world_size=job.ranks, **(ages if marks else {}))
    job.advance(TRUTH[StartPart.MODEL], bucket)
    if load is not None:
        for rank in range(job.ranks):
            job.emit(EventKind.RESTORE_STARTED, rank)
        job.advance(7.0, Bucket.RESTORE)
        for rank in range(job.ranks):
            job.emit(EventKind.CHECKPOINT_LOADED, rank, step=load, duration_s=7.0, source="local")
        job.step = load
        job.advance(TRUTH[StartPart.FIRST_BATCH], bucket)
    for rank in range(job.ranks):
        job.emit(EventKind.TRAIN_STARTED, rank, step=job.step, world_size=job.ranks)
    job.training = True


def _job(*, marks: bool = True, told_apart: bool = False) -> Job:
    job = Job()
    _launcher(job, EventKind.LAUNCHER_STARTED)
    job.advance(9.0, Bucket.FIRST_START)
    _start(job, load=None, marks=marks, told_apart=told_apart)
    job.steps(50)
    job.save()
    job.steps(5, lost=True)
    job.fail(detection=2.0)
    job.advance(TRUTH[StartPart.RANKS_END], Bucket.RESTART)
    _start(job, load=50, marks=marks, told_apart=told_apart)
    job.steps(50)
    job.finish()
    return job


def test_a_restart_is_split_into_its_parts_which_sum_to_it() -> None:
    ledger = _job().ledger()
    parts = ledger.start_parts(Bucket.RESTART)
    assert {part: wall / 1e6 for part, (wall, _) in parts.items()} == TRUTH
    assert sum(wall for wall, _ in parts.values()) == ledger.wall[Bucket.RESTART]
    assert sum(gpu for _, gpu in parts.values()) == ledger.gpu[Bucket.RESTART]


def test_imports_are_told_from_the_script_and_the_process_group_from_the_trainer() -> None:
    ledger = _job(told_apart=True).ledger()
    parts = {part: wall / 1e6 for part, (wall, _) in ledger.start_parts(Bucket.RESTART).items()}
    finer = {StartPart.IMPORTS: 3.5, StartPart.SCRIPT: 1.5, StartPart.GROUP: 2.5, StartPart.RENDEZVOUS: 1.5}
    assert parts == {**TRUTH, **finer}
    labels = {row["part"]: row["label"] for row in _restart_row(summarize(ledger))["parts"]}
    assert (labels["imports"], labels["script"]) == ("imports", "script")
    assert (labels["group"], labels["rendezvous"]) == ("trainer", "process group")


def _restart_row(summary: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in summary["buckets"] if row["bucket"] == "restart")


def test_an_absurd_time_of_imports_stays_within_the_start() -> None:
    job = _job(told_apart=True)
    for event in job.events:
        if event.kind == EventKind.JOB_STARTED:
            event.fields["imports_s"] = 1e6  # type: ignore[index]
    parts = job.ledger().start_parts(Bucket.RESTART)
    assert parts[StartPart.IMPORTS][0] == 5_000_000 and StartPart.SCRIPT not in parts


def test_the_account_begins_with_the_launcher() -> None:
    job = _job()
    ledger = job.ledger()
    assert ledger.start == START
    # The launcher's own start, its ranks' processes, and what follows but for a checkpoint.
    first = 9.0 + sum(TRUTH.values()) - TRUTH[StartPart.RANKS_END] - TRUTH[StartPart.FIRST_BATCH]
    assert ledger.wall[Bucket.FIRST_START] / 1e6 == first
    parts = {part: wall / 1e6 for part, (wall, _) in ledger.start_parts(Bucket.FIRST_START).items()}
    assert parts[StartPart.PROCESSES] == 9.0 + TRUTH[StartPart.PROCESSES]
    assert parts[StartPart.IMPORTS] == TRUTH[StartPart.IMPORTS]


def test_what_a_log_without_the_marks_does_not_split_is_said() -> None:
    ledger = _job(marks=False).ledger()
    parts = {part: wall / 1e6 for part, (wall, _) in ledger.start_parts(Bucket.RESTART).items()}
    assert parts[StartPart.RANKS_END] == TRUTH[StartPart.RANKS_END]
    assert StartPart.OTHER in parts and StartPart.IMPORTS not in parts
    assert sum(parts.values()) == ledger.wall[Bucket.RESTART] / 1e6


def test_parts_are_in_the_table_and_in_json() -> None:
    summary = summarize(_job().ledger())
    rows = {row["bucket"]: row["parts"] for row in summary["buckets"]}
    assert [part["part"] for part in rows["restart"]] == [part.value for part in TRUTH]
    assert not any(parts for name, parts in rows.items() if name not in ("restart", "first_start"))
    text = io.StringIO()
    print_report([summary], Console(file=text, width=120))
    assert "other ranks end" in text.getvalue() and "imports and script" in text.getvalue()
