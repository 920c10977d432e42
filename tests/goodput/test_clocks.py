"""Clocks that are wrong, that are set, or that disagree: the account stays what it was, and says so."""

from __future__ import annotations

import dataclasses
import time

import pytest

from resiliency.events import Event, EventKind, EventWriter
from resiliency.goodput.named_spans import spans_of
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.collect import Collector

from .scripted import START, STEP_S, Job, assert_matches
from .test_ledger_truth import crash

WRONG = {"1970": 100.0, "2099": 4_080_000_000.0, "before the first time synchronisation": START - 7 * 3600.0}


def with_wrong(job: Job, kind: str, stamp: float, *, last: bool = False, **change: object) -> Job:
    """The first (or last) event of rank 1 (or of no rank) of this kind is told at ``stamp``."""
    places = [n for n, e in enumerate(job.events) if e.kind == kind and e.rank in (1, -1)]
    number = places[-1 if last else 0]
    job.events[number] = dataclasses.replace(job.events[number], time=stamp, **change)  # type: ignore[arg-type]
    return job


@pytest.mark.parametrize("stamp", list(WRONG.values()), ids=list(WRONG))
@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (EventKind.JOB_STARTED, False),
        (EventKind.JOB_STARTED, True),
        (EventKind.TRAIN_STARTED, False),
        (EventKind.STEP, False),
        (EventKind.STEP, True),
        (EventKind.CHECKPOINT_LOADED, False),
        (EventKind.JOB_TERMINATED, False),
    ],
)
def test_one_wrong_stamp_changes_nothing_and_is_counted(kind: str, last: bool, stamp: float) -> None:
    job = with_wrong(crash(), kind, stamp, last=last)
    ledger = job.ledger()
    assert_matches(ledger, job)
    if kind != EventKind.STEP:
        assert summarize(ledger)["quality"]["clock_jumps"] >= 1


@pytest.mark.parametrize("by", [-3.0, 0.7, 2.0, 4.9])
def test_a_clock_that_is_set_by_a_little_changes_nothing_and_is_counted(by: float) -> None:
    job = crash()
    trains = max(n for n, event in enumerate(job.events) if event.kind == EventKind.TRAIN_STARTED)
    for place in range(trains + 1, len(job.events)):
        job.events[place] = dataclasses.replace(job.events[place], time=job.events[place].time + by)
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert summarize(ledger)["quality"]["clock_jumps"] >= 1


def test_a_launcher_that_began_before_the_time_was_known_follows_the_ranks_of_its_host() -> None:
    job = crash()
    launcher = Event(
        kind=EventKind.LAUNCHER_STARTED,
        time=START - 7 * 3600.0,
        monotonic_s=1000.0,
        run=job.run,
        attempt=0,
        rank=-1,
        host="host-0",
    )
    job.events.insert(0, launcher)
    ledger = job.ledger()
    assert ledger.start == START
    assert_matches(ledger, job)


def test_a_clock_that_was_mended_between_two_attempts_is_corrected_where_it_was_wrong() -> None:
    job = Job(skew={"host-1": 60.0, "host-2": 60.0}, hosts={0: "host-0", 1: "host-1", 2: "host-0", 3: "host-1"})
    job.start()
    job.steps(50)
    job.save()
    job.fail(detection=2.0)
    job.skew.clear()
    job.start(load=50)
    job.steps(50)
    job.finish()
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert ledger.offsets == pytest.approx({"host-1": 60.0}, abs=0.1)


def test_the_days_of_a_suspended_machine_are_time_of_the_job() -> None:
    job = Job()
    job.start()
    job.steps(30)
    job.advance(2 * 86_400.0, Bucket.UNKNOWN)
    job.steps(30)
    job.finish()
    assert_matches(job.ledger(), job)
    seen: list[Event] = []

    class Sink:
        emit = staticmethod(seen.append)

        def close(self) -> None:
            return

    EventWriter(run="job", attempt=0, rank=0, host="h", sinks=(Sink(),)).emit("step")
    assert seen[0].monotonic_s == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0)
    assert STEP_S > 0


def mended(hosts: dict[int, str], ahead: float, *, boot: str = "boot-{host}") -> Job:
    """The clock of host-0 was wrong in the first of two attempts."""
    job = Job(skew={"host-0": ahead}, hosts=hosts)
    job.start()
    job.steps(50)
    job.save()
    job.fail(detection=2.0)
    job.skew.clear()
    job.start(load=50)
    job.steps(70)
    job.finish()
    for event in job.events:
        if event.kind == EventKind.JOB_STARTED:
            event.fields["boot"] = boot.format(host=event.host, attempt=event.attempt)  # type: ignore[index]
    return job


@pytest.mark.parametrize("ahead", [-40.0, 40.0, 3600.0, -86_400.0, -50 * 86_400.0])
@pytest.mark.parametrize("hosts", [dict.fromkeys(range(4), "host-0"), {n: f"host-{n % 2}" for n in range(4)}])
def test_a_clock_that_was_set_between_two_attempts_moves_neither(hosts: dict[int, str], ahead: float) -> None:
    """The other clock is that of the machine, for all processes on it."""
    job = mended(hosts, ahead)
    ledger = job.ledger()
    assert len(ledger.timings) == 2
    assert_matches(ledger, job)
    assert ledger.offsets == pytest.approx({"host-0": ahead}, abs=0.1)
    assert any("The clock of host-0 was" in note for note in ledger.notes)


def test_another_machine_of_the_same_name_has_another_clock() -> None:
    job = mended(dict.fromkeys(range(4), "host-0"), 0.0, boot="{attempt}")
    for number, event in enumerate(job.events):
        if event.attempt == 1:
            job.events[number] = dataclasses.replace(event, monotonic_s=event.monotonic_s + 900_000.0)
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert not ledger.offsets


@pytest.mark.parametrize("until", [40.0, 80.0, 110.0])
def test_a_clock_that_was_set_while_steps_ran_is_not_taken_for_a_difference_between_hosts(until: float) -> None:
    job = mended({n: f"host-{n % 2}" for n in range(4)}, 0.0)
    for number, event in enumerate(job.events):
        if event.host == "host-0" and event.time < START + until:
            job.events[number] = dataclasses.replace(event, time=event.time + 40.0)
    assert_matches(job.ledger(), job)


@pytest.mark.parametrize("stamp", [[], {}, None, True, 10**400, "1" * 5000], ids=lambda one: str(one)[:8])
def test_a_stamp_that_is_no_time_is_refused_and_counted(stamp: object) -> None:
    collector = Collector()
    collector.add({"timestamp": stamp, "event_type": EventKind.JOB_STARTED, "rank": 0, "attempt": 0})
    collector.add({"timestamp": START, "event_type": EventKind.STEP, "rank": 0, "attempt": None, "step": 1})
    assert collector.runs["default"].quality == {"bad_times": 1, "bad_values": 1}


@pytest.mark.parametrize("by", [0.0, -100.0], ids=["clock kept", "clock set back"])
def test_the_lines_of_a_launcher_are_by_the_boot_they_were_written_in(by: float) -> None:
    """A host is rebooted between the second and the third attempt. A launcher tells its boot in its first line, which
    is of the attempt it began with."""
    job = Job(ranks=1, hosts={-1: "host-0"})
    job.emit(EventKind.LAUNCHER_STARTED, -1, boot="a")
    for load in (None, 20):
        job.start(load=load)
        job.steps(20)
        job.training = False
        job.advance(2.0, Bucket.DETECTION)
        job.emit(EventKind.WORKER_LOST, -1, worker=0)
        job.advance(150.0, Bucket.RESTART)
    rebooted = job.now - START + 1000.0
    job.skew["host-0"] = by
    job.attempt += 1
    job.emit(EventKind.LAUNCHER_STARTED, -1, boot="b")
    job.attempt -= 1
    job.start(load=40)
    job.steps(20)
    job.emit(EventKind.WORKER_LOST, -1, worker=0)
    job.start(load=60)
    job.steps(20)
    job.emit(EventKind.WORKER_LOST, -1, worker=0)
    for place, event in enumerate(job.events):
        is_new = event.monotonic_s >= rebooted
        fields = {**event.fields, **({"boot": "b" if is_new else "a"} if event.kind == EventKind.JOB_STARTED else {})}
        mono = event.monotonic_s - (rebooted - 10.0 if is_new else 0.0)
        time = event.time + (30.0 if event.kind == EventKind.WORKER_LOST and event.attempt in (1, 3) else 0.0)
        job.events[place] = dataclasses.replace(event, monotonic_s=mono, fields=fields, time=time)
    job.truth[Bucket.RESTART] += by  # nothing but its clock tells how long the host was down
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert ledger.offsets == pytest.approx({"host-0": 30.0}, abs=0.1), "of the two lines that were written after that"


def test_hosts_that_never_trained_together_are_compared_through_a_third_one() -> None:
    """host-1, which is in both attempts, has one anchor: that of host-2 follows from it."""
    job = Job(ranks=2, skew={"host-1": 50.0, "host-2": 80.0})
    job.start()
    job.steps(20)
    job.save()
    job.fail(detection=2.0)
    job.hosts = {0: "host-1", 1: "host-2"}
    job.start(load=20)
    job.steps(20)
    job.finish()
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert ledger.offsets == pytest.approx({"host-1": 50.0, "host-2": 80.0}, abs=0.1)


def test_a_host_that_learns_the_time_after_its_start_was_never_in_1970() -> None:
    job = Job(ranks=2, ranks_per_host=2, skew={"host-0": 86_400.0 - START})
    job.start()
    job.skew.clear()
    job.steps(20)
    job.finish()
    ledger = job.ledger()
    assert_matches(ledger, job)
    assert ledger.start == pytest.approx(START, abs=0.1)
    assert summarize(ledger)["quality"]["clock_jumps"] == 2


def test_spans_of_a_host_whose_clock_is_ahead_are_where_they_were() -> None:
    job = Job(ranks=2, skew={"host-1": 3600.0})
    job.start()
    job.steps(20)
    for rank in range(2):
        job.emit(EventKind.SPAN_STARTED, rank, span="evaluation")
        job.emit(EventKind.SPAN_ENDED, rank, span="evaluation", span_s=3.0)
    job.steps(20)
    first, second = spans_of(job.ledger())
    assert first.start == pytest.approx(second.start, abs=0.1)


def test_a_process_that_goes_back_has_the_clock_it_had_before() -> None:
    job = Job(ranks=1)
    job.start()
    job.steps(20)
    job.skew["host-0"] = -3600.0
    job.step = 0
    job.steps(30)
    ledger = job.ledger()
    assert len(ledger.timings) == 2
    assert ledger.wall_us == pytest.approx((job.now - START) * 1e6, abs=1e6)
