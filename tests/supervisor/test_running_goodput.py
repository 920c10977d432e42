"""How much of its time a workload has made steps that were kept, from heartbeats alone."""

from __future__ import annotations

import pytest

from resiliency.runtime.typed_json import from_jsonable, to_jsonable
from resiliency.supervisor.running_goodput import GoodputWatch, RunningGoodput

from .simulated import Simulation
from .test_controller import RUNNING, job, started


def test_steps_that_are_made_again_were_lost() -> None:
    figure = RunningGoodput().passed(20, 1.0)
    for step in range(11):
        figure = figure.progressed(1, step, 1.0)
    assert figure.share == pytest.approx(10 / 20)
    figure = figure.progressed(2, 4, 5.0)
    assert figure.share == pytest.approx(4 / 20), "from step 4 on"
    figure = figure.progressed(2, 7, 3.0).passed(20, 2.0)
    assert figure.share == pytest.approx(7 / 40)


def test_an_older_checkpoint_than_the_last_one_loses_steps_of_several_generations() -> None:
    figure = RunningGoodput().passed(100, 1.0)
    figure = figure.progressed(1, 0, 0.0).progressed(1, 10, 10.0).progressed(2, 10, 0.0).progressed(2, 20, 10.0)
    figure = figure.progressed(3, 5, 0.0)
    assert figure.share == pytest.approx(5 / 100)


def test_of_a_job_that_does_not_say_its_steps_nothing_is_known_to_be_lost() -> None:
    figure = RunningGoodput().passed(40, 1.0)
    for generation in (1, 2):
        for _ in range(11):
            figure = figure.progressed(generation, -1, 1.0)
    assert figure.share == pytest.approx(20 / 40)


def test_a_thousand_generations_are_bounded_and_lose_no_time() -> None:
    figure = RunningGoodput().passed(2000, 1.0)
    for generation in range(1000):
        figure = figure.progressed(generation, generation, 0.0).progressed(generation, generation + 1, 1.0)
    assert len(figure.trained) <= 65 and figure.share == pytest.approx(0.5)


def test_there_is_no_figure_before_there_was_time() -> None:
    assert RunningGoodput().share is None


def test_what_is_stored_is_read_again_and_the_time_between_counts() -> None:
    watch = GoodputWatch()
    watch.look("job", 10.0, 1000.0)
    watch.progressed("job", 1, 1, 10.0)
    watch.progressed("job", 1, 9, 18.0)
    watch.look("job", 20.0, 1010.0)
    other = GoodputWatch()
    other.restore("job", from_jsonable(RunningGoodput, to_jsonable(watch.of("job"))), 1030.0)
    assert other.of("job").share == pytest.approx(8 / 30)
    backwards = GoodputWatch()
    backwards.restore("job", watch.of("job"), 5.0)
    assert backwards.of("job").share == pytest.approx(8 / 10), "a wall clock that was set back takes no time away"


def share(simulation: Simulation) -> float:
    found = simulation.controller.goodput_of("job").share
    assert found is not None
    return found


def test_the_supervisor_counts_while_ranks_make_steps_and_not_while_they_do_not() -> None:
    made = started()
    made.pass_time(100)
    before = share(made)
    assert before > 0.9
    made.hosts["host-1"].trains = False
    made.pass_time(100)
    assert share(made) == pytest.approx(before / 2, rel=0.1)


def test_a_supervisor_that_is_killed_goes_on_with_the_figure() -> None:
    made = started()
    made.pass_time(100)
    made.hosts["host-1"].trains = False
    made.pass_time(100)
    before = share(made)
    made.kill_supervisor()
    made.until(lambda: made.workload.state is RUNNING)
    assert share(made) == pytest.approx(before, rel=0.1)


def test_the_figure_ends_with_the_workload() -> None:
    made = started(**{"name": job().name})
    made.pass_time(50)
    made.finishes_at = made.step
    made.pass_time(5)
    before = share(made)
    made.pass_time(500)
    assert share(made) == before == made.workload.goodput.share
