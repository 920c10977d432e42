"""Advice on failures: how soon they are noticed, and how often to save. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from resiliency.events import EventKind
from resiliency.goodput.advice_words import INTERVAL_FACTOR, Said, launched, wall
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.words import duration, precise

__all__ = ["detection", "interference", "lost_work", "stall"]

#: The advised hang timeout is this many seconds, or this many usual steps where that is longer.
HANG_S, HANG_STEPS = 60.0, 10.0
#: There is no advice on hangs when noticing them sooner would save fewer seconds than this.
LEAST_S = 0.5


def detection(ledger: Ledger) -> Said | None:
    hung = saved = waited = 0.0
    longest = 0.0
    for timing in ledger.timings:
        if timing.noticed is None or timing.outcome != "failed":
            continue
        took = timing.noticed - timing.progress
        if any(mark.kind == EventKind.HANG_DETECTED for mark in timing.marks):
            enough = max(HANG_S, HANG_STEPS * (timing.usual_step_s or 0.0))
            longest = max(longest, enough)
            hung += 1
            waited += took
            saved += max(0.0, took - enough)
    if hung and saved > LEAST_S:
        each = f"{duration(waited / hung)} pass until {'a' if hung > 1 else 'the'} hang is noticed"
        return f"{each}, a usual step takes {_step(ledger)}: `--hang-timeout {math.ceil(longest)}`", saved
    failed = [timing for timing in ledger.timings if timing.outcome == "failed" and timing.noticed is not None]
    if failed and not hung and not launched(ledger):
        took = sum(timing.noticed - timing.progress for timing in failed if timing.noticed is not None)
        usual = ledger.usual_step_s or 0.0
        saved = took - usual * len(failed)
        if saved / len(failed) > 1.0:
            words = f"{duration(took / len(failed))} pass {_until_noticed(len(failed))}"
            return f"{words}: `resiliency run`, which sees the end of a process at once,", saved
    return None


def _until_noticed(count: int) -> str:
    return f"until each of {count} failures is noticed" if count > 1 else "until the failure is noticed"


def _step(ledger: Ledger) -> str:
    return precise(ledger.usual_step_s) if ledger.usual_step_s else "an unknown time"


@dataclass(frozen=True, kw_only=True)
class _Saves:
    """Saves are ``every`` steps apart and each costs ``cost_s`` seconds of training. Saves ``best`` steps apart would
    cost the least, and return ``returns_s`` seconds."""

    every: float
    cost_s: float
    failures: int
    best: int
    returns_s: float


def _saves(ledger: Ledger) -> _Saves | None:
    """Finds the interval between saves that costs the least; None when the log shows too little to compute it.

    With a save every T seconds of training, each failure loses T/2 seconds of work on average and each save costs c
    seconds. The sum is smallest at T = sqrt(2 c / failures per second).
    """
    usual, failures = ledger.usual_step_s, sum(timing.lost_above is not None for timing in ledger.timings)
    lanes = [timing.attempt.lanes[min(timing.attempt.lanes)] for timing in ledger.timings if timing.attempt.lanes]
    steps = sum(segment.steps.n for pieces in lanes for segment in pieces)
    count = sum(segment.saves for pieces in lanes for segment in pieces) or len(
        {step for _, step in ledger.facts.saves}
    )
    if not usual or not failures or count < 2 or not steps:
        return None
    every = steps / count
    lost_s = wall(ledger, Bucket.LOST_WORK)
    cost_s = (wall(ledger, Bucket.CHECKPOINT_STALL) + wall(ledger, Bucket.INTERFERENCE)) / count
    training_s = steps * usual
    best = max(1, round(math.sqrt(2 * cost_s * training_s / failures) / usual))
    now_s = lost_s + cost_s * count
    then_s = lost_s * min(1.0, best / every) if best < every else failures * best * usual / 2
    then_s += cost_s * steps / best
    return _Saves(every=every, cost_s=cost_s, failures=failures, best=best, returns_s=now_s - then_s)


def lost_work(ledger: Ledger) -> Said | None:
    saves = _saves(ledger)
    if saves is None or saves.best * INTERVAL_FACTOR > saves.every or saves.returns_s <= 0:
        return None
    return f"{_save_figures(saves)}: a save every {_steps(saves.best)}", saves.returns_s


def interference(ledger: Ledger) -> Said | None:
    saves = _saves(ledger)
    if saves is None or saves.best < INTERVAL_FACTOR * saves.every or saves.returns_s <= 0:
        return None
    return f"{_save_figures(saves)}: a save every {_steps(saves.best)}", saves.returns_s


def stall(ledger: Ledger) -> Said | None:
    rarer = interference(ledger)
    if rarer is not None:
        return rarer
    segments = [segment for timing in ledger.timings for segment in timing.attempt.segments]
    eager = sum(segment.stall_between_s for segment in segments)
    whole = sum(segment.stall_s for segment in segments)
    count = sum(segment.saves for segment in segments)
    if not count or whole <= 0:
        return None
    stalled = wall(ledger, Bucket.CHECKPOINT_STALL)
    if eager > 0.5 * whole:
        words = f"{duration(eager / count)} of each save copy before training goes on: late copies"
        return f"{words} (`lazy`, no changes to parameters between steps)", stalled * eager / whole
    words = f"{duration((whole - eager) / count)} of each save wait at the fence for the copy: more `copy_threads`"
    return f"{words}, or less state,", stalled * (1 - eager / whole)


def _save_figures(saves: _Saves) -> str:
    cost = f"costs {duration(saves.cost_s)}" if saves.cost_s else "costs nothing that shows"
    failures = "1 failure" if saves.failures == 1 else f"{saves.failures} failures"
    every = max(1, round(saves.every))
    return f"saves are {'one step' if every == 1 else _steps(every)} apart, one {cost}, and {failures} lost work"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"
