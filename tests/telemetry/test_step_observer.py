"""The observer of steps: what it measures, who is told, how little is written, and that lines take the reader's fast
path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from resiliency.events import Event, EventKind, EventWriter
from resiliency.telemetry.step_events import StepEvents, log_steps
from resiliency.telemetry.step_observer import StepObserver, StepSubscriber, StepTiming
from resiliency.telemetry.step_totals import StepTotals


class Memory:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        return


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Parts:
    observer: StepObserver
    log: StepEvents
    totals: StepTotals
    hand: Hand
    events: list[Event]


@pytest.fixture
def parts() -> Parts:
    sink, hand = Memory(), Hand()
    writer = EventWriter(run="r", attempt=0, rank=0, host="h", sinks=(sink,))
    return assemble(writer, hand, sink.events)


def assemble(writer: EventWriter, hand: Hand, events: list[Event]) -> Parts:
    parts = Parts(StepObserver(clock=hand), StepEvents(writer), StepTotals(clock=hand), hand, events)
    parts.observer.subscribe(parts.log)
    parts.observer.subscribe(parts.totals)
    return parts


def one_step(
    observer: StepObserver, hand: Hand, step: int, *, data: float = 0.0, forward: float = 0.0, rest: float = 0.0
) -> None:
    hand.now += data
    observer.batch_started()
    hand.now += forward
    observer.backward_started()
    hand.now += rest
    observer.batch_ended(step)


def test_a_step_divides_into_data_stall_validation_and_own_work(parts: Parts) -> None:
    observer, hand = parts.observer, parts.hand
    parts.log.job_started(world_size=1)
    hand.now += 7
    observer.training_started(10)
    one_step(observer, hand, 11, data=0.5, forward=1.0, rest=2.0)
    # Between steps: validation for 4 s, an eager copy of 0.25 s, then 0.125 s for the batch.
    observer.validation_started()
    hand.now += 4
    observer.validation_ended()
    hand.now += 0.25
    observer.stall(0.25)
    hand.now += 0.125
    observer.batch_started()
    hand.now += 1
    observer.stall(0.5)  # a fence that took half of that second
    observer.backward_started()
    hand.now += 1
    observer.batch_ended(12)
    observer.training_ended(12)
    parts.log.job_terminated("finished")

    kinds = [event.kind for event in parts.events]
    assert kinds == ["job_started", "train_started", "step", "step", "train_ended", "job_terminated"]
    assert parts.events[1].step == 10
    first, second = parts.events[2].fields, parts.events[3].fields
    assert first == {"step_s": 3.5, "data_wait_s": 0.5, "stall_s": 0.0, "save_in_flight": False, "busy_s": 1.0}
    assert second == {
        "step_s": 6.375,
        "data_wait_s": 0.125,
        "stall_s": 0.75,
        "save_in_flight": False,
        "busy_s": 0.5,
        "eval_s": 4.0,
    }
    assert parts.totals.productive_s == pytest.approx(9.875 - 0.625 - 0.75)


def test_where_fetches_are_told_the_rest_between_batches_is_the_loop(parts: Parts) -> None:
    observer, hand = parts.observer, parts.hand
    observer.training_started(0)
    one_step(observer, hand, 1, data=0.5, rest=1.0)  # no fetch was told: as of a loop of one's own
    hand.now += 0.25  # callbacks
    observer.fetch_started()
    hand.now += 0.5
    observer.fetch_ended()
    hand.now += 0.125  # the batch goes to its device
    one_step(observer, hand, 2, rest=1.0)
    observer.batch_started()
    observer.fetch_started()  # a step that fetches its own batch
    hand.now += 2
    observer.fetch_ended()
    hand.now += 1
    observer.backward_started()
    observer.batch_ended(3)
    observer.fetch_ended()  # nothing
    lines = [event.fields for event in parts.events if event.kind == "step"]
    assert [(line["step_s"], line["data_wait_s"], line.get("loop_s", 0.0)) for line in lines] == [
        (1.5, 0.5, 0.0),
        (1.875, 0.5, 0.375),
        (3.0, 2.0, 0.0),
    ]
    assert lines[2]["busy_s"] == 1.0
    assert parts.totals.productive_s == pytest.approx(3.0)


def test_accumulated_batches_are_one_step(parts: Parts) -> None:
    observer, hand = parts.observer, parts.hand
    observer.training_started(0)
    for batch in range(8):
        one_step(observer, hand, (batch + 1) // 4, data=0.1, forward=0.5, rest=0.4)
    steps = [event for event in parts.events if event.kind == EventKind.STEP]
    assert [event.step for event in steps] == [1, 2]
    assert [event.fields["step_s"] for event in steps] == [4.0, 4.0]
    assert steps[0].fields["data_wait_s"] == 0.4
    assert steps[0].fields["busy_s"] == 2.0


def test_short_steps_share_lines_and_nothing_is_lost(parts: Parts) -> None:
    observer, hand = parts.observer, parts.hand
    observer.training_started(0)
    for step in range(1, 2001):
        one_step(observer, hand, step, rest=0.001)
    observer.training_ended(2000)
    lines = [event for event in parts.events if event.kind == EventKind.STEP]
    assert len(lines) <= 10 + 2.0 / 0.05 + 2
    assert sum(event.fields.get("count", 1) for event in lines) == 2000
    assert sum(event.fields["step_s"] for event in lines) == pytest.approx(2.0)
    assert lines[-1].step == 2000


class Recorder(StepSubscriber):
    """A consumer that did not exist when the observer was written: it overrides what it needs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def training_started(self, step: int, world_size: int | None) -> None:
        self.seen.append(("started", step))

    def step_ended(self, timing: StepTiming) -> None:
        self.seen.append(("step", timing.step))


def test_one_more_subscriber_is_told_of_every_step_until_it_leaves(parts: Parts) -> None:
    observer, recorder = parts.observer, Recorder()
    observer.subscribe(recorder)
    observer.subscribe(recorder)
    observer.training_started(4)
    one_step(observer, parts.hand, 5)
    observer.unsubscribe(recorder)
    one_step(observer, parts.hand, 6)
    assert recorder.seen == [("started", 4), ("step", 5)]
    assert parts.totals.steps == 2


def test_a_late_subscriber_begins_at_the_present_step(parts: Parts) -> None:
    observer, recorder = parts.observer, Recorder()
    observer.training_started(0)
    one_step(observer, parts.hand, 1)
    observer.subscribe(recorder)
    one_step(observer, parts.hand, 2)
    assert recorder.seen == [("started", 1), ("step", 2)]


def test_steps_are_written_to_one_log() -> None:
    sink, observer = Memory(), StepObserver()
    writer = EventWriter(run="r", attempt=0, rank=0, host="h", sinks=(sink,))
    first = log_steps(observer, lambda: writer)
    assert first is not None
    assert log_steps(observer, lambda: pytest.fail("a second log was opened")) is None
    observer.unsubscribe(first)
    assert log_steps(observer, lambda: writer) is not None


@pytest.mark.parametrize("told", [True, False])
def test_a_fit_after_one_that_raised_begins_anew(parts: Parts, told: bool) -> None:
    """What the broken step had gathered is not the next one's, whether or not the end of training was told."""
    observer, hand = parts.observer, parts.hand
    observer.training_started(0)
    one_step(observer, hand, 1, rest=1.0)
    observer.batch_started()
    observer.validation_started()
    hand.now += 50
    observer.stall(3.0)
    if told:
        observer.training_interrupted()
        observer.training_ended(1)  # a second end is none
    observer.training_started(1, 2)
    observer.validation_ended()
    one_step(observer, hand, 2, data=0.5, rest=1.0)
    steps = [event for event in parts.events if event.kind == EventKind.STEP]
    assert [event.fields["step_s"] for event in steps] == [1.0, 1.5]
    assert steps[1].fields == {"step_s": 1.5, "data_wait_s": 0.5, "stall_s": 0.0, "save_in_flight": False}
    assert [event.fields for event in parts.events if event.kind == EventKind.TRAIN_STARTED] == [{}, {"world_size": 2}]
    assert not [event for event in parts.events if event.kind == EventKind.TRAIN_ENDED]


def test_a_jump_of_the_step_number_is_one_step_in_a_line_of_its_own(parts: Parts) -> None:
    observer, hand = parts.observer, parts.hand
    observer.training_started(0)
    for step in range(1, 13):
        one_step(observer, hand, step, rest=0.001)
    one_step(observer, hand, 5, rest=0.001)
    observer.training_ended(5)
    lines = [event for event in parts.events if event.kind == EventKind.STEP]
    assert [(line.step, line.fields.get("count", 1)) for line in lines[-2:]] == [(12, 2), (5, 1)]


def test_totals_give_the_productive_share(parts: Parts) -> None:
    observer, hand = parts.observer, parts.hand
    hand.now += 2  # start-up
    observer.training_started(0)
    one_step(observer, hand, 1, data=1.0, rest=4.0)
    hand.now += 1
    observer.stall(1.0)
    one_step(observer, hand, 2, rest=2.0)
    assert (parts.totals.stall_s, parts.totals.data_wait_s) == (1.0, 1.0)
    assert parts.totals.goodput == pytest.approx(6 / 10)
