"""What hosts are told is what was decided, whole."""

from __future__ import annotations

from resiliency.supervisor.decided import Decided
from resiliency.supervisor.model import Workload, WorkloadSpec, WorkloadState
from resiliency.supervisor.records import Changes


def test_another_rank_to_replace_is_news_for_the_hosts() -> None:
    workload = Workload(
        spec=WorkloadSpec(name="job", replicas=2), state=WorkloadState.REMEDYING, generation=7, places=("a", "b")
    )
    decided = Decided()
    decided.apply(Changes(workloads={"job": workload}))
    later = Workload(**{**vars(workload), "replace": (1,)})
    assert decided.apply(Changes(workloads={"job": later})) == {"a", "b"}
