"""Logs as they really are: skewed, doubled, cut, shuffled, overlapping. The account stays right and says what it met."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

import resiliency.goodput.incidents
from resiliency.events import Event, EventKind
from resiliency.goodput.incidents import incidents
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.summary import summarize
from resiliency.goodput.table import largest_causes, print_report
from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.reader import LogReader

from .scripted import START, STEP_S, Job, assert_matches
from .test_ledger_truth import crash


def read(*files: Path) -> LogReader:
    reader = LogReader()
    reader.read(files)
    return reader


def only(reader: LogReader) -> Ledger:
    (run,) = reader.collector.runs.values()
    return account(run)


def gpu_s(ledger: Ledger, bucket: Bucket) -> float:
    return ledger.gpu[bucket] / 1e6


# ---- stragglers


def slow_rank_that_nobody_waits_for_inside_the_step() -> Job:
    """Rank 2 computes 2.5 s, the others 2 s; they wait between their steps."""
    job = Job()
    job.start()
    for _ in range(100):
        job.step += 1
        job.advance(STEP_S, Bucket.PRODUCTIVE)
        job.advance(0.5, Bucket.STRAGGLER)
        for rank in range(4):
            slow = 0.0 if rank == 2 else 0.5
            job.emit(
                EventKind.STEP,
                rank,
                step=job.step,
                at=job.now - slow,
                step_s=STEP_S + 0.5 - slow,
                data_wait_s=0.0,
                stall_s=0.0,
                save_in_flight=False,
            )
    job.finish()
    return job


def slow_rank_that_everyone_waits_for_inside_the_step() -> Job:
    """Rank 2 works 1.5 s before the first collective, the others 1 s; all step times are equal."""
    job = Job()
    job.start()
    for _ in range(100):
        job.step += 1
        job.advance(STEP_S, Bucket.PRODUCTIVE)
        job.advance(0.5, Bucket.STRAGGLER)
        for rank in range(4):
            job.emit(
                EventKind.STEP,
                rank,
                step=job.step,
                step_s=STEP_S + 0.5,
                data_wait_s=0.0,
                stall_s=0.0,
                save_in_flight=False,
                busy_s=1.5 if rank == 2 else 1.0,
            )
    job.finish()
    return job


def slow_loader_that_everyone_waits_for() -> Job:
    """Rank 2 waits 0.5 s for each batch; the collective makes the others wait for rank 2."""
    job = Job()
    job.start()
    for _ in range(100):
        job.step += 1
        job.advance(STEP_S, Bucket.PRODUCTIVE)
        job.now += 0.5
        job.truth[Bucket.DATA_WAIT] += 0.5
        job.truth[Bucket.STRAGGLER] += 1.5
        for rank in range(4):
            job.emit(
                EventKind.STEP,
                rank,
                step=job.step,
                step_s=STEP_S + 0.5,
                data_wait_s=0.5 if rank == 2 else 0.0,
                stall_s=0.0,
                save_in_flight=False,
            )
    job.finish()
    return job


@pytest.mark.parametrize(
    "script",
    [
        slow_rank_that_nobody_waits_for_inside_the_step,
        slow_rank_that_everyone_waits_for_inside_the_step,
        slow_loader_that_everyone_waits_for,
    ],
    ids=lambda script: script.__name__,
)
def test_the_slow_rank_is_named_with_its_cost(script: object) -> None:
    job = script()  # type: ignore[operator]
    ledger = job.ledger()
    assert_matches(ledger, job)
    blamed = ledger.late[0].blamed
    assert list(blamed) == [2]
    assert blamed[2] == pytest.approx(200.0, rel=0.02), "0.5 s x 4 ranks x 100 steps"


# ---- clocks


def test_skewed_clocks_between_hosts_are_found_and_taken_out(tmp_path: Path) -> None:
    straight = crash()
    job = Job(skew={"host-1": 47.0, "host-3": -13.0})
    job.start(startup=40)
    job.steps(100)
    job.save()
    job.steps(30, lost=True)
    job.fail(detection=3)
    job.advance(20, Bucket.RESTART)
    job.start(startup=10, restore=15, load=100)
    job.steps(80)
    job.finish()
    job.write(tmp_path)
    ledger = job.read(tmp_path)
    assert_matches(ledger, straight)
    assert ledger.offsets == pytest.approx({"host-1": 47.0, "host-3": -13.0}, abs=0.1)


def test_two_hosts_take_the_clock_of_the_lower_rank() -> None:
    job = Job(ranks=2, skew={"host-1": 500.0})
    job.start()
    job.steps(50)
    job.finish()
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert ledger.start == START


def test_a_clock_set_during_the_run_does_not_tear_the_account() -> None:
    job = Job(ranks=1)
    job.start()
    job.steps(50)
    job.skew["host-0"] = -3600.0
    job.steps(50)
    job.finish()
    assert_matches(job.ledger(), job)


# ---- copies, order, cuts


def test_copies_of_lines_and_of_whole_files_change_nothing(tmp_path: Path) -> None:
    job = crash()
    job.write(tmp_path)
    files = sorted(tmp_path.glob("*.jsonl"))
    for file in files:
        lines = file.read_text().splitlines(keepends=True)
        doubled = [line for line in lines for _ in range(2)]
        file.write_text("".join(doubled))
    copy = tmp_path / "zz-copy-of-rank-00001.jsonl"
    copy.write_bytes((tmp_path / "rank-00001.jsonl").read_bytes())
    reader = read(*files, copy)
    ledger = only(reader)
    assert_matches(ledger, job)
    assert ledger.gpu == job.ledger().gpu
    steps = sum(1 for event in job.events if event.kind == EventKind.STEP)
    assert ledger.facts.quality["duplicates"] >= steps + 200


@pytest.mark.parametrize("form", ["keys in another order", "an export", "entries"])
def test_copies_in_another_form_change_nothing(form: str, tmp_path: Path) -> None:
    """The log of a run beside what was sent to Cloud Logging, which has its own order of keys, and only floats."""
    job = crash()
    for event in job.events:
        if event.kind == EventKind.JOB_STARTED:
            event.fields["logs"] = ["/var/log/a.out"]  # type: ignore[index]
    job.step = 60
    job.emit(EventKind.CHECKPOINT_STARTED, 0, step=60, stall_s=1.0, at=START + 200.0)
    lines = [event.to_json() for event in sorted(job.events, key=lambda event: event.time)]
    (tmp_path / "job.jsonl").write_text("\n".join(lines) + "\n")
    once = read(tmp_path / "job.jsonl").collector.runs["job"]
    events = [
        {key: float(value) if isinstance(value, int) else value for key, value in sorted(json.loads(line).items())}
        for line in lines
    ]
    entries = [{"jsonPayload": event, "insertId": str(number)} for number, event in enumerate(events)]
    if form == "an export":
        (tmp_path / "export.json").write_text(json.dumps(entries[::-1], indent=2))
    else:
        copies = entries if form == "entries" else events
        (tmp_path / "copies.jsonl").write_text("".join(json.dumps(one) + "\n" for one in copies))
    twice = read(*sorted(tmp_path.iterdir(), reverse=True)).collector.runs["job"]
    assert twice.kinds == once.kinds
    assert twice.tiers == once.tiers
    assert account(twice).gpu == account(once).gpu


def test_out_of_order_lines_are_put_in_their_place(tmp_path: Path) -> None:
    job = crash()
    job.write(tmp_path)
    rng = random.Random(7)
    files = sorted(tmp_path.glob("*.jsonl"))
    for file in files:
        lines = file.read_text().splitlines(keepends=True)
        for start in range(0, len(lines) - 4, 4):
            block = lines[start : start + 4]
            rng.shuffle(block)
            lines[start : start + 4] = block
        file.write_text("".join(lines))
    ledger = only(read(*files))
    assert_matches(ledger, job)
    assert ledger.facts.quality["late_lines"] > 100


def test_lines_cut_in_the_middle_lose_only_themselves(tmp_path: Path) -> None:
    job = crash()
    job.write(tmp_path)
    file = tmp_path / "rank-00003.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[50] = lines[50][: len(lines[50]) // 2] + "\n"
    file.write_text("".join(lines) + '{"timestamp":"2025-10-09T0')
    reader = read(*sorted(tmp_path.glob("*.jsonl")))
    assert_matches(only(reader), job)
    assert reader.torn_lines == 2


def test_garbage_is_counted_and_never_raises(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    lines: list[bytes] = [
        b"\xff\xfe not json",
        b"[1, 2, 3]",
        b'"text"',
        b"{}",
        b'{"event_type": 5, "job_name": null}',
        b'{"event_type": "step", "timestamp": "yesterday"}',
        b'{"event_type": "step", "timestamp": 1e400, "rank": 0, "step": 1}',
        b'{"event_type": "step", "timestamp": 1760000000, "rank": -1, "step": 1}',
        b'{"event_type": "step", "timestamp": 1760000000, "rank": 0, "step": 1, "step_s": NaN, "count": 1e30}',
        b'{"event_type": "job_started", "timestamp": 1760000000, "rank": 0, "world_size": 1e15}',
        b'{"event_type": "no_such_event", "timestamp": "2025-10-09T08:53:20Z"}',
        b"[" * 5000,
        b'{"timestamp":"2025-10-09T08:53:20","job_name":"r","event_type":"step","v":1,"monotonic_s":1.2.3,"attempt":0,"rank":0,'
        b'"host":"h","step":5,"step_s":1..2,"data_wait_s":0,"stall_s":0,"save_in_flight":false}',
    ]
    file.write_bytes(b"\n".join(lines) + b"\n")
    reader = read(file)
    for run in reader.collector.runs.values():
        ledger = account(run)
        assert sum(ledger.wall.values()) == ledger.wall_us
    assert reader.torn_lines >= 2
    assert reader.foreign_lines >= 3


def test_a_line_still_being_written_is_left_for_the_next_read(tmp_path: Path) -> None:
    job = crash()
    text = "".join(event.to_json() + "\n" for event in job.events)
    file = tmp_path / "all.jsonl"
    reader = LogReader()
    rng = random.Random(3)
    position = 0
    while position < len(text):
        position = min(len(text), position + rng.randrange(1, 20_000))
        file.write_text(text[:position])
        reader.read([file], final=False)
    assert reader.torn_lines == 0
    assert_matches(only(reader), job)


def test_steps_that_claim_more_than_there_was_are_cut_to_size() -> None:
    """A writer that counts double: 100 steps of 2 s claim 5 s each."""
    job = Job(ranks=1)
    job.start()
    for _ in range(100):
        job.step += 1
        job.now += STEP_S
        job.emit(EventKind.STEP, 0, step=job.step, step_s=5.0, data_wait_s=1.0, stall_s=0.0, save_in_flight=False)
    job.finish()
    ledger = job.ledger()
    assert sum(ledger.wall.values()) == ledger.wall_us == 230_000_000
    assert gpu_s(ledger, Bucket.PRODUCTIVE) == pytest.approx(160, abs=1)
    assert gpu_s(ledger, Bucket.DATA_WAIT) == pytest.approx(40, abs=1)


# ---- attempts


def test_two_jobs_in_one_file_get_an_account_each(tmp_path: Path) -> None:
    one = crash()
    two = Job(run="other", ranks=2, now=START + 100)
    two.start(startup=10)
    two.steps(40)
    two.finish()
    events = sorted(one.events + two.events, key=lambda event: event.time)
    file = tmp_path / "both.jsonl"
    file.write_text("".join(event.to_json() + "\n" for event in events))
    reader = read(file)
    assert sorted(reader.collector.runs) == ["job", "other"]
    assert_matches(account(reader.collector.runs["job"]), one)
    assert_matches(account(reader.collector.runs["other"]), two)


def test_attempt_numbers_that_start_over_are_still_attempts() -> None:
    job = crash()
    events = [Event(**{**_as_dict(event), "attempt": 0}) for event in job.events]
    collector = Collector()
    for event in events:
        collector.add(event)
    ledger = account(collector.runs["job"])
    assert_matches(ledger, job)
    assert len(ledger.timings) == 2


def _as_dict(event: Event) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__dataclass_fields__}


def test_overlapping_attempts_count_each_second_once() -> None:
    """Rank 3 of the old attempt lives on as a zombie for 30 s while the new attempt already trains."""
    job = Job()
    job.start(startup=40)
    job.steps(50)
    job.save()
    job.fail(detection=5, worker=0)
    zombie_from, zombie_step = job.now, job.step
    job.start(startup=10, restore=5, load=50)
    job.steps(50)
    job.finish()
    number = job.attempt
    job.attempt = 0
    for extra in range(1, 16):
        job.emit(
            EventKind.STEP,
            3,
            step=zombie_step + extra,
            at=zombie_from + extra * STEP_S,
            step_s=STEP_S,
            data_wait_s=0.0,
            stall_s=0.0,
            save_in_flight=False,
        )
    job.attempt = number
    ledger = job.ledger()
    assert sum(ledger.gpu.values()) == ledger.capacity * ledger.wall_us
    assert abs(gpu_s(ledger, Bucket.PRODUCTIVE) - 800) < 40
    assert gpu_s(ledger, Bucket.RESTORE) == pytest.approx(20)


def test_steps_of_a_zombie_after_the_next_start_are_neither_kept_nor_lost() -> None:
    """20 steps are lost; rank 3 goes on alone for 60 more, most of them while the next attempt trains."""
    job = Job()
    job.start()
    job.steps(80)
    job.save()
    job.steps(20, lost=True)
    zombie_from, zombie_step = job.now, job.step
    job.fail(detection=5, worker=0)
    job.start(startup=10, restore=5, load=80)
    job.steps(100)
    job.finish()
    job.attempt = 0
    for extra in range(1, 61):
        at = zombie_from + 5.5 + extra * STEP_S
        job.emit(EventKind.STEP, 3, step=zombie_step + extra, at=at, step_s=STEP_S)
    ledger = job.ledger()
    assert_matches(ledger, job)
    (incident,) = [one for one in incidents(ledger) if one.ended_attempt]
    assert incident.lost_steps == 20
    assert abs(ledger.goodput - 360 / 450) < 0.003


@pytest.mark.parametrize("number", [-1, "-1", 2.5, "second", True])
def test_an_attempt_that_is_no_number_is_refused_and_counted(number: object) -> None:
    collector = Collector()
    job = crash()
    for event in job.events:
        collector.add(event)
    for kind in (EventKind.JOB_STARTED, EventKind.STEP, EventKind.WORKER_LOST):
        record = {"timestamp": START + 100.0, "job_name": "job", "event_type": kind, "rank": 0, "step": 20}
        collector.add({**record, "attempt": number})
    ledger = account(collector.runs["job"])
    assert_matches(ledger, job)
    assert len(ledger.timings) == 2
    assert ledger.facts.quality["bad_values"] == 3


def test_a_crash_without_any_notice_is_restart_and_says_so() -> None:
    job = crash()
    job.events = [event for event in job.events if event.kind != EventKind.WORKER_LOST]
    ledger = job.ledger()
    assert gpu_s(ledger, Bucket.DETECTION) == 0
    assert gpu_s(ledger, Bucket.RESTART) == pytest.approx((3 + 20 + 10) * 4, abs=8)
    assert any("noticed" in note for note in ledger.notes)


def test_a_job_without_an_end_is_open_and_counts_to_now_when_asked() -> None:
    job = Job()
    job.start()
    job.steps(50)
    ledger = job.ledger()
    assert ledger.end == job.now
    assert any("no end" in note for note in ledger.notes)
    collector = Collector()
    for event in job.events:
        collector.add(event)
    later = account(collector.runs["job"], until=job.now + 1000)
    assert gpu_s(later, Bucket.UNKNOWN) == pytest.approx(4000, abs=1)
    assert gpu_s(later, Bucket.PRODUCTIVE) == gpu_s(ledger, Bucket.PRODUCTIVE)


def test_time_between_a_finished_attempt_and_the_next_is_idle() -> None:
    job = Job()
    job.start()
    job.steps(50)
    job.finish()
    job.advance(5000, Bucket.IDLE)
    job.start(startup=10, restore=5, load=50)
    job.steps(50)
    job.finish()
    assert_matches(job.ledger(), job)


def test_a_rank_that_rejoins_a_running_job_is_missing_capacity() -> None:
    job = Job()
    job.start()
    job.steps(50)
    job.steps(30, silent=[3])
    job.emit(EventKind.JOB_STARTED, 3, at=job.now - 20, world_size=4)
    job.emit(EventKind.TRAIN_STARTED, 3, step=job.step)
    job.steps(50)
    job.finish()
    ledger = job.ledger()
    assert len(ledger.timings) == 1
    assert gpu_s(ledger, Bucket.SCALED_DOWN) == pytest.approx(60, abs=2)
    assert gpu_s(ledger, Bucket.PRODUCTIVE) == pytest.approx(130 * 4 * 2 - 60, abs=4)


def test_going_back_in_the_same_process_is_lost_work() -> None:
    """A loss spike: the trainer reloads step 40 at step 60 without restarting."""
    job = Job()
    job.start()
    job.steps(40)
    job.save()
    job.steps(20, lost=True)
    job.training = False
    for rank in range(4):
        job.emit(EventKind.RESTORE_STARTED, rank, at=job.now + 0.001)
    job.advance(8, Bucket.RESTORE)
    for rank in range(4):
        job.emit(EventKind.CHECKPOINT_LOADED, rank, step=40, duration_s=8.0)
    job.training, job.step = True, 40
    job.steps(60)
    job.finish()
    assert_matches(job.ledger(), job)


def test_ranks_without_a_log_copy_the_one_that_has_one() -> None:
    job = crash()
    job.events = [event for event in job.events if event.rank <= 0]
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert any("no log of their own" in note for note in ledger.notes)


def test_aggregated_steps_give_the_same_account() -> None:
    job = crash()
    merged: list[Event] = []
    pending: dict[tuple[int, int], list[Event]] = {}

    def put(key: tuple[int, int]) -> None:
        group = pending.pop(key, [])
        if group:
            fields = {
                "step_s": sum(event.fields["step_s"] for event in group),
                "data_wait_s": 0.0,
                "stall_s": 0.0,
                "save_in_flight": False,
                "count": len(group),
                "step_max_s": STEP_S,
            }
            merged.append(Event(**{**_as_dict(group[-1]), "fields": fields}))

    for event in job.events:
        key = (event.attempt, event.rank)
        if event.kind == EventKind.STEP:
            pending.setdefault(key, []).append(event)
            if len(pending[key]) == 7:
                put(key)
        else:
            for waiting in list(pending):
                put(waiting)
            merged.append(event)
    collector = Collector()
    for event in merged:
        collector.add(event)
    assert_matches(account(collector.runs["job"]), job)


# ---- the older library's logs


def older(events: list[tuple[float, str, dict[str, object]]]) -> LogReader:
    reader = LogReader()
    for time, kind, fields in events:
        stamp = f"2025-04-02T{int(time // 3600):02d}:{int(time % 3600 // 60):02d}:{time % 60:09.6f}"
        line = json.dumps({"event_type": kind, "job_name": "old", "timestamp": stamp, **fields})
        reader._other(line.encode())
    return reader


def test_the_older_librarys_log_gives_an_account() -> None:
    events: list[tuple[float, str, dict[str, object]]] = []
    events += [(0.0, "user_scheduled", {})]
    events += [(100.0 + node, "job_started", {"node_rank": float(node)}) for node in range(4)]
    events += [(200.0, "checkpoint_loaded", {"step": 0.0})]
    events += [(200.0 + 100 * n, "checkpoint_saved", {"step": 20.0 * n}) for n in range(1, 11)]
    # After the save at 1200 s it trains on for a while, hangs, and the launchers give up at 1700 s.
    events += [(1700.0 + node, "job_terminated", {"node_rank": float(node)}) for node in range(4)]
    events += [(1760.0 + node, "job_started", {"node_rank": float(node)}) for node in range(4)]
    events += [(1860.0, "checkpoint_loaded", {"step": 200.0})]
    events += [(1860.0 + 100 * n, "checkpoint_saved", {"step": 200 + 20.0 * n}) for n in range(1, 6)]
    events += [(2360.0, "job_terminated", {"node_rank": float(node)}) for node in range(4)]
    reader = older(events)
    ledger = only(reader)
    wall = {bucket: amount / 1e6 for bucket, amount in ledger.wall.items() if amount}
    assert sum(ledger.wall.values()) == ledger.wall_us == 2360 * 1_000_000
    assert ledger.unit == "host"
    assert ledger.capacity == 4
    assert wall[Bucket.PRODUCTIVE] == pytest.approx(1500, abs=1)
    assert wall[Bucket.FIRST_START] == pytest.approx(200, abs=1)
    assert wall[Bucket.LOST_WORK] == pytest.approx(100, abs=1)
    assert wall[Bucket.DETECTION] == pytest.approx(400, abs=4)
    assert wall[Bucket.RESTART] == pytest.approx(160, abs=4)


@pytest.mark.parametrize("first_load", [True, False])
def test_saves_the_older_job_threw_away_are_lost_work(first_load: bool) -> None:
    """A job that starts afresh loads nothing: its start of training is estimated from the pace of its saves."""
    events: list[tuple[float, str, dict[str, object]]] = [(0.0, "job_started", {"node_rank": 0})]
    events += [(100.0, "checkpoint_loaded", {"step": 0})] if first_load else []
    events += [(100.0 + 100 * n, "checkpoint_saved", {"step": 20 * n}) for n in range(1, 11)]
    events += [(1100.0, "job_terminated", {"node_rank": 0}), (1200.0, "job_started", {"node_rank": 0})]
    events += [(1300.0, "checkpoint_loaded", {"step": 150})]
    events += [(1300.0 + 100 * n, "checkpoint_saved", {"step": 150 + 20 * n}) for n in range(1, 6)]
    ledger = only(older(events))
    wall = {bucket: amount / 1e6 for bucket, amount in ledger.wall.items() if amount}
    assert wall[Bucket.LOST_WORK] == pytest.approx(250, abs=2)
    assert wall[Bucket.PRODUCTIVE] == pytest.approx(750 + 500, abs=2)


def test_what_all_ranks_of_a_host_tell_is_one_incident() -> None:
    job = Job(ranks=4, ranks_per_host=2)
    job.start()
    job.steps(20)
    for rank in range(4):
        job.emit(EventKind.AGENT_LOST, rank, at=job.now + 0.01 * rank)
    job.steps(20)
    job.emit(EventKind.AGENT_LOST, 0)
    job.steps(20)
    job.finish()
    found = [incident for incident in incidents(job.ledger()) if incident.what == "Host agent lost"]
    assert [(incident.where, round(incident.time - START)) for incident in found] == [
        ("host-0", 70),
        ("host-1", 70),
        ("host-0", 110),
    ]


def test_a_death_that_only_the_agent_saw_names_its_rank_and_a_launcher_says_how() -> None:
    job = crash()
    job.events = [event for event in job.events if event.kind != EventKind.WORKER_LOST]
    last = max(event.time for event in job.events if event.attempt == 0)

    def lost(host: str, after_s: float, **fields: object) -> Event:
        return Event(
            kind=EventKind.WORKER_LOST,
            time=last + after_s,
            monotonic_s=5.0,
            run=job.run,
            attempt=0,
            rank=-1,
            host=host,
            fields={"worker": 1, **fields},
        )

    job.events.append(lost("agent", 0.25, lost_pid=7))
    (incident,) = [one for one in incidents(job.ledger()) if one.ended_attempt]
    assert (incident.what, incident.where) == ("Worker lost", "rank 1")
    assert job.ledger().wall[Bucket.DETECTION] == 250_000
    job.events.append(lost("launcher", 0.5, signal=9))
    (incident,) = [one for one in incidents(job.ledger()) if one.ended_attempt]
    assert (incident.what, incident.where) == ("Worker killed by signal 9", "rank 1")
    assert job.ledger().wall[Bucket.DETECTION] == 250_000, "the first notice counts"


@pytest.mark.parametrize("reason", ["", "out of memory"])
def test_an_end_that_was_told_is_not_without_a_word(reason: str) -> None:
    job = crash()
    job.events = [event for event in job.events if event.kind != EventKind.WORKER_LOST]
    for rank in range(4):
        job.events.append(
            Event(
                kind=EventKind.JOB_TERMINATED,
                time=START + 250.0 + 60.0,
                monotonic_s=1310.0,
                run=job.run,
                attempt=0,
                rank=rank,
                host=f"host-{rank}",
                fields={"reason": reason} if reason else {},
            )
        )
    ledger = job.ledger()
    (incident,) = [one for one in incidents(ledger) if one.ended_attempt]
    assert incident.what == (f"Ended by {reason}" if reason else "Ended, without a reason in the log")
    assert ledger.wall[Bucket.DETECTION] > 0, "it was noticed then"
    assert not ledger.notes


@pytest.mark.parametrize("reasons", [("exception", "signal"), ("signal", "exception")])
def test_ranks_that_end_in_the_same_moment_for_different_reasons_count_both(reasons: tuple[str, str]) -> None:
    job = Job(ranks=2)
    job.start()
    job.steps(30)
    job.training = False
    job.advance(2.0, Bucket.DETECTION)
    for rank, reason in enumerate(reasons):
        job.emit(EventKind.JOB_TERMINATED, rank, reason=reason)
    job.start()
    job.steps(30)
    job.finish()
    ledger = job.ledger()
    assert ledger.timings[0].outcome == "failed"
    assert [one.what for one in incidents(ledger)] == ["Ended by exception"]
    assert_matches(ledger, job)


def test_a_stall_after_the_last_step_is_a_stall() -> None:
    job = Job()
    job.start()
    job.steps(30)
    job.training = False
    for rank in range(4):
        job.emit(EventKind.TRAIN_ENDED, rank, step=30)
    job.advance(6.0, Bucket.CHECKPOINT_STALL)
    for rank in range(4):
        job.emit(EventKind.CHECKPOINT_FENCED, rank, step=30, stall_s=6.0)
    job.advance(1.0, Bucket.IDLE)
    for rank in range(4):
        job.emit(EventKind.JOB_TERMINATED, rank, reason="finished")
    assert_matches(job.ledger(), job)
    assert job.ledger().wall[Bucket.CHECKPOINT_STALL] == 6_000_000


def test_of_too_many_stalls_the_costliest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resiliency.goodput.incidents, "MOST", 2)
    job = Job()
    job.start()
    for seconds in (60.0, 20.0, 90.0):
        job.steps(40)
        job.steps(1, extra=seconds)
    job.steps(40)
    job.finish()
    took = [re.search(r"A step took (\d+) s", one.what) for one in incidents(job.ledger())]
    assert [round(float(one[1]), -1) for one in took if one] == [60, 90]


def test_another_fit_in_the_same_script_loses_nothing() -> None:
    job = Job()
    job.start()
    job.steps(30)
    for rank in range(4):
        job.emit(EventKind.TRAIN_ENDED, rank, step=30)
    job.step = 0
    job.advance(4.0, Bucket.IDLE)
    for rank in range(4):
        job.emit(EventKind.TRAIN_STARTED, rank, step=0, world_size=4)
    job.steps(30)
    job.finish()
    ledger = job.ledger()
    assert ledger.wall[Bucket.LOST_WORK] == 0
    assert ledger.wall[Bucket.PRODUCTIVE] == pytest.approx(120e6, rel=0.01)


def test_the_report_says_what_makes_the_largest_causes_smaller() -> None:
    summary = summarize(crash().ledger())
    assert [row["bucket"] for row in largest_causes(summary)] == ["lost_work", "first_start", "restart"]
    text = io.StringIO()
    print_report([summary], Console(file=text, width=200))
    assert BUCKETS[Bucket.RESTART].lever in text.getvalue()
