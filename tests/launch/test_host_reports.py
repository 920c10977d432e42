"""What a launcher says to the monitor of its host."""

from __future__ import annotations

from typing import Any

from resiliency.launch.hangs import Seen
from resiliency.launch.host_reports import HostReports
from resiliency.launch.monitor_link import MonitorLink
from resiliency.runtime.heartbeat_page import Page, Phase
from resiliency.runtime.messages.launcher import kind_of
from resiliency.runtime.messages.monitor import RankReport


class _Link(MonitorLink):
    """Nobody listens; what stands and what was told is kept."""

    def __init__(self) -> None:
        super().__init__("nobody")
        self.told: list[Any] = []

    def tell(self, message: Any) -> None:
        self.told.append(message)

    @property
    def standing(self) -> list[str]:
        return [kind_of(message) for message in self._standing.values()]


def _page(attempt: int) -> Page:
    return Page(beats=7, last_s=98.0, longest_s=0.5, watched=True, phase=Phase.TRAINING, attempt=attempt, step=40)


def test_a_page_of_the_generation_before_says_nothing_about_this_one() -> None:
    link = _Link()
    reports = HostReports(link)
    reports.started(3)
    seen = {
        rank: Seen(page=_page(attempt), quiet_s=2.0, stopped_s=0.0, own_s=1.5, own_steps=6)
        for rank, attempt in ((4, 1), (5, 2))
    }
    reports.pages({**seen, 6: Seen(page=None, quiet_s=0.0, stopped_s=1.5)}, now_s=100.0)
    old, new, none = link.told[0].ranks
    assert old == RankReport(rank=4)
    assert new == RankReport(
        rank=5,
        beats=7,
        step=40,
        phase="training",
        watched=True,
        quiet_s=2.0,
        longest_s=0.5,
        own_s=1.5,
        own_steps=6,
    )
    assert none == RankReport(rank=6, stopped_s=1.5)


def test_what_stands_is_what_is_true_now() -> None:
    link = _Link()
    reports = HostReports(link)
    reports.waiting(warm=False)
    reports.waiting(warm=True)
    assert link.standing == ["waiting"]
    reports.started(1)
    reports.running({0: (0, 100), 1: (1, 101)})
    reports.lost_peers([1])
    assert link.standing == ["running", "lost_peers"]
    reports.lost_peers([])
    assert link.standing == ["running"]
    reports.lost_peers([0], ended=[1])
    reports.waiting(warm=True)
    assert link.standing == ["lost_peers", "waiting"] and reports.has_said_why
    reports.started(2)
    assert link.standing == [] and not reports.has_said_why
    reports.lost(1, -9)
    reports.lost(0, 3, reason="no data")
    reports.waiting(warm=True)
    assert link.standing == ["lost", "lost", "waiting"] and reports.has_said_why
    reports.started(3)
    assert link.standing == []
    reports.running({0: (0, 102)})
    reports.ended(preempted=False)
    reports.waiting(warm=True)
    assert link.standing == ["ended"], "who has ended waits, too, and is not to be taken for one that never began"
