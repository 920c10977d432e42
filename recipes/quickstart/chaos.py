"""Draws from a seed which processes to kill at which steps, and kills them when the event log shows those steps."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from enum import Enum

from recipes.quickstart.follow import Follower, Record

__all__ = ["Killer", "Kill", "Shot", "Victim", "draw_kills"]


class Victim(Enum):
    """Which processes a kill hits."""

    RANK = "one rank"
    ALL_RANKS = "all ranks"
    AGENT = "the host agent"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One planned SIGKILL.

    Attributes:
        after_step: the kill waits until training has reached this step.
        in_save: then it waits for the next start of a save; False: for the next end of a step.
        delay_s: seconds it waits after that, so that kills hit every stage of a save.
        rank: the rank that is killed when the victim is one rank.
    """

    after_step: int
    victim: Victim
    in_save: bool
    delay_s: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One SIGKILL that was sent: when (monotonic seconds), at which step, in which attempt."""

    kill: Kill
    time_s: float
    step: int
    attempt: int


def draw_kills(*, seed: int, count: int, steps: int, ranks: int) -> list[Kill]:
    """Kills spread over the run: every kind of victim in turn, and every second one in the middle of a save."""
    random_ = random.Random(seed)
    victims = [Victim.RANK, Victim.ALL_RANKS, Victim.AGENT]
    kinds = [(victim, in_save) for in_save in (True, False) for victim in victims]
    random_.shuffle(kinds)
    room = steps / (count + 1)
    return [
        Kill(
            after_step=round(room * (index + 1) + random_.uniform(-0.3, 0.3) * room),
            victim=kinds[index % len(kinds)][0],
            in_save=kinds[index % len(kinds)][1],
            delay_s=random_.uniform(0.0, 0.02),
            rank=random_.randrange(ranks),
        )
        for index in range(count)
    ]


class Killer:
    """Carries out planned kills in order. Thread: the one that polls the follower.

    Attributes:
        shots: kills sent so far.
    """

    def __init__(self, kills: list[Kill], follower: Follower, *, ranks: int) -> None:
        self._left = list(kills)
        self._follower = follower
        self._ranks = ranks
        self._hit_attempt = 0
        self.shots: list[Shot] = []

    def consider(self, fresh: list[Record]) -> None:
        """Looks at new records and kills if the next kill is due. Blocks: up to 20 ms."""
        follower = self._follower
        if not self._left or not follower.moved or len(follower.workers) < self._ranks:
            return
        kill = self._left[0]
        if follower.attempt == self._hit_attempt or follower.step < kill.after_step:
            return  # the attempt that was hit is ending; its last records do not count
        trigger = "checkpoint_started" if kill.in_save else "step"
        if not any(record["event_type"] == trigger and record["attempt"] == follower.attempt for record in fresh):
            return
        if kill.delay_s:
            time.sleep(kill.delay_s)  # the kill is to hit a moment between two events
        if self._fire(kill):
            self._left.pop(0)

    def _fire(self, kill: Kill) -> bool:
        follower = self._follower
        if kill.victim is Victim.AGENT:
            pids = [process.pid for process in follower.living_agents()]
        elif kill.victim is Victim.ALL_RANKS:
            pids = list(follower.workers.values())
        else:
            pids = [follower.workers[kill.rank]]
        if not pids:
            return False
        shot = Shot(kill=kill, time_s=time.monotonic(), step=follower.step, attempt=follower.attempt)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        if kill.victim is not Victim.AGENT:
            self._hit_attempt = follower.attempt
        self.shots.append(shot)
        return True
