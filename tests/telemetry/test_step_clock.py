"""The step clock: what it measures, how little it writes, and that its lines take the reader's fast path."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from resiliency.events import Event, EventKind, EventWriter, JsonlSink
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.reader import LogReader
from resiliency.telemetry.step_clock import StepClock, shared_clock


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


@pytest.fixture
def parts() -> tuple[StepClock, Hand, Memory]:
    sink, hand = Memory(), Hand()
    writer = EventWriter(run="r", attempt=0, rank=0, host="h", sinks=(sink,))
    return StepClock(writer, clock=hand), hand, sink


def one_step(
    clock: StepClock, hand: Hand, step: int, *, data: float = 0.0, forward: float = 0.0, rest: float = 0.0
) -> None:
    hand.now += data
    clock.on_train_batch_start()
    hand.now += forward
    clock.on_before_backward()
    hand.now += rest
    clock.on_train_batch_end(step)


def test_a_step_divides_into_data_stall_validation_and_own_work(parts: tuple[StepClock, Hand, Memory]) -> None:
    clock, hand, sink = parts
    clock.job_started(world_size=1)
    hand.now += 7
    clock.on_train_start(10)
    one_step(clock, hand, 11, data=0.5, forward=1.0, rest=2.0)
    # Between steps: validation for 4 s, an eager copy of 0.25 s, then 0.125 s for the batch.
    clock.on_validation_start()
    hand.now += 4
    clock.on_validation_end()
    hand.now += 0.25
    clock.stall(0.25)
    hand.now += 0.125
    clock.on_train_batch_start()
    hand.now += 1
    clock.stall(0.5)  # a fence that took half of that second
    clock.on_before_backward()
    hand.now += 1
    clock.on_train_batch_end(12)
    clock.on_train_end(12)
    clock.job_terminated("finished")

    kinds = [event.kind for event in sink.events]
    assert kinds == ["job_started", "train_started", "step", "step", "train_ended", "job_terminated"]
    assert sink.events[1].step == 10
    first, second = sink.events[2].fields, sink.events[3].fields
    assert first == {"step_s": 3.5, "data_wait_s": 0.5, "stall_s": 0.0, "save_in_flight": False, "busy_s": 1.0}
    assert second == {
        "step_s": 6.375,
        "data_wait_s": 0.125,
        "stall_s": 0.75,
        "save_in_flight": False,
        "busy_s": 0.5,
        "eval_s": 4.0,
    }
    assert clock.productive_s == pytest.approx(9.875 - 0.625 - 0.75)


def test_accumulated_batches_are_one_step(parts: tuple[StepClock, Hand, Memory]) -> None:
    clock, hand, sink = parts
    clock.on_train_start(0)
    for batch in range(8):
        one_step(clock, hand, (batch + 1) // 4, data=0.1, forward=0.5, rest=0.4)
    steps = [event for event in sink.events if event.kind == EventKind.STEP]
    assert [event.step for event in steps] == [1, 2]
    assert [event.fields["step_s"] for event in steps] == [4.0, 4.0]
    assert steps[0].fields["data_wait_s"] == 0.4
    assert steps[0].fields["busy_s"] == 2.0


def test_short_steps_share_lines_and_nothing_is_lost(parts: tuple[StepClock, Hand, Memory]) -> None:
    clock, hand, sink = parts
    clock.on_train_start(0)
    for step in range(1, 2001):
        one_step(clock, hand, step, rest=0.001)
    clock.on_train_end(2000)
    lines = [event for event in sink.events if event.kind == EventKind.STEP]
    assert len(lines) <= 10 + 2.0 / 0.05 + 2
    assert sum(event.fields.get("count", 1) for event in lines) == 2000
    assert sum(event.fields["step_s"] for event in lines) == pytest.approx(2.0)
    assert lines[-1].step == 2000


def test_a_save_in_flight_never_shares_a_line_with_a_step_without(parts: tuple[StepClock, Hand, Memory]) -> None:
    clock, hand, sink = parts
    clock.on_train_start(0)
    for step in range(1, 101):
        clock.save_in_flight = step % 10 == 0
        one_step(clock, hand, step, rest=0.001)
    clock.flush()
    flagged = [event for event in sink.events if event.kind == EventKind.STEP and event.fields["save_in_flight"]]
    assert sum(event.fields.get("count", 1) for event in flagged) == 10


def test_two_callbacks_can_drive_one_clock(parts: tuple[StepClock, Hand, Memory]) -> None:
    clock, hand, sink = parts
    for step in range(1, 4):
        for _ in range(2):
            clock.job_started()
            clock.on_train_start(0)
            clock.on_train_batch_start()
        hand.now += 1
        for _ in range(2):
            clock.on_train_batch_end(step)
    for _ in range(2):
        clock.on_train_end(3)
        clock.job_terminated("finished")
    assert [event.kind for event in sink.events] == [
        "job_started",
        "train_started",
        "step",
        "step",
        "step",
        "train_ended",
        "job_terminated",
    ]

    class Trainer:
        pass

    trainer = Trainer()
    assert shared_clock(trainer, lambda: clock) is shared_clock(trainer, lambda: StepClock(None))


def test_lines_take_the_fast_path_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    path = tmp_path / "rank-00000.jsonl"
    writer = EventWriter(run="r", attempt=2, rank=0, host="h", sinks=(JsonlSink(path),))
    clock = StepClock(writer, clock=hand)
    clock.on_train_start(0)
    for step in range(1, 501):
        if step % 50 == 0:
            clock.on_validation_start()
            hand.now += 0.01
            clock.on_validation_end()
        clock.save_in_flight = step % 7 == 0
        one_step(clock, hand, step, data=0.0001, forward=0.01, rest=0.02)
    clock.flush()
    writer.close()

    def refuse(*args: object) -> None:
        raise AssertionError("a step line of our own writer went the slow way")

    monkeypatch.setattr(Collector, "_slow_step", refuse)
    reader = LogReader()
    reader.read([path])
    (segment,) = reader.collector.runs["r"].segments
    total = segment.steps.total()
    assert total.n == 500
    assert total.step_s == pytest.approx(clock.step_s, rel=1e-6)
    assert total.eval_s == pytest.approx(0.1)
    assert total.busy_s == pytest.approx(5.0, rel=1e-6)
    assert segment.steps.high == 500


def test_a_step_costs_microseconds(tmp_path: Path) -> None:
    writer = EventWriter(run="r", attempt=0, rank=0, host="h", sinks=(JsonlSink(tmp_path / "log.jsonl"),))
    clock = StepClock(writer)
    clock.on_train_start(0)
    steps = 20_000
    began = time.perf_counter()
    for step in range(1, steps + 1):
        clock.on_train_batch_start()
        clock.on_before_backward()
        clock.on_train_batch_end(step)
    each = (time.perf_counter() - began) / steps
    writer.close()
    assert each < 50e-6, f"{each * 1e6:.1f} us a step"
