"""The account of a run: every microsecond of every rank in exactly one bucket. Pure: no files, no clock, no torch.

The run's time is cut at the starts of its attempts. Within an attempt each rank goes through start-up, restore,
training and the time after its last step. Training is split by the figures of its step events, the time after it by
when the failure was noticed. Ranks that are missing while others train count as scaled-down capacity. Wall time has the
same shares as GPU time: a bucket's wall seconds are its GPU-seconds divided by the number of GPUs, so each table sums
exactly to its total.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from resiliency.goodput.attempts import Attempt, cluster
from resiliency.goodput.clocks import on_one_clock
from resiliency.goodput.coarse import fill_coarse
from resiliency.goodput.cut import cut_attempts
from resiliency.goodput.fill import LaneFiller
from resiliency.goodput.lanes import Lane, LaneInterval, apportion, us
from resiliency.goodput.refused import refusal_note, refuse_impossible
from resiliency.goodput.slowdown import NO_BEST, Best, best_stable
from resiliency.goodput.split import Stragglers, TrainingSplit, merged_typical, stragglers
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.taxonomy import Bucket, empty
from resiliency.goodput.timing import Timing, save_pace, time_attempts
from resiliency.goodput.windows import ALL_TIME, Span, Windows, clip, kept_windows
from resiliency.telemetry.facts import RunFacts, Segment
from resiliency.telemetry.stepstats import StepStats

__all__ = ["LaneAccount", "Ledger", "account"]


@dataclass(frozen=True, kw_only=True)
class LaneAccount:
    """The time line of ``copies`` ranks; ranks without a log are given that of the lowest rank with one."""

    lane: int
    host: str
    copies: int
    intervals: tuple[LaneInterval, ...]

    def totals(self) -> dict[Bucket, int]:
        """Microseconds by bucket of one copy."""
        sums = empty()
        for interval in self.intervals:
            for bucket, amount in interval.parts.items():
                sums[bucket] += amount
        return sums


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the time of one run went.

    Attributes:
        run: its name.
        start: first moment, UTC seconds.
        end: last moment, UTC seconds.
        wall: microseconds by bucket; sums exactly to ``end - start`` minus the time that was left out.
        gpu: GPU-microseconds by bucket; sums to ``capacity`` times the wall time exactly.
        capacity: GPUs (ranks x GPUs per rank) the job holds when no rank is missing.
        gpus_per_rank: GPUs that each rank (or host) stands for; ``lanes`` hold the time of one GPU per rank.
        unit: "rank", or "host" when only launchers logged.
        lanes: one time line per rank (or per group of ranks that share one).
        timings: the job's attempts.
        splits: by (attempt, lane), the training time by cause.
        late: stragglers by attempt.
        offsets: by host, the most seconds that its clock was ahead; all times here are already corrected.
        usual_step_s: usual step time over the whole run; None without steps.
        facts: what was read from the log, on one clock and without the lines that were refused.
        coarse: True when the log has no steps, so that progress is known from checkpoints only.
        best_step_s: seconds a step should take to compute: the best stable step time, or the one that was given.
        kept: the stretches of time that are accounted for, ``[first, last)`` in microseconds; the first one begins at
            ``start``, the last one ends at ``end``.
        is_whole: True when nothing of the run's time was left out.
    """

    run: str
    start: float
    end: float
    wall: dict[Bucket, int]
    gpu: dict[Bucket, int]
    capacity: int
    unit: str
    lanes: tuple[LaneAccount, ...]
    timings: tuple[Timing, ...]
    splits: dict[tuple[int, int], list[TrainingSplit]]
    late: dict[int, Stragglers]
    offsets: dict[str, float]
    usual_step_s: float | None
    facts: RunFacts
    coarse: bool
    best_step_s: float | None = None
    gpus_per_rank: int = 1
    kept: tuple[Span, ...] = ()
    is_whole: bool = True
    notes: tuple[str, ...] = field(default=())

    @property
    def wall_us(self) -> int:
        return sum(last - first for first, last in self.kept)

    def kept_us(self, start: float, end: float) -> int:
        """Microseconds from ``start`` to ``end`` (UTC seconds) that are accounted for."""
        low, high = us(start), us(end)
        return sum(max(0, min(high, last) - max(low, first)) for first, last in self.kept)

    def holds(self, time: float) -> bool:
        """True when the moment ``time`` (UTC seconds) is accounted for; the end of a kept stretch counts, too."""
        return any(first <= us(time) <= last for first, last in self.kept)

    @property
    def goodput(self) -> float:
        """Productive share of all time, in [0, 1]; 0 for an empty run."""
        return self.wall[Bucket.PRODUCTIVE] / self.wall_us if self.wall_us else 0.0

    def start_parts(self, bucket: Bucket) -> dict[StartPart, tuple[int, int]]:
        """The parts of a start or restart in order, each with its (wall, GPU) microseconds, which sum to the bucket's.

        Empty when the log of no attempt splits the bucket.
        """
        gpu: dict[StartPart, int] = {}
        for lane in self.lanes:
            for interval in lane.intervals:
                amount = interval.parts.get(bucket, 0) * lane.copies
                gpu[interval.start_part] = gpu.get(interval.start_part, 0) + amount
        if not any(amount for part, amount in gpu.items() if part is not StartPart.OTHER):
            return {}
        gpu = apportion(gpu, self.gpu[bucket])
        wall = apportion(gpu, self.wall[bucket])
        return {part: (wall.get(part, 0), gpu[part]) for part in StartPart if gpu.get(part)}

    def share(self, bucket: Bucket) -> float:
        """Share of all GPU time in [0, 1]."""
        whole = sum(self.gpu.values())
        return self.gpu[bucket] / whole if whole else 0.0


def account(
    run: RunFacts,
    *,
    until: float | None = None,
    capacity: int | None = None,
    gpus_per_rank: int = 1,
    windows: Windows = ALL_TIME,
    reference_step_s: float | None = None,
) -> Ledger:
    """Accounts for the time of one run, which does not change.

    Args:
        run: from a :class:`~resiliency.telemetry.collect.Collector`.
        until: end of the account in UTC seconds (a running job: now); None: the last event.
        capacity: ranks the job should have; None: the most that any attempt had.
        gpus_per_rank: GPUs each rank (or host, when only launchers logged) stands for.
        windows: the part of the run's time to account for.
        reference_step_s: seconds a step should take to compute; None: the best stable step time of the run.
    """
    run, offsets = on_one_clock(refuse_impossible(run))
    segments = run.segments if _ranks_logged(run.segments) or not run.nodes else run.nodes
    coarse = not any(segment.steps.high >= 0 for segment in segments)
    overall = merged_typical([segment.steps for segment in segments])
    attempts = cluster(segments)
    start, end = _bounds(run, attempts, until)
    cut_attempts(attempts)
    usual = [_usual(attempt, overall) for attempt in attempts]
    timings = time_attempts(run, attempts, start, end, usual, coarse=coarse)
    late = {timing.index: stragglers(_stepping(timing.attempt)) for timing in timings}

    given = None if reference_step_s is None else Best(step_s=reference_step_s, tolerance=0.0)
    bests = {} if given is not None or coarse else _bests(attempts, overall)

    lanes: list[LaneAccount] = []
    splits: dict[tuple[int, int], list[TrainingSplit]] = {}
    pace = save_pace(timings)
    worlds = [timing.attempt.world for timing in timings]  # once, because each looks at all ranks
    for number, copies in _lane_groups(attempts, capacity):
        lane = Lane(us(start), us(end))
        host = ""
        for timing, world in zip(timings, worlds, strict=True):
            lane.attempt, lane.limit_us = timing.index, us(timing.window[1])
            pieces = _pieces(timing.attempt, number)
            host = pieces[-1].host if pieces and pieces[-1].host else host
            if coarse:
                fill_coarse(lane, timing, present=bool(pieces), pace=pace, last=timing is timings[-1])
                continue
            best = given or bests.get((pieces[0].lane, world), NO_BEST) if pieces else NO_BEST
            filler = LaneFiller(lane, timing, late[timing.index], best, over=run.terminated is not None)
            parts = filler.fill(pieces)
            if number in timing.attempt.lanes:
                splits[timing.index, number] = parts
        lane.limit_us = us(end)
        lane.until(us(end), Bucket.IDLE if not timings else Bucket.UNKNOWN, "after")
        lanes.append(LaneAccount(lane=number, host=host, copies=copies, intervals=tuple(lane.intervals)))

    kept: tuple[Span, ...] = ((us(start), us(end)),)
    is_whole = not windows and (until is None or until >= end)
    if not is_whole:
        kept = kept_windows(windows, start, end if until is None else max(start, min(until, end)))
        lanes = [dataclasses.replace(one, intervals=clip(one.intervals, kept)) for one in lanes]
        start, end = (kept[0][0] / 1e6, kept[-1][1] / 1e6) if kept else (start, start)
    wall_us = sum(last - first for first, last in kept)

    gpu = empty()
    for one in lanes:
        for bucket, amount in one.totals().items():
            gpu[bucket] += amount * one.copies * gpus_per_rank
    wall = empty()
    wall.update(apportion(gpu, wall_us))
    return Ledger(
        run=run.name,
        start=start,
        end=end,
        wall=wall,
        gpu=gpu,
        capacity=sum(one.copies for one in lanes) * gpus_per_rank,
        gpus_per_rank=gpus_per_rank,
        unit="host" if segments is run.nodes and run.nodes else "rank",
        lanes=tuple(lanes),
        timings=tuple(timings),
        splits=splits,
        late=late,
        offsets=offsets,
        usual_step_s=overall,
        best_step_s=reference_step_s if given is not None else _best_of_all(bests),
        kept=kept,
        is_whole=is_whole,
        facts=run,
        coarse=coarse,
        notes=tuple(_notes(run, timings, offsets, coarse, lanes, is_whole=is_whole)),
    )


def _ranks_logged(segments: Sequence[Segment]) -> bool:
    """True when ranks themselves logged their start or steps."""
    return any(s.started is not None or s.train is not None or s.steps.high >= 0 for s in segments)


def _bounds(run: RunFacts, attempts: Sequence[Attempt], until: float | None) -> tuple[float, float]:
    known = run.bounds
    if known is None:
        return 0.0, 0.0
    start, end = known
    # Only of the first attempt, because a launcher that restarts ranks is the same one in all attempts.
    launched = [s.launched for s in attempts[0].segments if s.launched is not None] if attempts else []
    return min([start, *launched]), end if until is None else max(end, until)


def _stepping(attempt: Attempt) -> dict[int, StepStats]:
    return {lane: pieces[-1].steps for lane, pieces in attempt.lanes.items() if pieces[-1].steps.high >= 0}


def _usual(attempt: Attempt, overall: float | None) -> float | None:
    stats = [segment.steps for segment in attempt.segments if segment.steps.high >= 0]
    if sum(n for one in stats for n, _ in one.clean.values()) >= 20:
        return merged_typical(stats)
    return overall


def _bests(attempts: Sequence[Attempt], overall: float | None) -> dict[tuple[int, int], Best]:
    """The best stable step time by rank and world size, because steps may take longer or shorter at another size."""
    stats: dict[tuple[int, int], list[StepStats]] = {}
    for attempt in attempts:
        world = attempt.world
        for lane, pieces in attempt.lanes.items():
            stats.setdefault((lane, world), []).extend(piece.steps for piece in pieces if piece.steps.high >= 0)
    return {key: Best(step_s=best_stable(one, overall)) for key, one in stats.items()}


def _best_of_all(bests: Mapping[tuple[int, int], Best]) -> float | None:
    known = [best.step_s for best in bests.values() if best.step_s is not None]
    return median(known) if known else None


def _lane_groups(attempts: Sequence[Attempt], capacity: int | None) -> list[tuple[int, int]]:
    """(rank, copies) of every lane: each rank that logged, and one lane per world size for all ranks that never did."""
    seen = sorted({lane for attempt in attempts for lane in attempt.lanes})
    groups = [(lane, 1) for lane in seen]
    below = 0
    for world in sorted({attempt.world for attempt in attempts} | ({capacity} if capacity else set())):
        missing = world - below - sum(1 for lane in seen if below <= lane < world)
        if missing > 0 and world > 0:
            unused = next(lane for lane in range(below, world) if lane not in seen)
            groups.append((unused, missing))
        below = max(below, world)
    return groups or [(0, capacity or 1)]


def _pieces(attempt: Attempt, lane: int) -> list[Segment]:
    """The segments of a rank; for a rank of the attempt that did not log, those of the lowest rank that did."""
    if lane in attempt.lanes:
        return attempt.lanes[lane]
    return attempt.lanes[min(attempt.lanes)] if lane < attempt.world and len(attempt.lanes) < attempt.world else []


def _notes(
    run: RunFacts,
    timings: Sequence[Timing],
    offsets: Mapping[str, float],
    coarse: bool,
    lanes: Sequence[LaneAccount],
    *,
    is_whole: bool,
) -> list[str]:
    """Sentences for the reader of the report: what the log could not show."""
    notes = []
    if not is_whole:
        notes.append(
            "A part of the run's time is left out. Buckets, attempts, incidents and spans are of what is left;"
            " stragglers, ranks and checkpoints are of the whole run."
        )
    if coarse and timings:
        notes.append(
            "The log has no step events: only checkpoints show progress, so data wait, stalls, interference and "
            "stragglers are inside 'productive', and time after the last save is an estimate."
        )
    if timings and timings[-1].outcome == "open":
        notes.append(
            "The last attempt has no end in the log; the account stops at its last event (use --until now if it runs)."
        )
    for host, seconds in sorted(offsets.items()):
        notes.append(f"The clock of {host} was {abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}; corrected.")
    silent = [t.index for t in timings if t.outcome == "failed" and t.noticed is None]
    if silent:
        listed = ", ".join(str(index + 1) for index in silent[:8])
        notes.append(
            f"Nothing in the log says when the failure of attempt {listed} was noticed: detection counts as restart."
        )
    copies = sum(lane.copies for lane in lanes if lane.copies > 1)
    if copies:
        notes.append(
            f"{copies} ranks have no log of their own; they are taken to have done what the lowest logging rank did."
        )
    if said := refusal_note(run):
        notes.append(said)
    if run.quality.get("stamps_without_zone"):
        notes.append("Stamps without a time zone (older library) are read as UTC.")
    return notes
