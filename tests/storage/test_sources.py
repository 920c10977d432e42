"""Where a shard can be had: cheapest first, without the copies known to be bad, and checked when another rank says it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resiliency.errors import ConfigError, TierError
from resiliency.runtime.typed_json import decode, encode, to_jsonable
from resiliency.storage.sources import BadCopy, Cost, Opener, ShardSource, SourceResolver, open_source
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier

STEP, OTHER = StepId(7, 1, "0a0b0c"), StepId(8, 1, "0a0b0c")
LOCAL = ShardSource(tier="local", host="n0", cost=Cost.LOCAL)
REPLICATOR = ShardSource(tier="replicator", host="n0", cost=Cost.LOCAL)
PEER = ShardSource(tier="peer", host="n1", cost=Cost.PEER)
STORE = ShardSource(tier="store", host=None, cost=Cost.REMOTE)
ALL = (STORE, PEER, REPLICATOR, LOCAL)


def test_the_cheapest_source_comes_first_and_equal_ones_stay_in_order() -> None:
    resolver = SourceResolver(STEP, [(source, [0]) for source in ALL])
    assert resolver.sources("n0", 0) == (REPLICATOR, LOCAL, PEER, STORE)


def test_a_hosts_own_files_are_no_source_for_another_host() -> None:
    resolver = SourceResolver(STEP, [(source, [0]) for source in ALL])
    assert resolver.sources("n2", 0) == (PEER, STORE)
    assert resolver.sources("n1", 0) == (PEER, STORE)


def test_a_source_is_one_only_for_the_shards_it_has() -> None:
    resolver = SourceResolver(STEP, [(LOCAL, [0]), (STORE, [1])])
    assert resolver.sources("n0", 0) == (LOCAL,) and resolver.sources("n0", 1) == (STORE,)
    assert resolver.sources("n0", 2) == ()


def test_a_bad_copy_is_left_out_and_nothing_else() -> None:
    bad = {BadCopy(source=LOCAL, step=STEP, rank=0), BadCopy(source=STORE, step=OTHER, rank=1)}
    resolver = SourceResolver(STEP, [(LOCAL, [0, 1]), (STORE, [0, 1])], bad)
    assert resolver.sources("n0", 0) == (STORE,), "the bad copy is tried again"
    assert resolver.sources("n0", 1) == (LOCAL, STORE), "the bad copy of another rank or step is held against this one"


def test_a_source_listed_twice_is_tried_once() -> None:
    assert SourceResolver(STEP, [(STORE, [0]), (STORE, [0])]).sources("n0", 0) == (STORE,)


@pytest.mark.parametrize("host, cost", [(None, Cost.LOCAL), (None, Cost.PEER), ("n0", Cost.REMOTE)])
def test_a_source_that_cannot_be_is_refused(host: str | None, cost: Cost) -> None:
    with pytest.raises(ConfigError, match="pass a host with LOCAL and PEER"):
        ShardSource(tier="x", host=host, cost=cost)


def test_a_new_kind_of_source_needs_an_opener_and_nothing_else() -> None:
    openers: dict[str, Opener] = {
        "store": lambda source: LocalTier("/store"),
        "peer": lambda source: LocalTier(f"/memory-of-{source.host}"),
    }
    assert open_source(PEER, openers).root == "/memory-of-n1"
    assert open_source(STORE, openers).root == "/store"
    with pytest.raises(TierError, match=r"no tier named 'local', only peer, store; pass the same tiers on all ranks"):
        open_source(LOCAL, openers)


@pytest.mark.parametrize("source", ALL, ids=str)
def test_what_one_rank_says_another_reads(source: ShardSource) -> None:
    copy = BadCopy(source=source, step=STEP, rank=3)
    assert decode(BadCopy, encode(copy), what="it") == copy


GOOD = to_jsonable(BadCopy(source=LOCAL, step=STEP, rank=3))


@pytest.mark.parametrize(
    "data, problem",
    [
        ([], "BadCopy must be an object, not list"),
        ({}, "BadCopy lacks the field 'source'"),
        ({**GOOD, "source": "local"}, "BadCopy.source must be an object, not str"),
        ({**GOOD, "source": {"tier": "local", "cost": "LOCAL"}}, "ShardSource lacks the field 'host'"),
        ({**GOOD, "source": {"tier": "local", "cost": "LOCAL", "host": None}}, "pass a host with LOCAL"),
        (
            {**GOOD, "source": {"tier": "local", "cost": "CHEAP", "host": "n0"}},
            "cost is 'CHEAP', not one of LOCAL, PEER",
        ),
        ({**GOOD, "step": {**GOOD["step"], "token": "../../etc"}}, "step is invalid"),
        ({**GOOD, "rank": True}, "rank must be int, not bool"),
        ({**GOOD, "rank": "3"}, "rank must be int, not str"),
        ({**GOOD, "more": 1}, "no field 'more'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_field(data: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"the list of rank 5 cannot be read: .*{problem}"):
        decode(BadCopy, json.dumps(data).encode(), what="the list of rank 5")
