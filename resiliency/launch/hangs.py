"""Decides from heartbeats which ranks hang. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resiliency.runtime.heartbeat import Page

__all__ = ["Seen", "hang_text", "hung", "threshold"]

#: A rank counts as quiet when its current step takes this many times its longest one so far.
_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look found of a rank.

    Attributes:
        page: its heartbeat page; None: it has not beaten yet.
        quiet_s: seconds since its last beat.
        stopped_s: seconds for which it was seen stopped by a signal; 0: it is not stopped.
        saved: the newest optimizer step that it knows to be committed; -1: none.
        own_s, own_steps: seconds of its own work since its attempt began, and the number of steps they cover; 0 steps:
            it does not measure its work.
    """

    page: Page | None
    quiet_s: float
    stopped_s: float
    saved: int = -1
    own_s: float = 0.0
    own_steps: int = 0

    @property
    def beats(self) -> int:
        return self.page.beats if self.page is not None else 0

    def hangs(self, *, floor_s: float) -> bool:
        """True when the rank makes no progress, whether it holds up others or waits for them. A rank stopped by a
        signal hangs in any phase, even before its first beat."""
        if self.stopped_s > floor_s:
            return True
        page = self.page
        return page is not None and page.watched and self.quiet_s > threshold(page, floor_s=floor_s)


def threshold(page: Page, *, floor_s: float) -> float:
    """Seconds without a beat after which a rank hangs."""
    return max(floor_s, _FACTOR * page.longest_s)


def hung(ranks: Mapping[int, Seen], *, floor_s: float) -> list[int]:
    """The ranks to kill, sorted: those that have been quiet too long and hold up the others; empty when none hangs.

    When one rank hangs, the others wait for it in a collective operation and are quiet as well. The hung one is stopped
    by a signal, or has made fewer beats than the others; where all made equally many, it is the one whose last beat is
    oldest.
    """
    quiet = {rank: seen for rank, seen in ranks.items() if seen.hangs(floor_s=floor_s)}
    if not quiet:
        return []
    stopped = sorted(rank for rank, seen in quiet.items() if seen.stopped_s)
    if stopped:
        return stopped
    fewest = min(seen.beats for seen in quiet.values())
    behind = [rank for rank, seen in quiet.items() if seen.beats == fewest]
    if len(behind) < len(quiet):
        return sorted(behind)
    return [max(behind, key=lambda rank: (quiet[rank].quiet_s, -rank))]


def hang_text(rank: int, pid: int, seen: Seen, ranks: Mapping[int, Seen]) -> str:
    """The log message for a hung rank."""
    others = [other.beats for number, other in ranks.items() if number != rank]
    compared = f"; the other ranks of this host are at {min(others)} to {max(others)}" if others else ""
    if others and min(others) == max(others) == seen.beats and not seen.stopped_s:
        compared += ", so that it may be another one that hangs"
    if seen.page is None or not seen.page.watched:
        what = f"was stopped by a signal {seen.stopped_s:.0f} s ago"
    else:
        state = ", and a signal has stopped it" if seen.stopped_s else ""
        longest = f"its longest step took {seen.page.longest_s:.2g} s"
        if not seen.page.longest_s:
            longest = "no step of it was measured yet: --hang-timeout must be longer than any takes"
        what = f"has made no progress for {seen.quiet_s:.0f} s ({longest}){state}"
    step = f"step {seen.page.step} ({seen.page.phase}), " if seen.page is not None and seen.page.step >= 0 else ""
    return (
        f"rank {rank} (process {pid}) {what}: it hangs, and is killed. It is at {step}{seen.beats} beats"
        f"{compared}. The stacks of all ranks are in their standard error"
    )
