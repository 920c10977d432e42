"""What the launcher reports about its ranks to the monitor of its host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resiliency.launch.hangs import Seen
from resiliency.launch.monitor_link import MonitorLink
from resiliency.runtime.heartbeat_page import MOST_ATTEMPT
from resiliency.runtime.messages.launcher import Ended, Lost, LostPeers, Pages, Running, Saved, Waiting
from resiliency.runtime.messages.monitor import RankReport

__all__ = ["HostReports"]


class HostReports:
    """Sends the reports over the link. Thread: one. Blocks: no. Reports that still hold are repeated to a restarted
    monitor.

    Args:
        link: to the monitor.
    """

    def __init__(self, link: MonitorLink) -> None:
        self._link = link
        self._generation = 0
        self._ranks: dict[str, list[int]] = {}
        self._lost: set[int] = set()
        self._lost_peers: tuple[int, ...] = ()
        self._ended = False

    @property
    def has_said_why(self) -> bool:
        """True when a rank of this generation was reported as lost, or as having lost a peer."""
        return bool(self._lost or self._lost_peers)

    def waiting(self, *, warm: bool) -> None:
        """Reports that this host has no ranks and waits. Sends nothing after all ranks have ended: that report says as
        much."""
        self._link.take_back("running")
        if not self._ended:
            self._link.stand("waiting", Waiting(generation=self._generation, warm=warm))

    def started(self, generation: int) -> None:
        """Begins the reports of a new generation, and withdraws those of the previous one."""
        self._link.take_back("waiting", "running", "lost_peers", "ended", *(("lost", rank) for rank in self._lost))
        self._generation, self._ended = generation, False
        self._ranks, self._lost, self._lost_peers = {}, set(), ()

    def running(self, ranks: Mapping[int, tuple[int, int]]) -> None:
        """Reports the running ranks. Args: ranks: local rank -> (global rank, process id)."""
        found = {str(local): list(one) for local, one in ranks.items()}
        if found != self._ranks:
            self._ranks = found
            self._link.stand("running", Running(generation=self._generation, ranks=found))

    def lost(self, rank: int, code: int, *, reason: str = "", preempted: bool = False) -> None:
        """Reports a failed rank. Args: code: its exit code, or minus the signal that ended it."""
        message = Lost(
            generation=self._generation,
            rank=rank,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            reason=reason,
            preempted=preempted,
        )
        self._lost.add(rank)
        self._link.stand(("lost", rank), message)

    def lost_peers(self, ranks: Iterable[int], *, ended: Iterable[int] = ()) -> None:
        """Reports the ranks that wait because a peer is gone, while no rank of this host has failed; empty withdraws
        it. Args: ended: ranks of this host that have ended with status 0."""
        found = tuple(sorted(ranks))
        if found == self._lost_peers:
            return
        self._lost_peers = found
        if found:
            self._link.stand(
                "lost_peers", LostPeers(generation=self._generation, ranks=found, ended=tuple(sorted(ended)))
            )
        else:
            self._link.take_back("lost_peers")

    def ended(self, *, preempted: bool) -> None:
        self._ended = True
        self._link.take_back("running", "lost_peers")
        self._link.stand("ended", Ended(generation=self._generation, preempted=preempted))

    def pages(self, seen: Mapping[int, Seen], *, now_s: float) -> None:
        """Reports the progress of the ranks. A process kept from the previous generation still shows that generation's
        page until it begins this one; until then zeros are reported for it.
        """
        ranks = [_page_of(rank, one, attempt=self._generation - 1, now_s=now_s) for rank, one in sorted(seen.items())]
        self._link.tell(Pages(generation=self._generation, ranks=tuple(ranks)))

    def saved(self, *, problem: str = "") -> None:
        """Answers a request for a save. Args: problem: why it failed; "": every rank knows that the save is
        committed."""
        self._link.tell(Saved(generation=self._generation, problem=problem))


def _page_of(rank: int, seen: Seen, *, attempt: int, now_s: float) -> RankReport:
    page, stopped_s = seen.page, round(seen.stopped_s, 3)
    if page is None or page.attempt != min(attempt, MOST_ATTEMPT):
        return RankReport(rank=rank, stopped_s=stopped_s)
    return RankReport(
        rank=rank,
        beats=page.beats,
        step=page.step,
        phase=str(page.phase),
        watched=page.watched,
        quiet_s=round(max(0.0, now_s - page.last_s), 3) if page.last_s else 0.0,
        longest_s=round(page.longest_s, 6),
        stopped_s=stopped_s,
        saved=seen.saved,
        own_s=round(seen.own_s, 6),
        own_steps=seen.own_steps,
    )
