"""What to change, from what was measured: one sentence for each of the largest causes. Pure.

A rule speaks only where figures of the log support it; a cause without one has no advice. What a change would return
is at most what it can take away, in wall time.
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

#: A cause with a smaller share is not worth a sentence.
LEAST_SHARE = 0.01
MOST_CAUSES = 3


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``text`` says what was measured and what to change; ``returns_s`` is what that would return at most, in seconds
    of wall time."""

    bucket: Bucket
    text: str
    returns_s: float


def largest_causes(ledger: Ledger) -> list[Bucket]:
    """At most three buckets that cost the most, each more than a hundredth, and can be made smaller."""
    rows = [bucket for bucket, info in BUCKETS.items() if info.lever and ledger.share(bucket) > LEAST_SHARE]
    return sorted(rows, key=lambda bucket: -ledger.share(bucket))[:MOST_CAUSES]


def advise(ledger: Ledger) -> dict[Bucket, Advice]:
    """What to change, for those of the largest causes of which the log shows enough."""
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
