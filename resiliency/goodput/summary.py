"""The ledger as plain data: what ``--json`` prints, and the input of the table, the page and the comparison. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import resources
from typing import Any

from resiliency.goodput.advice import Advice, advise
from resiliency.goodput.incidents import incidents
from resiliency.goodput.lanes import us
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.named_spans import span_rows
from resiliency.goodput.over_time import over_time
from resiliency.goodput.split import deviation, merged_typical
from resiliency.goodput.start_parts import StartPart, part_label
from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.goodput.timing import Timing
from resiliency.telemetry.facts import Segment
from resiliency.telemetry.stepstats import Window

__all__ = ["iso", "schema", "step_series", "summarize"]

SCHEMA_VERSION = 2
#: At most this many rows in the per-rank tables.
MOST_RANKS = 20
#: A straggler costs the job more than this many times what a rank does on average.
UNEQUAL = 1.5
#: A straggler costs more than this share of all GPU time and was the slowest in at least this many steps; less is
#: only a short delay.
LEAST_COST, LEAST_STEPS = 0.002, 16


def iso(time: float) -> str:
    """UTC to the second, as reports show it."""
    return datetime.fromtimestamp(time, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def schema() -> str:
    """The JSON Schema of ``--json``."""
    return (resources.files("resiliency.goodput") / "report.schema.json").read_text(encoding="utf-8")


def summarize(
    ledger: Ledger,
    *,
    torn_lines: int = 0,
    foreign_lines: int = 0,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything a report shows, as JSON-ready data; seconds in ``_s``, shares in [0, 1].

    Args:
        ledger: the account.
        torn_lines: lines of the logs that were not JSON.
        foreign_lines: lines that were JSON but not events.
        notes: further sentences about the logs for the reader of the report.
    """
    quality = {name: count for name, count in sorted(ledger.facts.quality.items()) if count}
    for name, count in (("torn_lines", torn_lines), ("foreign_lines", foreign_lines)):
        if count:
            quality[name] = count
    advised = advise(ledger)
    return {
        "run": ledger.run,
        "start": ledger.start,
        "end": ledger.end,
        "start_utc": iso(ledger.start),
        "end_utc": iso(ledger.end),
        "left_out_s": (us(ledger.end) - us(ledger.start) - ledger.wall_us) / 1e6,
        "whole_run": ledger.is_whole,
        "wall_s": ledger.wall_us / 1e6,
        "gpu_s": sum(ledger.gpu.values()) / 1e6,
        "capacity": ledger.capacity,
        "gpus_per_rank": ledger.gpus_per_rank,
        "unit": ledger.unit,
        "device": ledger.facts.device,
        "goodput": ledger.goodput,
        "coarse": ledger.coarse,
        "events": ledger.facts.events,
        "buckets": [
            {
                "bucket": bucket.value,
                "label": BUCKETS[bucket].label,
                "lever": BUCKETS[bucket].lever,
                "wall_s": ledger.wall[bucket] / 1e6,
                "gpu_s": ledger.gpu[bucket] / 1e6,
                "share": ledger.share(bucket),
                "parts": _parts(ledger.start_parts(bucket)) if bucket in (Bucket.FIRST_START, Bucket.RESTART) else [],
                "advice": _advice(advised.get(bucket), ledger),
            }
            for bucket in BUCKETS
        ],
        "steps": _steps(ledger),
        "step_times": _step_times(ledger),
        "over_time": [asdict(point) for point in over_time(ledger)],
        "spans": span_rows(ledger),
        "attempts": _attempts(ledger),
        "incidents": [
            {
                "time": incident.time,
                "time_utc": iso(incident.time),
                "attempt": incident.attempt + 1,
                "what": incident.what,
                "where": incident.where,
                "remedy": incident.remedy,
                "lost_steps": incident.lost_steps,
                "ended_attempt": incident.ended_attempt,
                "logs": list(incident.logs),
                "cost_gpu_s": incident.cost_gpu_s,
                "gpu_s": {bucket.value: seconds for bucket, seconds in incident.gpu_s.items()},
            }
            for incident in incidents(ledger)
        ],
        "stragglers": _stragglers(ledger),
        "ranks": _ranks(ledger),
        "checkpoints": _checkpoints(ledger),
        "clock_offsets_s": dict(ledger.offsets),
        "quality": quality,
        "notes": [*ledger.notes, *notes],
    }


def _advice(said: Advice | None, ledger: Ledger) -> dict[str, Any] | None:
    if said is None:
        return None
    share = said.returns_s / (ledger.wall_us / 1e6) if ledger.wall_us else 0.0
    return {"text": said.text, "returns_s": said.returns_s, "returns_share": share}


def _parts(parts: Mapping[StartPart, tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        {"part": part.value, "label": part_label(part, parts), "wall_s": wall / 1e6, "gpu_s": gpu / 1e6}
        for part, (wall, gpu) in parts.items()
    ]


def _steps(ledger: Ledger) -> dict[str, Any]:
    """Numbers of steps, counted from the lowest rank's log."""
    run = kept = 0
    for timing in ledger.timings:
        lanes = sorted(timing.attempt.lanes)
        done, lost = _steps_left(ledger, timing, timing.attempt.lanes[lanes[0]] if lanes else [])
        run, kept = run + done, kept + done - lost
    top = [timing.top for timing in ledger.timings if timing.top is not None]
    return {
        "run": run,
        "kept": kept,
        "thrown_away": run - kept,
        "last": top[-1] if top else None,
        "usual_s": ledger.usual_step_s,
    }


def _steps_left(ledger: Ledger, timing: Timing, pieces: Sequence[Segment]) -> tuple[int, int]:
    """Steps in the accounted time, and how many of them were lost. The steps of a window are taken as equally long."""
    done = lost = 0.0
    for segment in pieces:
        before = segment.first_step_start()
        begin = timing.window[0] if before is None else before
        for _, window in sorted(segment.steps.windows.items()):
            end = segment.window_end(window)
            if end is None or not window.n:
                continue
            end = max(begin, end)
            share = ledger.kept_us(begin, end) / max(1, us(end) - us(begin))
            done += window.n * share
            if timing.lost_above is not None:
                lost += min(window.n, max(0, window.last_step - timing.lost_above)) * share
            begin = end
    return round(done), min(round(done), round(lost))


def _step_times(ledger: Ledger) -> dict[str, Any]:
    """Computing times of steps over all ranks: usual, best stable, and how far they vary."""
    stats = [segment.steps for timing in ledger.timings for segment in timing.attempt.segments]
    return {
        "usual_s": ledger.usual_step_s,
        "best_s": ledger.best_step_s,
        "deviation_s": deviation(stats),
    }


def _attempts(ledger: Ledger) -> list[dict[str, Any]]:
    sums: dict[int, dict[Bucket, int]] = {timing.index: {} for timing in ledger.timings}
    for lane in ledger.lanes:
        for interval in lane.intervals:
            # The time after a failure was noticed counts for the attempt that it begins.
            begins_next = interval.phase == "restart" and interval.attempt + 1 in sums
            by_bucket = sums[interval.attempt + 1] if begins_next else sums.setdefault(interval.attempt, {})
            for bucket, amount in interval.parts.items():
                by_bucket[bucket] = by_bucket.get(bucket, 0) + amount * lane.copies * ledger.gpus_per_rank
    rows = []
    for timing in ledger.timings:
        whole = sum(sums[timing.index].values())
        if not whole and not ledger.is_whole:
            continue
        rows.append(
            {
                "attempt": timing.index + 1,
                "number": timing.attempt.number,
                "start": timing.window[0],
                "start_utc": iso(timing.window[0]),
                "end": timing.window[1],
                "wall_s": ledger.kept_us(*timing.window) / 1e6,
                "ranks": max(timing.attempt.world, len(timing.attempt.lanes)),
                "from_step": timing.position,
                "to_step": timing.top,
                "outcome": timing.outcome,
                "usual_step_s": timing.usual_step_s,
                "shares": {bucket.value: amount / whole for bucket, amount in sums[timing.index].items()}
                if whole
                else {},
                "gpu_s": {bucket.value: amount / 1e6 for bucket, amount in sums[timing.index].items()},
            }
        )
    return rows


def _stragglers(ledger: Ledger) -> list[dict[str, Any]]:
    """Ranks the others waited for, the most costly first."""
    cost: dict[int, float] = {}
    steps: dict[int, int] = {}
    data: dict[int, float] = {}
    for late in ledger.late.values():
        for lane, seconds in late.blamed.items():
            cost[lane] = cost.get(lane, 0.0) + seconds * ledger.gpus_per_rank
            steps[lane] = steps.get(lane, 0) + late.blamed_steps.get(lane, 0)
            data[lane] = data.get(lane, 0.0) + late.blamed_data.get(lane, 0.0) * ledger.gpus_per_rank
    hosts = {lane.lane: lane.host for lane in ledger.lanes}
    # Ranks that take turns in being the slowest are equally fast: swapping one of them would not help.
    mean = sum(cost.values()) / max(1, len(ledger.lanes))
    least = max(UNEQUAL * mean, LEAST_COST * sum(ledger.gpu.values()) / 1e6)
    cost = {lane: seconds for lane, seconds in cost.items() if seconds > least and steps[lane] >= LEAST_STEPS}
    return [
        {
            "rank": lane,
            "host": hosts.get(lane, ""),
            "cost_gpu_s": cost[lane],
            "steps": steps[lane],
            "cause": "its data loader" if data[lane] > 0.5 * cost[lane] else "its computing",
        }
        for lane in sorted(cost, key=lambda lane: -cost[lane])[:MOST_RANKS]
    ]


def _ranks(ledger: Ledger) -> list[dict[str, Any]]:
    """Step times by rank, the slowest first."""
    rows: list[dict[str, Any]] = []
    for lane in ledger.lanes:
        segments = [
            s for timing in ledger.timings for s in timing.attempt.lanes.get(lane.lane, []) if s.steps.high >= 0
        ]
        usual = merged_typical([segment.steps for segment in segments])
        if usual is None:
            continue
        total = Window()
        for segment in segments:
            total.absorb(segment.steps.total())
        rows.append(
            {
                "rank": lane.lane,
                "host": lane.host,
                "steps": total.n,
                "usual_step_s": usual,
                "own_work_s": total.busy_s / total.busy_n if total.busy_n else None,
                "deviation_s": deviation([segment.steps for segment in segments]),
                "data_wait_s": total.data_s / total.n if total.n else 0.0,
            }
        )
    rows.sort(key=lambda row: (-(row["own_work_s"] or 0.0) - row["data_wait_s"], -row["usual_step_s"], row["rank"]))
    return rows[:MOST_RANKS]


def _checkpoints(ledger: Ledger) -> list[dict[str, Any]]:
    """One row per tier. A step counts once, however many ranks reported it."""
    rows = []
    for name, tier in sorted(ledger.facts.tiers.items()):
        rows.append(
            {
                "tier": name,
                "saved": max(tier.saved.values(), default=0),
                "durable": max(tier.durable.values(), default=0),
                "loaded": max(tier.loaded.values(), default=0),
                "failed": tier.failed,
                "skipped": tier.skipped,
                "corrupt": tier.corrupt,
                "repaired": tier.repaired,
                "deleted": tier.deleted,
                "last_step": tier.last_step if tier.last_step >= 0 else None,
                "bytes": tier.bytes,
                "durable_mean_s": tier.durable_s / tier.durable_n if tier.durable_n else None,
                "durable_max_s": tier.durable_max_s if tier.durable_n else None,
                "restore_mean_s": tier.restore_s / tier.restore_n if tier.restore_n else None,
            }
        )
    return rows


def step_series(ledger: Ledger) -> list[dict[str, Any]]:
    """Step times of the lowest rank over time, for a plot: one list of points per attempt."""
    series = []
    for timing in ledger.timings:
        lanes = sorted(timing.attempt.lanes)
        if not lanes:
            continue
        points = []
        for segment in timing.attempt.lanes[lanes[0]]:
            for _, window in sorted(segment.steps.windows.items()):
                time = segment.window_end(window)
                if time is None or window.n == 0:
                    continue
                time = min(max(time, timing.window[0]), timing.window[1])
                points.append(
                    (time, window.last_step, window.step_s / window.n, window.max_s, window.flight_n / window.n)
                )
        if points:
            series.append({"attempt": timing.index + 1, "points": points})
    return series
