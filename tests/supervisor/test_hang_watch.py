"""Which rank hangs, from what all hosts say."""

from __future__ import annotations

from resiliency.runtime.messages.monitor import RankReport
from resiliency.supervisor.hang_watch import HangWatch


def test_a_host_whose_ranks_have_finished_is_not_waited_for() -> None:
    watch = HangWatch(steps=3.0, floor_s=1.0)
    good = RankReport(rank=0, beats=9, watched=True, longest_s=0.1)
    hung = RankReport(rank=1, beats=9, watched=True, quiet_s=60.0, longest_s=0.1)
    assert watch.reported("job", 1, "a", (good,), 0.0) is None
    assert watch.reported("job", 1, "b", (hung,), 0.0) is None
    watch.left("job", 1, "a")
    found = [watch.reported("job", 1, "b", (hung,), float(moment)) for moment in range(1, 4)]
    (said,) = [one for one in found if one is not None]
    assert (said.host, said.rank) == ("b", 1)
