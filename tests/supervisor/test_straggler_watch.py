"""A rank that holds up the others is named by comparing what the ranks of all hosts publish of their own work."""

from __future__ import annotations

from collections.abc import Mapping

from resiliency.runtime.messages.monitor import RankReport
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.straggler_watch import StragglerWatch

WINDOW_S, STEP_S = 10.0, 0.5


class Ranks:
    """Two of each host, that make two steps a second; heard once a second."""

    def __init__(self, *hosts: str, factor: float = 1.5) -> None:
        self.watch = StragglerWatch(factor=factor, window_s=WINDOW_S)
        self.hosts, self.now, self.steps, self.generation = hosts, 100.0, 0, 1
        self.own: dict[int, float] = {}

    def train(self, seconds: float, own_s: Mapping[int, float], *, measured: bool = True) -> list[Observation]:
        """Args: own_s: of a rank's step; 0.1 of those that are not named."""
        found: list[Observation] = []
        for _ in range(int(seconds)):
            self.now += 1
            self.steps += 2
            for rank in range(2 * len(self.hosts)):
                self.own[rank] = self.own.get(rank, 0.0) + 2 * own_s.get(rank, 0.1)
            for node, host in enumerate(self.hosts):
                ranks = tuple(
                    RankReport(rank=rank, own_s=self.own[rank], own_steps=self.steps if measured else 0)
                    for rank in (2 * node, 2 * node + 1)
                )
                self.watch.reported("job", self.generation, host, ranks, self.now)
            found += self.watch.look(self.now)
        return found


def test_a_rank_that_is_slow_in_three_windows_is_named_with_its_host_and_figures() -> None:
    ranks = Ranks("a", "b", "c")
    assert ranks.train(30, {3: 0.1}) == []
    (found,) = ranks.train(40, {3: 0.3})
    assert (found.kind, found.host, found.rank, found.generation) == (ObservationKind.STRAGGLER, "b", 3, 1)
    assert "0.300 s a step, 3.0 times the median of 6 ranks" in found.detail and found.is_planned


def test_one_that_was_slow_for_a_while_is_not() -> None:
    ranks = Ranks("a", "b")
    ranks.train(30, {})
    for _ in range(5):
        assert ranks.train(2 * WINDOW_S, {0: 0.4}) == []
        assert ranks.train(2 * WINDOW_S, {}) == []


def test_it_is_named_again_only_after_a_long_time() -> None:
    ranks = Ranks("a", "b")
    ranks.train(11, {0: 0.4})
    assert len(ranks.train(20 * WINDOW_S, {0: 0.4})) == 1
    assert len(ranks.train(4 * WINDOW_S, {0: 0.4})) == 1


def test_what_is_slow_by_hardly_any_of_a_step_is_noise() -> None:
    ranks = Ranks("a", "b")
    assert ranks.train(100, dict.fromkeys(range(4), 0.001) | {0: 0.009}) == [], "9 times the median, 2% of a step"
    assert ranks.train(60, dict.fromkeys(range(4), 0.001) | {0: 0.02}) != []


def test_ranks_that_measure_nothing_are_not_compared() -> None:
    assert Ranks("a", "b").train(100, {0: 0.4}, measured=False) == []


def test_ranks_that_measure_only_later_are_compared_from_then_on() -> None:
    ranks = Ranks("a", "b")
    ranks.train(30, {0: 0.4}, measured=False)
    assert len(ranks.train(60, {0: 0.4})) == 1


def test_another_generation_begins_anew() -> None:
    ranks = Ranks("a", "b")
    ranks.train(35, {0: 0.4})
    ranks.generation, ranks.steps, ranks.own = 2, 0, {}
    assert ranks.train(35, {0: 0.4}) == [] and len(ranks.train(10, {0: 0.4})) == 1


def test_few_steps_make_no_window() -> None:
    ranks = Ranks("a", "b")
    ranks.train(12, {})
    for _ in range(10):
        steps = ranks.steps
        ranks.train(10, {0: 0.4})
        ranks.steps = steps + 1
    assert ranks.watch.look(ranks.now) == []


def test_factor_0_looks_for_none() -> None:
    assert Ranks("a", "b", factor=0.0).train(100, {0: 0.4}) == []


def test_numbers_that_nobody_can_have_do_no_harm() -> None:
    """One rank lies, or its page is damaged: the supervisor goes on."""
    watch = StragglerWatch(factor=1.5, window_s=1.0)
    for moment, (steps, own_s) in enumerate([(10, 1.0), (10**400, 1e308), (10, float("nan")), (30, float("inf"))]):
        for rank, host in enumerate("ab"):
            good = RankReport(rank=rank, own_s=float(moment), own_steps=10 * (moment + 1))
            bad = RankReport(rank=rank, own_s=own_s, own_steps=steps)
            watch.reported("job", 1, host, (bad if host == "b" else good,), float(moment))
        watch.look(moment + 1.5)
