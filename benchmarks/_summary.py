"""Turns raw results into rows: medians over all rounds of a contender. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

__all__ = ["summarize_isolated", "summarize_loop"]

Result = Mapping[str, Any]


def summarize_isolated(rounds: Sequence[Result]) -> dict[str, Any]:
    """One row of the first table.

    Args:
        rounds: the results of all runs of one contender at one size, failed ones included.

    Returns:
        Seconds (``_s``), ratios, and ``status``: "ok", "unavailable" or "failed" with a ``reason``.
    """
    status = _status(rounds)
    good = [one for one in rounds if "warm" in one]
    if not good:
        return status
    warm = [save for one in good for save in one["warm"]]
    beside = [save for one in good for save in one["overlapped"]]
    first = [one["first"] for one in good]
    return {
        **status,
        "bytes": good[0]["bytes"],
        "flush": good[0]["flush"],
        "setup_s": _median(one["setup_s"] for one in good),
        "first_call_s": _median(save["call_s"] for save in first),
        "first_stall_s": _median(save["stall_s"] for save in first),
        "first_durable_s": _median(save["durable_s"] for save in first),
        "call_s": _median(save["call_s"] for save in warm),
        "stall_s": _median(save["stall_s"] for save in warm),
        "committed_s": _median(save["committed_s"] for save in warm),
        "durable_s": _median(save["durable_s"] for save in warm),
        "beside_call_s": _median(save["call_s"] for save in beside),
        "beside_fence_s": _median(save["fence_s"] for save in beside),
        "beside_stall_s": _median(save["stall_s"] for save in beside),
        "compute_ratio": _median(save["compute_ratio"] for save in beside),
        "restore_s": _median(second for one in good for second in one["restore_s"]),
        "ram_x_state": _median(one["ram_x_state"] for one in good),
        "warm_saves": len(warm),
    }


def summarize_loop(rounds: Sequence[Result], *, segment: int) -> dict[str, Any]:
    """One row of the second table: seconds of training lost per save.

    A cycle is ``segment`` steps from the end of the step that saves on, then ``segment`` steps without a save. What a
    save costs is ``segment`` times the difference of their mean step times: stall, fence and interference together.
    The row has the mean of the middle half of the cycles and a 90 % interval by resampling them; the first save is
    a separate figure.
    """
    status = _status(rounds)
    good = [one for one in rounds if "step_s" in one]
    if not good:
        return status
    first: list[float] = []
    later: list[float] = []
    base: list[float] = []
    at_save: list[float] = []
    for one in good:
        cycles = _cycles(one["step_s"], every=one["every"])
        for number, cycle in enumerate(cycles):
            saving, resting = cycle[:segment], cycle[segment:]
            lost = segment * (mean(saving) - mean(resting))
            (later if number else first).append(lost)
            if number:
                base.extend(resting)
                at_save.append(cycle[0] - median(resting))
    low, high = _interval(later)
    missed = sum(one.get("missed", 0) for one in good)
    if missed:
        status["reason"] = (
            f"{missed} saves were skipped or failed: what is lost per save is too low; {status['reason']}".rstrip("; ")
        )
    return {
        **status,
        "missed": missed,
        "bytes": good[0]["state_bytes"],
        "step_s": _median(base),
        "first_lost_s": _median(first),
        "lost_s": _midmean(later) if later else None,
        "lost_mean_s": mean(later) if later else None,
        "lost_low_s": low,
        "lost_high_s": high,
        "at_save_s": _median(at_save),
        "saves": len(later),
        "restore_s": _median(second for one in good for second in one.get("restore_s", ())),
    }


def _cycles(step_s: Sequence[float], *, every: int) -> list[Sequence[float]]:
    """Cuts the step times at the steps that save (step number ``every`` is index ``every - 1``). What comes before the
    first save is warm-up and left out."""
    starts = range(every - 1, len(step_s), every)
    return [step_s[start : start + every] for start in starts if start + every <= len(step_s)]


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    draw = random.Random(0)
    means = sorted(_midmean(draw.choices(values, k=len(values))) for _ in range(400))
    return means[20], means[-21]


def _midmean(values: Sequence[float]) -> float:
    """Mean of the middle half: nearly as stable as the mean, and insensitive to single outliers."""
    cut = len(values) // 4
    return mean(sorted(values)[cut : len(values) - cut])


def _status(rounds: Sequence[Result]) -> dict[str, Any]:
    if any("warm" in one or "step_s" in one for one in rounds):
        failed = [one["error"] for one in rounds if "error" in one]
        return {"status": "ok", "failed_rounds": len(failed), "reason": failed[0] if failed else ""}
    for key, status in (("error", "failed"), ("unavailable", "unavailable")):
        reasons = [one[key] for one in rounds if key in one]
        if reasons:
            return {"status": status, "reason": reasons[0]}
    return {"status": "failed", "reason": "was not run"}


def _median(values: Iterable[float | None], of: Callable[[list[float]], float] = median) -> float | None:
    known = [value for value in values if value is not None]
    return of(known) if known else None
