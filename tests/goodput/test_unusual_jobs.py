"""Right logs of unusual jobs: nothing in them is refused, and the account is the truth."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from resiliency.events import EventKind
from resiliency.goodput.attempts import Attempt
from resiliency.goodput.incidents import incidents
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.collect import Collector

from .scripted import STEP_S, Job, assert_matches


def _nothing_refused(ledger: Ledger) -> bool:
    return not any("Refused" in note for note in ledger.notes)


# ---- processes that die at once


def _crash_loop(job: Job, times: int, *, writers: int, pause: float) -> None:
    """Attempts of which some ranks write their start, and nothing else follows. No launcher tells of them."""
    for _ in range(times):
        job.attempt += 1
        for rank in range(writers):
            job.emit(EventKind.JOB_STARTED, rank, world_size=job.ranks)
        job.advance(pause, Bucket.RESTART)


@pytest.mark.parametrize(("ranks", "writers"), [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("pause", [0.05, 30.0])
def test_each_attempt_of_a_crash_loop_is_one(ranks: int, writers: int, pause: float) -> None:
    job = Job(ranks=ranks)
    job.start()
    job.steps(10)
    job.training = False
    _crash_loop(job, 3, writers=writers, pause=pause)
    job.start(load=10)
    job.steps(5)
    job.finish()
    ledger = job.ledger()
    assert len(ledger.timings) == 5
    assert _nothing_refused(ledger)
    assert_matches(ledger, job)


def test_a_job_that_could_not_start_for_long_has_waited_for_it() -> None:
    """The first attempts are most of the time; were they not the job's, it would be reported as busy."""
    job = Job()
    _crash_loop(job, 5, writers=1, pause=100.0)
    job.start()
    job.steps(20)
    job.finish()
    ledger = job.ledger()
    assert len(ledger.timings) == 6
    assert ledger.goodput == pytest.approx(40.0 / 570.0, abs=0.001)


def test_a_rank_that_moved_to_a_host_with_another_clock_was_not_in_two_attempts_at_once() -> None:
    """By its clock, the start on the new host lies within the attempt before."""
    job = Job(ranks=2, skew={"other": -40.0})
    job.start()
    job.steps(10)
    job.training = False
    job.hosts = {0: "other", 1: "other"}
    _crash_loop(job, 1, writers=2, pause=10.0)
    job.attempt += 1
    job.emit(EventKind.JOB_STARTED, 1, world_size=2)
    job.advance(10.0, Bucket.RESTART)
    job.hosts = {}
    job.start(load=10)
    job.steps(5)
    job.finish()
    assert _nothing_refused(job.ledger())


# ---- steps


def test_ranks_that_join_later_do_not_say_where_the_attempt_began() -> None:
    """One rank goes back to step 10, three more join it at step 40: what was done before is lost all the same."""
    job = Job(ranks=4)
    job.start()
    job.steps(10)
    job.steps(20, lost=True)
    job.training = False
    job.advance(5.0, Bucket.DETECTION)
    job.start(ranks=1, load=10)
    job.steps(30)
    for rank in range(1, 4):
        job.emit(EventKind.JOB_STARTED, rank, world_size=4)
        job.emit(EventKind.TRAIN_STARTED, rank, step=40, world_size=4)
    job.alive = 4
    job.steps(30)
    job.finish()
    ledger = job.ledger()
    assert ledger.gpu[Bucket.LOST_WORK] == pytest.approx(20 * STEP_S * 4 * 1e6, rel=0.05)


# ---- one number for all attempts, and lines in the order of a clock


def _records(job: Job, **changes: object) -> list[dict[str, object]]:
    return [{**json.loads(one.to_json()), **changes} for one in job.events]


def _account(records: list[dict[str, object]]) -> Ledger:
    collector = Collector()
    for record in records:
        collector.add(record)
    return account(collector.runs["job"])


def test_attempts_of_one_number_on_a_machine_that_was_started_anew_keep_their_clocks() -> None:
    """As of a job without a launcher: what the last boot tells says nothing of the attempts before it."""
    job = Job(ranks=1)
    job.start()
    job.steps(20)
    job.training = False
    job.advance(1.0, Bucket.RESTART)
    _crash_loop(job, 2, writers=1, pause=200.0)
    before = len(job.events)
    job.start(load=20)
    job.steps(40)
    job.finish()
    records = _records(job)
    for number, record in enumerate(records):
        del record["attempt"]
        if record["event_type"] == EventKind.JOB_STARTED:
            record["boot"] = "a" if number < before else "b"
        if number >= before:
            record["monotonic_s"] = job.events[number].time - job.events[before].time + 30.0
    ledger = _account(records)
    assert len(ledger.timings) == 4
    assert _nothing_refused(ledger)
    assert_matches(ledger, job)


def test_lines_in_the_order_of_a_clock_that_was_set_back_are_one_attempt() -> None:
    """As an export sorts them: the steps after it are read before the start."""
    job = Job(ranks=2, ranks_per_host=2)
    job.start()
    job.steps(20)
    job.skew["host-0"] = -3600.0
    job.steps(20)
    job.finish()
    ledger = _account(sorted(_records(job), key=lambda record: str(record["timestamp"])))
    assert len(ledger.timings) == 1
    assert ledger.wall[Bucket.PRODUCTIVE] == pytest.approx(80e6, abs=2e6)


def test_a_host_whose_clock_is_set_during_an_attempt_is_no_reference_for_the_others() -> None:
    """It shows one step only, and the other hosts show all: those are compared with one of themselves."""
    job = Job(ranks=4, skew={"host-1": 3600.0})
    job.start()
    job.steps(20)
    job.skew["host-0"] = -30.0
    job.steps(20)
    job.finish()
    ledger = job.ledger()
    assert ledger.offsets == pytest.approx({"host-0": -30.0, "host-1": 3600.0}, abs=0.1)
    assert_matches(ledger, job)


def _launched(job: Job, kind: EventKind, **fields: object) -> dict[str, object]:
    """A line of the launcher of the first host."""
    job.emit(kind, 0, **fields)
    record = json.loads(job.events.pop().to_json())
    del record["rank"]
    return record


def test_a_checkpoint_that_was_passed_over_and_one_without_its_name_are_incidents() -> None:
    job = Job(ranks=1)
    job.start(load=20)
    job.emit(EventKind.CHECKPOINT_PASSED_OVER, 0, step=30, taken=20, reason="a file is missing")
    job.steps(10)
    job.emit(EventKind.CHECKPOINT_NAME_REFUSED, 0, step=30, tier="gcs", name="last", reason="another run has it")
    job.finish()
    assert {one.what for one in incidents(job.ledger())} >= {
        "Damaged checkpoint passed over at step 30: a file is missing",
        "Checkpoint without its name at step 30: another run has it",
    }


# ---- numbers of steps


def _steps_of(numbers: Iterable[int], *, seconds: float = 10.0, count: int = 1) -> Ledger:
    """Lines of one rank, and no other event."""
    job = Job(ranks=1)
    for number in numbers:
        job.now += seconds
        job.emit(EventKind.STEP, 0, step=number, step_s=seconds, **({"count": count} if count > 1 else {}))
    return job.ledger()


@pytest.mark.parametrize("every", [1, 100, 1000])
def test_a_counter_that_starts_again_is_a_new_attempt_however_many_steps_a_line_leaves_out(every: int) -> None:
    ledger = _steps_of([every * number for _ in range(3) for number in range(1, 11)])
    assert len(ledger.timings) == 3
    assert ledger.wall_us == 300e6
    told = {(one.what, one.remedy.partition(" at ")[0]) for one in incidents(ledger)}
    assert told == {("Steps counted from an earlier one again", "went on in the same process")}, "nothing was loaded"
    assert _nothing_refused(ledger)


def test_a_size_that_one_rank_alone_tells_is_that_of_the_job() -> None:
    """The job was larger once, and then one of its ranks had written a line when it died."""
    job = Job(ranks=8)
    job.start(ranks=4)
    job.steps(10)
    job.fail(detection=1.0)
    job.attempt += 1
    started = _launched(job, EventKind.RANKS_STARTED, count=8)
    job.emit(EventKind.JOB_STARTED, 0, world_size=8)
    job.advance(5.0, Bucket.RESTART)
    job.start(load=10, ranks=4)
    job.steps(5)
    job.finish()
    ledger = _account([started, *_records(job)])
    assert ledger.capacity == 8
    assert _nothing_refused(ledger)


# ---- many ranks


def test_the_size_of_an_attempt_is_not_counted_anew_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time asks all ranks: of a thousand, the account took seconds for that alone."""
    asked: list[int | None] = []
    world = Attempt.world
    monkeypatch.setattr(Attempt, "world", property(lambda self: asked.append(self.number) or world.fget(self)))
    job = Job(ranks=16)
    job.start()
    job.steps(2)
    job.ledger()
    assert 0 < len(asked) < 8


# ---- ranks that are moved


def _moved(job: Job) -> list[dict[str, object]]:
    """Rank 1 dies at once, and goes on on the host of rank 2; the attempt keeps its number."""
    for rank in range(job.ranks):
        job.emit(EventKind.JOB_STARTED, rank, world_size=job.ranks)
        job.emit(EventKind.RESTORE_STARTED, rank)
    job.advance(20.0, Bucket.FIRST_START)
    job.hosts[1] = "host-2"
    job.emit(EventKind.JOB_STARTED, 1, world_size=job.ranks)
    for rank in range(job.ranks):
        job.emit(EventKind.TRAIN_STARTED, rank, step=0, world_size=job.ranks)
    job.training = True
    job.steps(20)
    return _records(job)


@pytest.mark.parametrize("rebooted", [False, True])
def test_a_rank_that_dies_at_once_goes_on_elsewhere_or_after_a_reboot(rebooted: bool) -> None:
    job = Job(ranks=3)
    job.attempt, job.alive = 0, 3
    records = _moved(job)
    for place, record in enumerate(records):
        if rebooted and record["host"] == "host-2" and record["rank"] == 1:
            record["host"] = "host-1"
        if place >= 6 and record["rank"] == 1:
            record["monotonic_s"] = float(str(record["monotonic_s"])) - 900.0
        if record["event_type"] == EventKind.JOB_STARTED:
            record["boot"] = f"{record['host']} {place >= 6}"
    ledger = _account(records)
    assert_matches(ledger, job)
    assert _nothing_refused(ledger)
