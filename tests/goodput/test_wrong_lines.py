"""One wrong line in a log: each kind of event, each of its numbers, wrong by a little or a lot, in three places of the
file. The account stays what it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest

from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.reader import LogReader

from .scripted import START, STEP_S, Job, assert_matches

DAY_S = 86_400.0
#: By which clocks are wrong.
WRONG_S = (-20 * DAY_S, -100.0, 100.0, 7200.0, 3 * DAY_S, 2.3e9)
WRONG_SECONDS = (0.0, 100.0, 8e4, 9e8)
WRONG_COUNTS = (0, 2, 5, 9, 10**6, 10**12)


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
KINDS = sorted({event.kind for event in JOB.events})
#: What one line may move the goodput by without a word: a step of all ranks in this job of 268 s.
LITTLE = STEP_S * 4 / (4 * 268.0)
#: ... and with one in the notes: a phase of the start.
SOME = 0.04


def _read(lines: list[bytes]) -> Ledger:
    reader = LogReader()
    reader._block(b"\n".join(lines) + b"\n")
    return account(reader.collector.runs["job"])


def _wrong(record: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Each number of an event with each wrong value."""
    for name, value in record.items():
        if name == "timestamp":
            moment = datetime.fromisoformat(value).timestamp()
            for by in WRONG_S:
                yield name, datetime.fromtimestamp(moment + by, tz=timezone.utc).isoformat(timespec="microseconds")
        elif name == "monotonic_s":
            yield from ((name, value + by) for by in WRONG_S)
            yield name, 0.0
        elif name != "v" and isinstance(value, float):
            yield from ((name, one) for one in WRONG_SECONDS)
        elif name != "v" and type(value) is int:
            yield from ((name, one) for one in WRONG_COUNTS if one != value)


def _cases(kind: str) -> Iterator[tuple[int, int, str, object]]:
    """(which line, where it is read, its number, wrong value): the first, middle and last line of a kind take turns."""
    places = [number for number, event in enumerate(JOB.events) if event.kind == kind]
    chosen = (places[0], places[len(places) // 2], places[-1])
    for turn, (name, value) in enumerate(_wrong(json.loads(LINES[chosen[0]]))):
        if turn % 2 and name not in ("timestamp", "monotonic_s"):
            continue  # half of them: each case is an account of its own
        number = chosen[turn % 3]
        if name in ("timestamp", "monotonic_s"):  # of the line itself, wrong by as much
            mine = [one for other, one in _wrong(json.loads(LINES[number])) if other == name]
            first = [one for other, one in _wrong(json.loads(LINES[chosen[0]])) if other == name]
            value = mine[first.index(value)]
        # Launchers write files of their own, which are read before those of the ranks or after them.
        moved = JOB.events[number].rank < 0 and name in ("timestamp", "monotonic_s")
        yield number, (number, 0, len(LINES) - 1)[turn % 2 + turn // 6 % 2] if moved else number, name, value


def test_the_log_without_a_wrong_line_is_the_truth() -> None:
    ledger = _read(LINES)
    assert_matches(ledger, JOB)
    assert not ledger.notes


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_line_moves_the_account_by_no_more_than_itself(kind: str) -> None:
    goodput = _read(LINES).goodput
    moved = []
    for number, place, name, value in _cases(kind):
        lines = LINES[:number] + LINES[number + 1 :]
        lines.insert(place, json.dumps({**json.loads(LINES[number]), name: value}, separators=(",", ":")).encode())
        ledger = _read(lines)
        aloud = any("Set aside" in note for note in ledger.notes)
        if abs(ledger.goodput - goodput) > (SOME if aloud else LITTLE):
            moved.append((name, value, f"line {number} read at {place}", round(ledger.goodput - goodput, 3), aloud))
    assert not moved


def test_a_launcher_that_is_read_last_with_a_wrong_clock_is_counted_aloud() -> None:
    record = {**json.loads(LINES[0]), "monotonic_s": 300_000.0}
    assert record["event_type"] == EventKind.LAUNCHER_STARTED
    ledger = _read([*LINES[1:], json.dumps(record, separators=(",", ":")).encode()])
    assert ledger.goodput == pytest.approx(_read(LINES).goodput, abs=0.001)
    assert ledger.facts.quality["clock_readings_set_aside"] == 1
    assert any(note.startswith("Set aside: 1 reading of a clock") for note in ledger.notes)


def test_a_step_that_is_read_first_with_a_wrong_stamp_is_no_process_of_its_own() -> None:
    """Where nothing tells the ``boot``, no other process of the host can set it aright."""
    records = [{key: value for key, value in json.loads(line).items() if key != "boot"} for line in LINES]
    number = next(n for n, event in enumerate(JOB.events) if event.kind == EventKind.STEP)
    first = {**records.pop(number), "timestamp": "1970-01-01T00:01:40.000000+00:00"}
    lines = [json.dumps(record, separators=(",", ":")).encode() for record in [first, *records]]
    assert _read(lines).goodput == pytest.approx(_read(LINES).goodput, abs=LITTLE)


@pytest.mark.parametrize(("name", "value"), [("attempt", 10**6), ("rank", 4), ("rank", 10**6)])
def test_an_attempt_or_rank_that_one_line_alone_names_is_none(name: str, value: int) -> None:
    number = next(n for n, e in enumerate(JOB.events) if e.kind == EventKind.JOB_STARTED and e.attempt == 1)
    record = {**json.loads(LINES[number]), name: value}
    ledger = _read([*LINES[:number], json.dumps(record, separators=(",", ":")).encode(), *LINES[number + 1 :]])
    assert len(ledger.timings) == 3 and ledger.capacity == 4
    assert ledger.goodput == pytest.approx(_read(LINES).goodput, abs=0.001)
    assert any(note.startswith("Set aside: 1 line with the number of") for note in ledger.notes)


def test_a_line_of_a_new_attempt_is_believed_when_it_is_the_start_of_a_process() -> None:
    """As ``watch`` reads: the account is made between two lines."""
    job = Job()
    job.start()
    job.steps(10)
    job.fail(detection=1.0)
    seen = len(job.events)
    job.start(load=10)
    job.steps(5)
    job.finish()
    lines = [event.to_json().encode() + b"\n" for event in job.events]
    reader = LogReader()
    stray = json.loads(lines[seen - 10])
    reader._block(b"".join([*lines[:seen], json.dumps({**stray, "attempt": 1}).encode() + b"\n"]))
    assert len(account(reader.collector.runs["job"]).timings) == 1
    reader._block(lines[seen])  # the start of a process
    assert len(account(reader.collector.runs["job"]).timings) == 2
    reader._block(b"".join(lines[seen + 1 :]))
    ledger = account(reader.collector.runs["job"])
    assert len(ledger.timings) == 2
    assert ledger.facts.quality["lines_set_aside"] == 1  # the stray one
    assert_matches(ledger, job)


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


def test_the_account_of_a_run_is_the_same_when_it_is_made_again() -> None:
    """Of a host without ranks, one line lies far from everything, which the first account sets aside."""
    record = {"event_type": EventKind.AGENT_STARTED, "timestamp": 4_080_000_000.0, "monotonic_s": 0.0}
    record |= {"job_name": "job", "attempt": 2, "rank": -1, "host": "elsewhere"}
    reader = LogReader()
    reader._block(b"\n".join([*LINES, json.dumps(record).encode()]) + b"\n")
    first, second = (account(reader.collector.runs["job"]) for _ in range(2))
    assert first.wall == second.wall
    assert first.goodput == pytest.approx(_read(LINES).goodput, abs=0.001)


def test_the_size_that_one_line_of_a_rank_tells_is_not_that_of_the_job() -> None:
    """Of one rank, whose start tells another one."""
    job = Job(ranks=1)
    job.start()
    job.steps(10)
    wrong = next(one for one in job.events if one.kind == EventKind.TRAIN_STARTED)
    job.events[job.events.index(wrong)] = dataclasses.replace(wrong, fields={"world_size": 1000})
    assert job.ledger().capacity == 1


def test_the_only_line_of_a_process_is_placed_by_the_clock_of_its_boot() -> None:
    """Both ranks of the host died after one line, so that one word is against another; later attempts decide."""
    job = Job(ranks=2, ranks_per_host=2)
    job.now += 5000.0
    job.attempt = 0
    for rank in range(2):
        job.emit(EventKind.JOB_STARTED, rank, world_size=2, boot="a")
    job.events[0] = dataclasses.replace(job.events[0], monotonic_s=0.0)
    job.now += 60.0
    job.start()
    job.steps(20)
    for place, event in enumerate(job.events):
        if event.kind == EventKind.JOB_STARTED:
            job.events[place] = dataclasses.replace(event, fields={**event.fields, "boot": "a"})
    ledger = job.ledger()
    assert ledger.wall_us == pytest.approx(130e6, abs=1e6)
    assert ledger.facts.quality["clock_readings_set_aside"] == 1


def test_a_start_with_a_wrong_attempt_is_missed_by_the_process_whose_clock_was_set_back() -> None:
    job = Job()
    job.start()
    start = next(one for one in job.events if one.kind == EventKind.JOB_STARTED and one.rank == 3)
    job.events[job.events.index(start)] = dataclasses.replace(start, attempt=3)
    job.skew["host-3"] = -30.0
    job.steps(30)
    job.finish()
    ledger = job.ledger()
    assert len(ledger.timings) == 1
    assert ledger.facts.quality["lines_set_aside"] == 1


def test_a_size_that_one_line_alone_tells_is_not_that_of_the_job() -> None:
    """The line is all that an attempt has written: no other one of it can say how large it was."""
    job = Job()
    job.start()
    job.steps(10)
    job.fail(detection=1.0)
    job.attempt += 1
    job.emit(EventKind.JOB_STARTED, 0, world_size=1000)
    job.advance(5.0, Bucket.RESTART)
    job.start(load=10)
    job.steps(5)
    job.finish()
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert len(ledger.timings) == 3
    assert any(note == "Set aside: 1 size of the job that nothing else bears out." for note in ledger.notes)


def test_a_size_that_two_ranks_tell_is_that_of_the_job() -> None:
    job = Job(ranks=8)
    job.start(ranks=4)
    job.steps(10)
    job.fail(detection=1.0)
    job.attempt += 1
    for rank in range(2):
        job.emit(EventKind.JOB_STARTED, rank, world_size=8)
    job.advance(5.0, Bucket.RESTART)
    job.start(load=10, ranks=4)
    job.steps(5)
    job.finish()
    ledger = job.ledger()
    assert ledger.capacity == 8
    assert "sizes_set_aside" not in ledger.facts.quality


@pytest.mark.parametrize("is_stamp", [True, False])
def test_the_only_line_of_the_only_process_of_a_host_lies_between_the_attempts_around_it(is_stamp: bool) -> None:
    """Nobody of its attempt has its clocks; its boot and the attempts before and after tell which one is wrong."""
    job = Job(ranks=2)
    job.start()
    job.steps(20)
    job.fail(detection=1.0)
    job.attempt += 1
    wrong = len(job.events) + 1
    for rank in range(2):
        job.emit(EventKind.JOB_STARTED, rank, world_size=2)
    job.advance(10.0, Bucket.RESTART)
    job.start(load=20)
    job.steps(20)
    records = [{**json.loads(one.to_json()), "boot": f"boot of {one.host}"} for one in job.events]
    if is_stamp:
        records[wrong]["timestamp"] = "2025-10-05T00:00:00+00:00"
    else:
        records[wrong]["monotonic_s"] += 900_000.0
    ledger = _read([json.dumps(one, separators=(",", ":")).encode() for one in records])
    assert len(ledger.timings) == 3
    assert ledger.wall_us == pytest.approx((job.now - START) * 1e6, abs=1e6)
    assert ledger.facts.quality["clock_readings_set_aside"] == 1
