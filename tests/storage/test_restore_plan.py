"""Which step every host restores, and from where: pure, the same on every rank, and never a step some host cannot get."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.storage.inventory import StepInventory
from resiliency.storage.passed_over import steps_passed_over
from resiliency.storage.restore_plan import plan_restore
from resiliency.storage.sources import BadCopy, Cost, ShardSource
from resiliency.storage.step_id import StepId

SETTINGS = settings(deadline=None, database=None, max_examples=300, suppress_health_check=list(HealthCheck))
HOSTS = ["n0", "n1"]
STORE = ShardSource(tier="store", host=None, cost=Cost.REMOTE)
NFS = ShardSource(tier="nfs", host=None, cost=Cost.REMOTE)


def local(host: str) -> ShardSource:
    return ShardSource(tier="local", host=host, cost=Cost.LOCAL)


LOCAL = local("n0")


def peer(host: str) -> ShardSource:
    return ShardSource(tier="peer", host=host, cost=Cost.PEER)


def held(
    step: int,
    ranks: tuple[int, ...] = (0, 1),
    source: ShardSource = LOCAL,
    *,
    world_size: int = 2,
    attempt: int = 1,
    serial: int = 0,
    exact: bool = True,
    replicated: bool = False,
) -> StepInventory:
    return StepInventory(
        source=source,
        step=StepId(step, attempt, "000000", serial),
        world_size=world_size,
        ranks=ranks,
        exact=exact,
        replicated=replicated,
    )


@st.composite
def inventories(draw: st.DrawFn) -> tuple[list[StepInventory], list[str], set[BadCopy]]:
    hosts = draw(st.sampled_from([["n0"], ["n0", "n1"]]))
    found = []
    for step in draw(st.lists(st.integers(1, 4), max_size=4, unique=True)):
        attempt = draw(st.integers(1, 2))
        for source in [*map(local, hosts), *map(peer, hosts), STORE, NFS]:
            if draw(st.booleans()):
                ranks = tuple(sorted(draw(st.sets(st.integers(0, 1), min_size=1))))
                found.append(held(step, ranks, source, attempt=attempt))
    bad = {
        BadCopy(source=h.source, step=h.step, rank=rank)
        for h in found
        for rank in h.ranks
        if draw(st.integers(0, 4)) == 0
    }
    return found, hosts, bad


@SETTINGS
@given(inventories(), st.integers(0, 1000))
def test_the_newest_step_every_host_can_reach_is_chosen(
    given_: tuple[list[StepInventory], list[str], set[BadCopy]], seed: int
) -> None:
    inventory, hosts, bad = given_
    plan = plan_restore(inventory, hosts, bad)

    def usable(entry: StepInventory, host: str, rank: int) -> bool:
        return (
            (entry.source.cost is not Cost.LOCAL or entry.source.host == host)
            and rank in entry.ranks
            and BadCopy(source=entry.source, step=entry.step, rank=rank) not in bad
        )

    def reachable(step: StepId) -> bool:
        entries = [entry for entry in inventory if entry.step == step]
        return all(any(usable(entry, host, rank) for entry in entries) for host in hosts for rank in range(2))

    possible = [step for step in {entry.step for entry in inventory} if reachable(step)]
    assert (plan.step if plan else None) == max(possible, default=None)
    if plan is None:
        return
    for host in hosts:
        for rank in range(plan.world_size):
            sources = plan.sources[host][rank]
            assert set(sources) == {
                entry.source for entry in inventory if entry.step == plan.step and usable(entry, host, rank)
            }, "every usable source is there, and no other"
            assert len(set(sources)) == len(sources)
            assert [source.cost for source in sources] == sorted(source.cost for source in sources)
            assert plan.in_place(host, rank) == sources[0] and not plan.to_fetch(host), "of a sharded step"
            assert (rank in replace(plan, replicated=True).to_fetch(host)) == (sources[0] != local(host))
    assert plan.fetches == any(plan.to_fetch(host) for host in hosts)
    shuffled = list(inventory)
    random.Random(seed).shuffle(shuffled)
    again = plan_restore(shuffled, list(reversed(hosts)), set(bad))
    assert again is not None and again.step == plan.step
    assert {n: {r: set(t) for r, t in s.items()} for n, s in again.sources.items()} == {
        n: {r: set(t) for r, t in s.items()} for n, s in plan.sources.items()
    }


def test_each_host_has_its_half_and_the_store_nothing() -> None:
    inventory = [held(1, (0,), local("n0")), held(1, (1,), local("n1"))]
    assert plan_restore(inventory, HOSTS) is None, "no host can reach the other's disk"
    assert plan_restore([*inventory, held(1, source=STORE)], HOSTS) is not None


def test_a_newer_step_in_folders_of_single_hosts_is_out_of_reach_and_not_called_unfinished() -> None:
    inventory = [held(2, (0,), local("n0")), held(2, (1,), local("n1")), held(1, source=STORE)]
    taken = plan_restore(inventory, HOSTS)
    assert taken is not None and taken.step.step == 1
    (passed,) = steps_passed_over(inventory, taken.step, [], lambda entries: plan_restore(entries, HOSTS))
    said = str(passed)
    assert "out of reach: " in said and "unfinished" not in said
    assert "shards 0 in" in said and "of n0" in said and "shards 1 in" in said and "of n1" in said


def test_a_peers_memory_is_tried_before_the_object_store_and_after_the_own_disk() -> None:
    inventory = [
        held(1, source=STORE),
        held(1, source=peer("n1")),
        held(1, (0,), local("n0")),
        held(1, (1,), local("n1")),
    ]
    plan = plan_restore(inventory, HOSTS)
    assert plan is not None and not plan.fetches
    assert plan.sources["n0"] == {0: (local("n0"), peer("n1"), STORE), 1: (peer("n1"), STORE)}
    assert plan.in_place("n0", 0) == local("n0") and plan.in_place("n0", 1) == peer("n1")
    plan = replace(plan, replicated=True)
    assert plan.fetches and plan.to_fetch("n0") == [1] and plan.to_fetch("n1") == [0]
    assert plan.in_place("n0", 0) == local("n0") and plan.in_place("n0", 1) is None


def test_remote_tiers_are_tried_in_the_order_of_the_inventory() -> None:
    for first, second in ((NFS, STORE), (STORE, NFS)):
        plan = plan_restore([held(1, source=first), held(1, source=second)], ["n0"])
        assert plan is not None and plan.sources["n0"][0] == (first, second)


def test_a_bad_copy_on_one_host_says_nothing_of_the_same_tier_on_another() -> None:
    inventory = [held(1, source=local("n0")), held(1, source=local("n1"))]
    bad = BadCopy(source=local("n0"), step=StepId(1, 1, "000000"), rank=0)
    assert plan_restore(inventory, ["n1"], {bad}) is not None
    assert plan_restore(inventory, HOSTS, {bad}) is None


def test_a_step_only_one_host_has_is_not_chosen() -> None:
    found = plan_restore([held(2), held(1), held(1, source=local("n1"))], HOSTS)
    assert found is not None and found.step.step == 1


def test_places_that_disagree_about_the_world_size() -> None:
    """One of them is damaged; taking the smaller number would leave shards out."""
    for inventory in (
        [held(1, (0,), world_size=1), held(1, source=STORE)],
        [held(1, source=STORE), held(1, (0,), world_size=1)],
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


# -- replicated steps: the state is whole in shard 0 ------------------------------------------------------------------

OF_HOST = {"n0": (0, 1), "n1": (2, 3)}


@st.composite
def replicated_steps(draw: st.DrawFn) -> tuple[list[StepInventory], dict[str, tuple[int, ...]]]:
    """Steps of up to four ranks, and the ranks of each host of a job that may be larger or smaller."""
    world_size = draw(st.integers(1, 4))
    found = []
    for step in range(1, draw(st.integers(1, 3)) + 1):
        for source in [*map(local, HOSTS), *map(peer, HOSTS), STORE]:
            if draw(st.booleans()):
                ranks = tuple(sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1))))
                found.append(held(step, ranks, source, world_size=world_size, replicated=True))
    return found, draw(st.sampled_from([OF_HOST, {"n0": (0,), "n1": (1,)}, {"n0": (0, 1, 2), "n1": (3, 4, 5)}]))


@SETTINGS
@given(replicated_steps())
def test_of_a_replicated_step_a_host_needs_shard_0_and_takes_what_its_ranks_have_of_their_own(
    given_: tuple[list[StepInventory], dict[str, tuple[int, ...]]],
) -> None:
    inventory, of_host = given_
    plan = plan_restore(inventory, HOSTS, ranks=of_host)

    def reach(step: StepId, host: str, rank: int) -> set[ShardSource]:
        return {
            entry.source
            for entry in inventory
            if entry.step == step
            and rank in entry.ranks
            and (entry.source.cost is not Cost.LOCAL or entry.source.host == host)
        }

    def possible(step: StepId) -> bool:
        entries = [entry for entry in inventory if entry.step == step]
        whole = {rank for entry in entries for rank in entry.ranks} == set(range(entries[0].world_size))
        return whole and all(reach(step, host, 0) for host in HOSTS)

    steps = [step for step in {entry.step for entry in inventory} if possible(step)]
    assert (plan.step if plan else None) == max(steps, default=None)
    if plan is None:
        return
    assert plan.replicated
    for host in HOSTS:
        wanted = {0, *(rank for rank in of_host[host] if rank < plan.world_size)}
        assert {rank: set(sources) for rank, sources in plan.sources[host].items()} == {
            rank: reach(plan.step, host, rank) for rank in wanted if reach(plan.step, host, rank)
        }
        assert set(plan.to_fetch(host)) <= wanted


def test_each_host_of_private_folders_restores_its_own_copy_of_a_replicated_step_without_fetching() -> None:
    inventory = [
        held(1, (0, 1), local("n0"), world_size=4, replicated=True),
        held(1, (0, 2, 3), local("n1"), world_size=4, replicated=True),
    ]
    plan = plan_restore(inventory, HOSTS, ranks=OF_HOST)
    assert plan is not None and not plan.fetches
    assert {host: sorted(sources) for host, sources in plan.sources.items()} == {"n0": [0, 1], "n1": [0, 2, 3]}
    assert plan_restore([replace(entry, replicated=False) for entry in inventory], HOSTS, ranks=OF_HOST) is None, (
        "of a sharded step every host needs every shard"
    )


def test_a_new_host_gets_shard_0_and_does_without_what_its_ranks_never_had() -> None:
    """A job that grew from one host to two: ranks 2 and 3 have no shard in the step."""
    inventory = [held(1, source=LOCAL, replicated=True), held(1, source=STORE, replicated=True)]
    plan = plan_restore(inventory, HOSTS, ranks=OF_HOST)
    assert plan is not None
    assert plan.to_fetch("n0") == [] and plan.to_fetch("n1") == [0] and sorted(plan.sources["n1"]) == [0]


def test_a_rank_whose_own_part_is_lost_does_not_keep_the_job_from_the_step() -> None:
    """Its random state is gone, which its loader warns of; the weights are not."""
    inventory = [held(2, replicated=True), held(1, replicated=True)]
    bad = {BadCopy(source=LOCAL, step=StepId(2, 1, "000000"), rank=1)}
    plan = plan_restore(inventory, ["n0"], bad, ranks={"n0": (0, 1)})
    assert plan is not None and plan.step.step == 2 and sorted(plan.sources["n0"]) == [0]
    bad = {BadCopy(source=LOCAL, step=StepId(2, 1, "000000"), rank=0)}
    plan = plan_restore(inventory, ["n0"], bad, ranks={"n0": (0, 1)})
    assert plan is not None and plan.step.step == 1, "without shard 0 nothing is left of a step"


def test_without_knowing_the_ranks_of_hosts_every_host_takes_every_shard_it_can_get() -> None:
    plan = plan_restore([held(1, (0, 1, 2), source=STORE, world_size=3, replicated=True)], HOSTS)
    assert plan is not None
    assert {host: sorted(sources) for host, sources in plan.sources.items()} == {"n0": [0, 1, 2], "n1": [0, 1, 2]}
