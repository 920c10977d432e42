"""The older library's goodput figure, and the reasons why it differs from ours. Pure.

Its formula: (highest saved step - lowest loaded step) x reference step time / (last event - first event).
"""

from __future__ import annotations

from dataclasses import dataclass

from resiliency.goodput.ledger import Ledger
from resiliency.goodput.taxonomy import Bucket

__all__ = ["OlderFigure", "older_figure"]


@dataclass(frozen=True, kw_only=True)
class OlderFigure:
    """``share`` in [0, inf) or None when the log lacks what the formula needs; ``reasons`` are sentences."""

    share: float | None
    steps_kept: int
    reference_step_s: float | None
    runtime_s: float
    reasons: tuple[str, ...]


def older_figure(ledger: Ledger, reference_step_s: float | None = None) -> OlderFigure:
    """Computes the older figure for a ledger.

    Args:
        ledger: our account of the run.
        reference_step_s: seconds a step should take; None: the usual step time of this run, or the pace of its saves.
    """
    facts = ledger.facts
    reasons: list[str] = []
    runtime = (
        (facts.last or ledger.end) - (facts.first or ledger.start) if not ledger.offsets else ledger.end - ledger.start
    )
    given = reference_step_s is not None
    reference = reference_step_s if given else (ledger.usual_step_s or _pace(ledger))
    loaded = facts.min_loaded_step
    if loaded is None and ledger.timings:
        loaded = ledger.timings[0].position or 0
        reasons.append(f"no checkpoint was loaded, so steps are counted from {loaded} (its calculator would say 0 %)")
    saved = facts.max_saved_step
    if loaded is None or saved is None or reference is None or runtime <= 0:
        missing = (
            "a checkpoint_saved event" if saved is None else "a reference step time" if reference is None else "events"
        )
        return OlderFigure(
            share=None, steps_kept=0, reference_step_s=reference, runtime_s=runtime, reasons=(f"it needs {missing}",)
        )
    kept = max(0, saved - loaded)
    share = kept * reference / runtime
    reasons += _reasons(ledger, share, kept, loaded, saved, reference, given)
    return OlderFigure(
        share=share, steps_kept=kept, reference_step_s=reference, runtime_s=runtime, reasons=tuple(reasons)
    )


def _pace(ledger: Ledger) -> float | None:
    """Seconds per step between consecutive saves, for logs without steps."""
    paces = sorted(
        (b[0] - a[0]) / (b[1] - a[1])
        for timing in ledger.timings
        for a, b in zip(timing.saves, timing.saves[1:], strict=False)
        if b[1] > a[1] and b[0] > a[0]
    )
    return paces[len(paces) // 2] if paces else None


def _reasons(
    ledger: Ledger, share: float, kept: int, loaded: int, saved: int, reference: float, given: bool
) -> list[str]:
    """Why it differs from ours: the largest causes, in percentage points."""
    difference = (share - ledger.goodput) * 100
    if abs(difference) < 0.1:
        return ["both agree"]
    wall = max(1e-9, ledger.end - ledger.start)
    reasons: list[str] = []
    began = min((t.position for t in ledger.timings if t.position is not None), default=loaded)
    if loaded > began:
        points = (loaded - began) * reference / wall * 100
        reasons.append(f"it counts from the first load, step {loaded:,}, not from {began:,} ({points:.1f} points)")
    top = max((timing.top or 0) for timing in ledger.timings) if ledger.timings else 0
    if top > saved:
        points = (top - saved) * reference / wall * 100
        reasons.append(f"it leaves out {top - saved:,} steps after the last save ({points:.1f} points)")
    if given and ledger.usual_step_s and abs(reference / ledger.usual_step_s - 1) > 0.01:
        points = kept * (reference - ledger.usual_step_s) / wall * 100
        reasons.append(
            f"it takes {reference:.4g} s a step, the log shows {ledger.usual_step_s:.4g} s ({points:+.1f} points)"
        )
    for bucket, words in (
        (Bucket.SCALED_DOWN, "it counts a step the same however many ranks were missing"),
        (Bucket.UNKNOWN, "we leave unexplained time out"),
    ):
        points = ledger.share(bucket) * 100
        if points > 0.5:
            reasons.append(f"{words} ({points:.1f} points)")
    evals = sum(part.eval_s for parts in ledger.splits.values() for part in parts)
    if evals > 0:
        points = evals * 1e6 / max(1, sum(ledger.gpu.values())) * 100
        if points > 0.5:
            reasons.append(f"we count validation as productive ({points:.1f} points)")
    if ledger.coarse:
        reasons.append("without step events our 'productive' holds all time between load and last save")
    return reasons or ["its steps all take the reference time, ours the time they took"]
