"""What the monitor of a host says, and what counts of it."""

from __future__ import annotations

from typing import Any

import pytest

from resiliency.launch.places import Orders, Place, Wish

GIVEN = {"kind": "place", "epoch": 2, "node_rank": 1, "nodes": 3, "master": "10.0.0.1:4000", "workload": "job"}


def _place(epoch: int, **more: Any) -> Place:
    return Place.of({**GIVEN, "epoch": epoch, **more})


def test_a_place_is_read_and_what_is_not_known_yet_may_be_left_out() -> None:
    place = Place.of({**GIVEN, "replicas": 3, "replicas_before": 2, "replace": [4, 5], "of a later version": 1})
    assert place.address() == ("10.0.0.1", 4000)
    assert (place.replicas, place.replicas_before, place.replace) == (3, 2, (4, 5))
    short = Place.of({name: one for name, one in GIVEN.items() if name != "master"})
    assert (short.master, short.replicas, short.replace) == ("", 0, ())
    assert _place(2, master="[fe80::1]:80").address() == ("fe80::1", 80)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", 0),
        ("epoch", "2"),
        ("epoch", True),
        ("epoch", None),
        ("node_rank", -1),
        ("node_rank", 3),
        ("nodes", 0),
        ("workload", ""),
        ("workload", 7),
        ("master", "10.0.0.1"),
        ("master", ":4000"),
        ("master", "host:http"),
        ("master", "host:70000"),
        ("replicas", -1),
        ("replace", "1"),
        ("replace", [1.5]),
    ],
)
def test_a_place_that_makes_no_sense_is_refused_by_the_name_of_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Place.of({**GIVEN, name: value})


def test_the_newest_place_counts_and_one_of_the_past_changes_nothing() -> None:
    orders = Orders()
    assert orders.wish is Wish.UNKNOWN and not orders.ends_ranks
    assert orders.give(_place(2)) and orders.give(_place(4, master=""))
    assert not orders.give(_place(3))
    assert orders.is_to_start and orders.place is not None
    assert orders.place.epoch == 4 and orders.place.master == ""
    assert orders.give(_place(4)), "its address is known now"
    assert orders.start().master == "10.0.0.1:4000"
    assert not orders.is_to_start and not orders.ends_ranks
    assert orders.give(_place(4)) and not orders.ends_ranks, "said again"
    assert not orders.give(_place(2)) and not orders.ends_ranks
    assert orders.give(_place(5)) and orders.ends_ranks
    assert orders.current is not None and orders.current.epoch == 4


def test_a_place_that_was_withdrawn_is_taken_when_it_is_given_again_unless_its_ranks_have_run() -> None:
    orders = Orders()
    orders.give(_place(1))
    orders.withdraw()
    assert orders.ends_ranks and not orders.is_to_start
    orders.give(_place(1))
    assert orders.is_to_start
    orders.start()
    orders.withdraw()
    orders.give(_place(1))
    assert not orders.is_to_start
    orders.complete()
    assert orders.ends_ranks and orders.wish is Wish.COMPLETED
