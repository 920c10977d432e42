"""What launcher and host monitor tell each other, as it is sent."""

from __future__ import annotations

from typing import Any

import pytest

from resiliency.runtime.messages.launcher import (
    Control,
    Controlled,
    Lost,
    Master,
    NoPlace,
    Pages,
    Running,
    Save,
    Waiting,
    of_launcher,
    of_monitor,
    pack,
)
from resiliency.runtime.messages.monitor import RankReport
from resiliency.runtime.messages.places import Place, store_address

GIVEN = {"kind": "place", "generation": 2, "node_rank": 1, "nodes": 3, "master": "10.0.0.1:4000", "workload": "job"}


@pytest.mark.parametrize(
    "message",
    [
        Waiting(generation=2, warm=False),
        Master(generation=2, address="[fe80::1]:80"),
        Running(generation=2, ranks={"0": [4, 77]}),
        Lost(generation=2, rank=4, signal=9, reason="none"),
        Pages(generation=2, ranks=(RankReport(rank=4, beats=3),)),
        Control(action="xid", code=48, device="0"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_launcher_says_arrives_as_it_was(message: Any) -> None:
    assert of_launcher(pack(message)) == message
    with pytest.raises(ValueError, match="is none of place"):
        of_monitor(pack(message))


@pytest.mark.parametrize(
    "message",
    [
        Place(workload="job", generation=2, node_rank=1, nodes=3, replace=(4, 5)),
        NoPlace(),
        Save(step=7),
        Controlled(host="a", ranks={"0": 7}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_monitor_says_arrives_as_it_was(message: Any) -> None:
    assert of_monitor(pack(message)) == message
    with pytest.raises(ValueError, match="is none of waiting"):
        of_launcher(pack(message))


def test_what_is_not_known_yet_may_be_left_out_of_a_place_and_what_a_later_version_adds_is_ignored() -> None:
    place = of_monitor({**GIVEN, "replicas": 3, "replicas_before": 2, "replace": [4, 5], "of a later version": 1})
    assert isinstance(place, Place) and store_address(place.master) == ("10.0.0.1", 4000)
    assert (place.replicas, place.replicas_before, place.replace) == (3, 2, (4, 5))
    short = of_monitor({name: one for name, one in GIVEN.items() if name != "master"})
    assert isinstance(short, Place) and (short.master, short.replace) == ("", ())
    assert store_address("[fe80::1]:80") == ("fe80::1", 80)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", 0),
        ("generation", "2"),
        ("generation", True),
        ("generation", None),
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
        of_monitor({**GIVEN, name: value})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], "not an object"),
        ({}, "kind=None"),
        ({"kind": ["lost"]}, "is none of"),
        ({"kind": "lost", "generation": 1, "rank": "0"}, "Lost.rank"),
        ({"kind": "running", "generation": 1, "ranks": {"0": [0, -1]}}, "ranks must be"),
        ({"kind": "pages", "generation": 1, "ranks": [{"rank": 0}] * 5000}, "5000 ranks"),
        ({"kind": "master", "generation": 1, "address": "nowhere"}, "no address:port"),
    ],
)
def test_nonsense_of_a_launcher_is_refused(fields: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of_launcher(fields)
