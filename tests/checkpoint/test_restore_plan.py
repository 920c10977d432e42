"""Which step every host restores, and from where: pure, the same on every rank, and never a step some host cannot get."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint.restore_plan import BadCopy, StepInventory, plan_restore
from resiliency.storage.manifest import StepId

SETTINGS = settings(deadline=None, database=None, max_examples=300, suppress_health_check=list(HealthCheck))
NODES = ["n0", "n1"]


def held(
    step: int,
    ranks: tuple[int, ...] = (0, 1),
    *,
    tier: str = "local",
    node: str = "n0",
    world_size: int = 2,
    attempt: int = 1,
    serial: int = 0,
    exact: bool = True,
) -> StepInventory:  # noqa: E501
    return StepInventory(tier, node, StepId(step, attempt, "000000", serial).dirname, world_size, ranks, (), exact)


@st.composite
def inventories(draw: st.DrawFn) -> tuple[list[StepInventory], list[str], set[BadCopy]]:
    nodes = draw(st.sampled_from([["n0"], ["n0", "n1"]]))
    found = []
    for step in draw(st.lists(st.integers(1, 4), max_size=4, unique=True)):
        attempt = draw(st.integers(1, 2))
        for tier, node in [("local", n) for n in nodes] + [("store", ""), ("nfs", "")]:
            if draw(st.booleans()):
                ranks = tuple(sorted(draw(st.sets(st.integers(0, 1), min_size=1))))
                found.append(held(step, ranks, tier=tier, node=node, attempt=attempt))
    strikes = {(h.tier, h.node, h.step, rank) for h in found for rank in h.ranks if draw(st.integers(0, 4)) == 0}
    return found, nodes, strikes


@SETTINGS
@given(inventories(), st.integers(0, 1000))
def test_laws(given_: tuple[list[StepInventory], list[str], set[BadCopy]], seed: int) -> None:
    inventory, nodes, strikes = given_
    choice = plan_restore(inventory, nodes, strikes)

    def reachable(step: StepId) -> bool:
        return all(
            any(
                h.node in ("", node) and rank in h.ranks and (h.tier, h.node, h.step, rank) not in strikes
                for h in inventory
                if h.step == step.dirname
            )
            for node in nodes
            for rank in range(2)
        )

    possible = [step for step in {StepId.parse(h.step) for h in inventory} if step is not None and reachable(step)]
    assert (choice.step if choice else None) == max(possible, default=None)
    if choice is None:
        return
    for node in nodes:
        for rank in range(choice.world_size):
            tiers = choice.sources[node][rank]
            assert tiers and len(set(tiers)) == len(tiers)
            assert "local" not in tiers[1:], "the local copy is the first to try"
            for tier in tiers:
                assert (tier, node if tier == "local" else "", choice.step.dirname, rank) not in strikes
    shuffled = list(inventory)
    random.Random(seed).shuffle(shuffled)
    again = plan_restore(shuffled, list(reversed(nodes)), set(strikes))
    assert again is not None and again.step == choice.step
    assert {n: {r: set(t) for r, t in s.items()} for n, s in again.sources.items()} == {
        n: {r: set(t) for r, t in s.items()} for n, s in choice.sources.items()
    }


def test_each_host_has_its_half_and_the_store_nothing() -> None:
    inventory = [held(1, (0,), node="n0"), held(1, (1,), node="n1")]
    assert plan_restore(inventory, NODES) is None, "no host can reach the other's disk"
    assert plan_restore([*inventory, held(1, tier="store", node="")], NODES) is not None


def test_a_step_only_one_host_has_is_not_chosen() -> None:
    found = plan_restore([held(2, node="n0"), held(1, node="n0"), held(1, node="n1")], NODES)
    assert found is not None and found.step.step == 1


def test_places_that_disagree_about_the_world_size() -> None:
    """One of them is damaged; taking the smaller number would leave shards out."""
    for inventory in (
        [held(1, (0,), world_size=1), held(1, tier="store", node="")],
        [held(1, tier="store", node=""), held(1, (0,), world_size=1)],
    ):
        found = plan_restore(inventory, ["n0"])
        assert found is None or found.world_size == 2
    assert plan_restore([held(1, (0,), world_size=10**9)], ["n0"]) is None


def test_exact_saves_win_among_those_of_one_step() -> None:
    inventory = [held(5), held(5, serial=1, exact=False)]
    found = plan_restore(inventory, ["n0"])
    assert found is not None and found.step.serial == 0
    later = plan_restore([*inventory, held(6, exact=False)], ["n0"])
    assert later is not None and later.step.step == 6


def test_only_the_step_that_was_asked_for() -> None:
    inventory = [held(1), held(2)]
    found = plan_restore(inventory, ["n0"], only=StepId(1, 1, "000000"))
    assert found is not None and found.step.step == 1
    assert plan_restore(inventory, ["n0"], only=StepId(3, 1, "000000")) is None


def test_holdings_travel_as_json() -> None:
    import json

    one = held(3, (1,), tier="store", node="", exact=False)
    assert StepInventory.from_list(json.loads(json.dumps(one.to_list()))) == one
