"""The training of simulated hosts notices what no supervisor may ever bring about."""

from __future__ import annotations

from tests.cluster.training import Training


def of(*hosts: str, generation: int = 1) -> Training:
    training = Training()
    for node_rank, host in enumerate(hosts):
        training.takes(host, generation, node_rank, len(hosts))
    return training


def test_a_step_needs_every_host_and_that_they_reach_each_other() -> None:
    training = of("a", "b")
    training.is_away("b", 1, True)
    training.makes_step(1)
    assert training.step == 0
    training.is_away("b", 1, False)
    training.makes_step(1)
    training.leaves("a", 1, 0)
    training.makes_step(1)
    assert (training.step, training.steps_of(1), training.newest) == (1, 1, 1)
    assert training.hosts_of(1) == {1: "b"} and training.problems == []


def test_a_place_of_two_hosts_and_a_step_of_an_older_generation_are_problems() -> None:
    training = of("a", "b")
    training.takes("c", 1, 1, 2)
    assert training.problems == ["node rank 1 of generation 1 is held by b and c"]
    training.takes("d", 2, 0, 1)
    training.makes_step(2)
    training.makes_step(1)
    assert training.problems[1:] == ["generation 1 makes a step after 2"]
