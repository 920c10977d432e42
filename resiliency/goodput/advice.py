"""Advice on what to change: one sentence with measured figures for each of the largest causes of lost time. Pure.

A rule gives advice only where figures in the log support it; otherwise its cause has none. A change never returns more
wall time than its bucket holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resiliency.goodput import advice_on_failures, advice_on_starts, advice_on_steps
from resiliency.goodput.advice_words import Said, wall
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.goodput.words import duration, figure

__all__ = ["Advice", "advise", "largest_causes"]

#: A bucket with a smaller share of the time gets no advice.
LEAST_SHARE = 0.01
MOST_CAUSES = 3


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``text`` says what was measured and what to change; ``returns_s`` is the most that the change would return, in
    seconds of wall time."""

    bucket: Bucket
    text: str
    returns_s: float


def largest_causes(ledger: Ledger) -> list[Bucket]:
    """The at most three largest buckets that have a lever and more than 1 % of the time, the largest first."""
    rows = [bucket for bucket, info in BUCKETS.items() if info.lever and ledger.share(bucket) > LEAST_SHARE]
    return sorted(rows, key=lambda bucket: -ledger.share(bucket))[:MOST_CAUSES]


def advise(ledger: Ledger) -> dict[Bucket, Advice]:
    """Advice by bucket, for those of the largest causes whose rule finds enough figures in the log."""
    found = {}
    for bucket in largest_causes(ledger):
        rule = _RULES.get(bucket)
        said = rule(ledger) if rule is not None else None
        if said is not None:
            words, returns_s = said
            returns_s = min(returns_s, wall(ledger, bucket))
            share = returns_s / max(1e-9, ledger.wall_us / 1e6)
            if share >= LEAST_SHARE / 2:
                text = f"{words} would return up to {duration(returns_s)}, {figure(share)} of the run"
                found[bucket] = Advice(bucket=bucket, text=text, returns_s=returns_s)
    return found


_RULES: dict[Bucket, Callable[[Ledger], Said | None]] = {
    Bucket.FIRST_START: advice_on_starts.first_start,
    Bucket.RESTART: advice_on_starts.restart,
    Bucket.RESTORE: advice_on_starts.restore,
    Bucket.WARM_UP: advice_on_starts.warm_up,
    Bucket.DETECTION: advice_on_failures.detection,
    Bucket.LOST_WORK: advice_on_failures.lost_work,
    Bucket.CHECKPOINT_STALL: advice_on_failures.stall,
    Bucket.INTERFERENCE: advice_on_failures.interference,
    Bucket.DATA_WAIT: advice_on_steps.data_wait,
    Bucket.LOOP: advice_on_steps.loop,
    Bucket.SLOWDOWN: advice_on_steps.slowdown,
    Bucket.STRAGGLER: advice_on_steps.straggler,
    Bucket.SCALED_DOWN: advice_on_steps.scaled_down,
    Bucket.IDLE: advice_on_steps.idle,
}
