"""What hosts are told is what was decided, whole."""

from __future__ import annotations

import json

from resiliency.storage.typed_json import from_jsonable
from resiliency.supervisor.controller import Changes
from resiliency.supervisor.decided import Decided
from resiliency.supervisor.model import Place, Workload, WorkloadSpec, WorkloadState


def test_each_host_is_told_every_field_of_its_place() -> None:
    workload = Workload(
        spec=WorkloadSpec(name="job", replicas=2),
        state=WorkloadState.REMEDYING,
        epoch=7,
        places=("a", "b"),
        fresh=True,
        replace=(1, 3),
        replicas_before=4,
    )
    decided = Decided()
    decided.apply(Changes(workloads={"job": workload}))
    told = {host: from_jsonable(Place, json.loads(decided.place_text(host))) for host in ("b", "a")}
    assert told == {host: workload.place_of(host) for host in ("a", "b")}
    assert told["b"].replace == (1, 3) and told["b"].nodes == 2 and decided.place_text("c") == "null"


def test_another_rank_to_replace_is_news_for_the_hosts() -> None:
    workload = Workload(
        spec=WorkloadSpec(name="job", replicas=2), state=WorkloadState.REMEDYING, epoch=7, places=("a", "b")
    )
    decided = Decided()
    decided.apply(Changes(workloads={"job": workload}))
    later = Workload(**{**vars(workload), "replace": (1,)})
    assert decided.apply(Changes(workloads={"job": later})) == {"a", "b"}
    assert json.loads(decided.place_text("a"))["replace"] == [1]


def test_what_a_host_is_told_does_not_grow_with_the_workload() -> None:
    def size(hosts: int) -> int:
        places = tuple(f"host-{number}" for number in range(hosts))
        spec = WorkloadSpec(name="job", replicas=hosts)
        decided = Decided()
        decided.apply(Changes(workloads={"job": Workload(spec=spec, epoch=1, places=places)}))
        return len(decided.place_text("host-1"))

    assert size(10_000) <= size(10) + 10
