"""Ranks compared by the work of their own; and the times of a step that lines and scalars are made of."""

from __future__ import annotations

import pytest

from resiliency.telemetry.step_observer import StepObserver, StepSubscriber, StepTiming
from resiliency.telemetry.step_spread import RankSteps, StepWindow, spread_text, straggler_text, stragglers


def rank(number: int, own_s: float, *, step_s: float = 1.0) -> RankSteps:
    return RankSteps(rank=number, host=f"host-{number}", window=1, first=11, last=20, own_s=own_s, step_s=step_s)


@pytest.mark.parametrize(
    ("own", "factor", "found"),
    [
        ([0.1, 0.1, 0.1, 0.4], 1.5, [3]),
        ([0.1, 0.5, 0.1, 0.4], 1.5, [1, 3]),
        ([0.1, 0.1, 0.1, 0.14], 1.5, []),
        ([0.1, 0.1, 0.1, 0.14], 1.3, [3]),
        # Of two ranks the faster one is the measure.
        ([0.1, 0.2], 1.5, [1]),
        # Ten times as much, and nothing beside the step, or at all.
        ([0.001, 0.001, 0.01], 1.5, []),
        ([0.0001, 0.0001, 0.0009], 1.5, []),
        ([0.0, 0.0, 0.5], 1.5, [2]),
        ([0.5], 1.5, []),
        ([], 1.5, []),
    ],
)
def test_stragglers_are_those_whose_own_work_takes_long(own: list[float], factor: float, found: list[int]) -> None:
    assert [one.rank for one in stragglers([rank(*pair) for pair in enumerate(own)], factor=factor)] == found


def test_what_is_said_names_rank_and_host() -> None:
    ranks = [rank(0, 0.1), rank(1, 0.1), rank(2, 0.45)]
    assert straggler_text(ranks[2], ranks) == (
        "rank 2 on host-2 holds up the others: its own work takes 0.450 s a step, 4.5 times the median of 3 ranks"
        " (steps 11 to 20)"
    )
    assert spread_text(ranks, world_size=3) == (
        "Own work a step up to step 20: 0.100 s (rank 0 on host-0) to 0.450 s (rank 2 on host-2), of steps of 1.000 s"
    )
    assert "(2 of 3 ranks)" in spread_text(ranks[1:], world_size=3)
    assert "times the median" not in straggler_text(rank(2, 0.45), [rank(0, 0.0), rank(1, 0.0), rank(2, 0.45)])


def timing(step: int, *, data: float, busy: float, duration: float) -> StepTiming:
    return StepTiming(
        step=step, count=1, follows=True, duration_s=duration, data_wait_s=data, stall_s=0, busy_s=busy, eval_s=0, save_in_flight=False, own_s=data + busy,
    )  # fmt: skip


def test_a_window_holds_the_steps_since_the_last_look() -> None:
    window = StepWindow(2, "h")
    assert window.take() is None
    window.add(timing(5, data=0.1, busy=0.2, duration=1.0))
    window.add(timing(6, data=0.3, busy=0.4, duration=2.0))
    taken = window.take()
    assert taken == RankSteps(rank=2, host="h", window=1, first=5, last=6, own_s=pytest.approx(0.5), step_s=1.5)
    assert RankSteps.from_text(taken.to_text().encode()) == taken
    assert window.take() is None
    window.add(timing(7, data=0.0, busy=1.0, duration=1.0))
    later = window.take()
    assert later is not None and (later.window, later.first, later.last, later.own_s) == (2, 7, 7, 1.0)


# -- times of a step ------------------------------------------------------------------------------------------------------


class Times(StepSubscriber):
    def __init__(self) -> None:
        self.all: list[tuple[int, float, float]] = []

    def step_ended(self, timing: StepTiming) -> None:
        self.all.append((timing.step, round(timing.between_s, 6), round(timing.active_s, 6)))


class Loop:
    """A training loop with a clock moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.observer = StepObserver(clock=lambda: self.now)
        self.times = Times()
        self.observer.subscribe(self.times)

    def batch(self, step: int, *, wait: float, work: float) -> None:
        self.now += wait
        self.observer.batch_started()
        self.now += work
        self.observer.batch_ended(step)

    def validate(self, seconds: float) -> None:
        self.observer.validation_started()
        self.now += seconds
        self.observer.validation_ended()


def test_a_step_lasts_from_its_first_batch_to_its_end_and_validations_are_not_part_of_it() -> None:
    loop = Loop()
    loop.observer.training_started(0)
    loop.batch(1, wait=5, work=2)
    loop.validate(7)
    loop.batch(2, wait=1, work=3)
    assert loop.times.all == [(1, 5, 2), (2, 8, 3)]


def test_with_accumulation_a_step_is_all_its_batches() -> None:
    loop = Loop()
    loop.observer.training_started(10)
    loop.batch(10, wait=1, work=2)
    loop.validate(50)
    loop.batch(11, wait=0.5, work=2)
    loop.batch(11, wait=1, work=1)
    loop.batch(12, wait=1, work=1)
    assert loop.times.all == [(11, 1, 4.5), (12, 1, 3)]


def test_waits_between_the_batches_of_a_step_are_no_work_of_the_ranks_own() -> None:
    loop = Loop()
    loop.observer.training_started(0)
    own: list[float] = []
    loop.times.step_ended = lambda timing: own.append(timing.own_s)  # type: ignore[method-assign]
    for step, wait in ((0, 3.0), (1, 70.0), (1, 5.0), (2, 80.0)):
        loop.now += wait
        loop.observer.batch_started()
        loop.now += 1
        loop.observer.backward_started()
        loop.now += 10
        loop.observer.batch_ended(step)
    assert own == [3 + 1 + 1, 5 + 1 + 1]


def test_a_second_fit_begins_anew() -> None:
    loop = Loop()
    loop.observer.training_started(0)
    loop.batch(1, wait=1, work=1)
    loop.observer.training_interrupted()
    loop.now += 1000
    loop.observer.training_started(1)
    loop.batch(2, wait=2, work=1)
    assert loop.times.all == [(1, 1, 1), (2, 2, 1)]


def test_the_device_is_waited_for_before_each_time_is_taken() -> None:
    loop = Loop()
    loop.observer.training_started(0)

    def synchronize() -> None:
        loop.now += 10  # until the device is done

    loop.observer.synchronize = synchronize
    loop.batch(1, wait=1, work=1)
    assert loop.times.all == [(1, 11, 11)]
