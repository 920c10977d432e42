"""What the launcher tells the monitor of its host about its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resiliency.launch.hangs import Seen
from resiliency.launch.heartbeat_page import MOST_ATTEMPT
from resiliency.launch.monitor_link import MonitorLink

__all__ = ["HostReports"]


class HostReports:
    """Thread: one. Nothing blocks. What is true still is said again to a monitor that was started again.

    Args:
        link: to the monitor.
    """

    def __init__(self, link: MonitorLink) -> None:
        self._link = link
        self._epoch = 0
        self._ranks: dict[str, list[int]] = {}
        self._lost: set[int] = set()
        self._lost_peers: list[int] = []
        self._ended = False

    @property
    def has_said_why(self) -> bool:
        """A rank of this epoch was said to be lost, or to have lost a peer."""
        return bool(self._lost or self._lost_peers)

    def waiting(self, *, warm: bool) -> None:
        """There are no ranks. Not after all have finished, which says as much."""
        self._link.take_back("running")
        if not self._ended:
            self._link.stand("waiting", {"kind": "waiting", "epoch": self._epoch, "warm": warm})

    def started(self, epoch: int) -> None:
        """Ranks of an epoch are being started: what was said of the one before is of no interest any more."""
        self._link.take_back("waiting", "running", "lost_peers", "ended", *(("lost", rank) for rank in self._lost))
        self._epoch, self._ended = epoch, False
        self._ranks, self._lost, self._lost_peers = {}, set(), []

    def running(self, ranks: Mapping[int, tuple[int, int]]) -> None:
        """Args: ranks: local rank -> global rank and process."""
        found = {str(local): list(one) for local, one in ranks.items()}
        if found != self._ranks:
            self._ranks = found
            self._link.stand("running", {"kind": "running", "epoch": self._epoch, "ranks": found})

    def lost(self, rank: int, code: int, *, reason: str = "", preempted: bool = False) -> None:
        """A rank has failed. Args: code: negative when a signal ended it."""
        how = {"signal": -code} if code < 0 else {"exit_code": code}
        message = {"kind": "lost", "epoch": self._epoch, "rank": rank, **how, "reason": reason, "preempted": preempted}
        self._lost.add(rank)
        self._link.stand(("lost", rank), message)

    def lost_peers(self, ranks: Iterable[int]) -> None:
        """Ranks wait, because a peer is gone, and none of this host has failed."""
        found = sorted(ranks)
        if found == self._lost_peers:
            return
        self._lost_peers = found
        if found:
            self._link.stand("lost_peers", {"kind": "lost_peers", "epoch": self._epoch, "ranks": found})
        else:
            self._link.take_back("lost_peers")

    def ended(self, *, preempted: bool) -> None:
        self._ended = True
        self._link.take_back("running", "lost_peers")
        self._link.stand("ended", {"kind": "ended", "epoch": self._epoch, "preempted": preempted})

    def pages(self, seen: Mapping[int, Seen], *, now_s: float) -> None:
        """How far ranks are. One that goes on in its process says so when it has begun this epoch: what its page shows
        until then is of the one before."""
        ranks = [_page_of(rank, one, attempt=self._epoch - 1, now_s=now_s) for rank, one in sorted(seen.items())]
        self._link.tell({"kind": "pages", "epoch": self._epoch, "ranks": ranks})

    def saved(self, *, problem: str = "") -> None:
        """The answer to a wish for a save. Args: problem: "": all ranks know that it is committed."""
        self._link.tell({"kind": "saved", "epoch": self._epoch, "problem": problem})


def _page_of(rank: int, seen: Seen, *, attempt: int, now_s: float) -> dict[str, Any]:
    page = seen.page
    if page is None or page.attempt != min(attempt, MOST_ATTEMPT):
        said: dict[str, Any] = {"beats": 0, "step": -1, "phase": "", "watched": False, "quiet_s": 0.0, "longest_s": 0.0}
        said.update(saved=-1, own_s=0.0, own_steps=0)
    else:
        said = {
            "beats": page.beats,
            "step": page.step,
            "phase": str(page.phase),
            "watched": page.watched,
            "quiet_s": round(max(0.0, now_s - page.last_s), 3) if page.last_s else 0.0,
            "longest_s": round(page.longest_s, 6),
            "saved": seen.saved,
            "own_s": round(seen.own_s, 6),
            "own_steps": seen.own_steps,
        }
    return {"rank": rank, **said, "stopped_s": round(seen.stopped_s, 3)}
