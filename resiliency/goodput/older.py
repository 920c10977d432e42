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
    first, last = facts.bounds or (ledger.start, ledger.end)
    runtime = last - first
    reference = reference_step_s if reference_step_s is not None else (ledger.usual_step_s or _pace(ledger))
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
    reasons += _reasons(ledger, share, kept, loaded, saved, reference, runtime)
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
    ledger: Ledger, share: float, kept: int, loaded: int, saved: int, reference: float, runtime: float
) -> list[str]:
    """Why the older figure differs from ours, in percentage points that add up to the difference."""
    difference = (share - ledger.goodput) * 100
    if abs(difference) < 0.1:
        return ["both agree"]
    wall = max(1e-9, ledger.end - ledger.start)
    positions = [t.position for t in ledger.timings if t.position is not None]
    began, top = min(positions, default=loaded), max(((t.top or 0) for t in ledger.timings), default=saved)
    usual = ledger.usual_step_s or reference
    steps = kept + max(0, loaded - began) + max(0, top - saved)
    evals = sum(part.eval_s for parts in ledger.splits.values() for part in parts) * ledger.gpus_per_rank
    causes = [
        (
            f"its time is that of the events, {runtime:,.1f} s, not of the job, {wall:,.1f} s",
            kept * reference,
            1 / runtime,
        ),
        (
            f"it counts from the first load, step {loaded:,}, not from {began:,}",
            -max(0, loaded - began) * reference,
            0.0,
        ),
        (f"it leaves out {top - saved:,} steps after the last save", -max(0, top - saved) * reference, 0.0),
        (
            f"it takes {reference:.4g} s a step, the log shows {usual:.4g} s",
            steps * (reference - usual),
            0.0,
        ),
        (
            "it counts a step the same however many ranks were missing",
            ledger.share(Bucket.SCALED_DOWN) * wall,
            0.0,
        ),
        ("it counts steps that became slower as the others", ledger.share(Bucket.SLOWDOWN) * wall, 0.0),
        ("we count validation as productive", -evals * 1e6 / max(1, sum(ledger.gpu.values())) * wall, 0.0),
    ]
    points = [(words, seconds * (per_s - 1 / wall if per_s else 1 / wall) * 100) for words, seconds, per_s in causes]
    shown = [(words, one) for words, one in points if abs(one) >= 0.05]
    rest = difference - sum(one for _, one in shown)
    reasons = [f"{words} ({one:+.1f} points)" for words, one in shown]
    if abs(rest) >= 0.05:
        what = (
            "without step events our 'productive' holds all time between load and last save"
            if ledger.coarse
            else ("its steps all take that time, ours the time they took")
        )
        reasons.append(f"{what} ({rest:+.1f} points)")
    return reasons
