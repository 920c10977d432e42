"""When each attempt of the job started, trained, stopped making progress, and when that was noticed. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from resiliency.events import EventKind
from resiliency.goodput.attempts import Attempt
from resiliency.goodput.remedies import last_told, was_over
from resiliency.telemetry.facts import Mark, RunFacts, Segment

__all__ = ["ABNORMAL", "Timing", "time_attempts"]

#: Events by which a launcher, monitor or host reports a failure.
NOTICES = frozenset(
    {
        EventKind.WORKER_LOST,
        EventKind.HOST_LOST,
        EventKind.HANG_DETECTED,
        EventKind.RESTART_REQUESTED,
        EventKind.PREEMPTION_NOTICE,
        EventKind.WORLD_RESIZED,
        EventKind.HOST_SWAPPED,
    }
)
#: Values of ``reason`` in job_terminated for an announced end, so that no time counts as detection.
PLANNED = frozenset({"signal", "preempted", "preemption", "terminated", "drained"})
#: Values of ``reason`` that do not tell of a failure.
_WELL = PLANNED | {"finished"}
ABNORMAL = frozenset({"exception", "error", "killed", "crash", "failed"})
#: A launcher on another host may report on an attempt up to this many seconds after its end.
LATE_NOTICE_S = 60.0


@dataclass
class Timing:
    """One attempt, in UTC seconds.

    Attributes:
        window: ``[start, stop)`` that this attempt accounts for: from its start (the run's start for the first) until
            the next attempt begins or the account ends.
        train: first batch of any rank, None when it never trained.
        progress: end of the last step of any rank; its last event when it never trained.
        noticed: when the failure was noticed (a planned end: ``progress``), None when it finished or no event shows it.
        ended: when it ended as planned (finished or announced), None otherwise.
        outcome: "finished", "planned" (preempted, signalled), "failed", "open" (no end in the log), "rolled back".
        saves: (time, step) of checkpoints within the window, for logs without steps.
        position: step that it began at; None: not known.
        top: highest step that it reached; None: not known.
        lost_above: steps after this one had to be run again later; None when all were kept.
        lost_by: index of the attempt that restored an older step.
        relaunched: when a launcher started the ranks of the next attempt; None: no launcher logged it.
    """

    attempt: Attempt
    index: int
    window: tuple[float, float]
    train: float | None
    progress: float
    noticed: float | None = None
    ended: float | None = None
    outcome: str = "open"
    saves: list[tuple[float, int]] = field(default_factory=list)
    position: int | None = None
    top: int | None = None
    lost_above: int | None = None
    lost_by: int | None = None
    usual_step_s: float | None = None
    marks: list[Mark] = field(default_factory=list)
    relaunched: float | None = None


def time_attempts(
    run: RunFacts,
    attempts: Sequence[Attempt],
    start: float,
    stop: float,
    usual: Sequence[float | None],
    *,
    coarse: bool,
) -> list[Timing]:
    """Times every attempt; see :class:`Timing`.

    Args:
        run: the run, whose marks and checkpoints are used.
        attempts: in order of start.
        start: first moment of the account.
        stop: last moment of the account.
        usual: usual step time of each attempt in seconds.
        coarse: the log has no steps; progress is known from checkpoints.
    """
    starts = [attempt.start for attempt in attempts]
    starts = [min(max(moment, start), stop) for moment in starts]
    marks = sorted(((mark.time, mark) for mark in run.marks), key=lambda pair: pair[0])
    saves = sorted(run.saves)
    timings: list[Timing] = []
    for index, attempt in enumerate(attempts):
        begin = start if index == 0 else starts[index]
        end = starts[index + 1] if index + 1 < len(starts) else stop
        timing = _time_one(attempt, index, (begin, max(begin, end)), usual[index])
        last = index + 1 == len(starts)
        timing.saves = saves[_after(saves, begin) : None if last else _after(saves, end)]
        if coarse:
            _by_checkpoints(timing, run)
        _position(timing, run)
        timing.marks = _marks_of(attempts, index, marks, begin, end)
        _outcome(timing, run, attempts[index + 1] if not last else None)
        timings.append(timing)
    _lost(timings)
    return timings


def _after(pairs: Sequence[tuple[float, object]], time: float) -> int:
    """Index of the first pair at or after ``time``."""
    return bisect_left(pairs, time, key=lambda pair: pair[0])


def _marks_of(
    attempts: Sequence[Attempt], index: int, marks: Sequence[tuple[float, Mark]], begin: float, end: float
) -> list[Mark]:
    """The marks of one attempt: those in its window. For LATE_NOTICE_S after an attempt's end, a mark's attempt number
    wins over its time, because launchers may report late."""
    number = attempts[index].number
    earlier = attempts[index - 1].number if index > 0 else None
    later = attempts[index + 1].number if index + 1 < len(attempts) else None
    found = []
    for place in range(_after(marks, begin), len(marks)):
        time, mark = marks[place]
        if index + 1 < len(attempts) and time > end:
            if time > end + LATE_NOTICE_S:
                break
            if mark.attempt is None or mark.attempt != number or number == later:
                continue
        elif (
            index > 0
            and time <= begin + LATE_NOTICE_S
            and mark.attempt is not None
            and mark.attempt == earlier != number
        ):
            continue
        elif index > 0 and time == begin:
            continue
        found.append(mark)
    return found


def _time_one(attempt: Attempt, index: int, window: tuple[float, float], usual: float | None) -> Timing:
    trains: list[float] = []
    ends: list[float] = []
    for segment in attempt.segments:
        trains.extend(t for t in (segment.train, segment.first_step_start()) if t is not None)
        last = segment.last_step_time()
        if last is not None:
            ends.append(last)
    train = min(max(min(trains), window[0]), window[1]) if trains else None
    progress = max(ends) if ends else (train if train is not None else attempt.end)
    progress = min(max(progress, window[0]), window[1])
    return Timing(attempt, index, window, train, progress, usual_step_s=usual)


def _by_checkpoints(timing: Timing, run: RunFacts) -> None:
    """Without step lines, training begins at the load (or the start) and progress ends at the last save."""
    begin, end = timing.window
    loads = [time for time, _ in run.loads if begin <= time <= end]
    if timing.train is None and loads:
        timing.train = min(loads)
    if timing.saves:
        timing.progress = min(timing.saves[-1][0], end)
    elif timing.train is not None:
        timing.progress = max(timing.train, begin)
    else:
        started = [segment.started for segment in timing.attempt.segments if segment.started is not None]
        timing.progress = min(max(max(started, default=begin), begin), end)
    if timing.train is not None:
        timing.train = min(timing.train, timing.progress)


def _position(timing: Timing, run: RunFacts) -> None:
    """Sets the step at which the attempt began, and the highest step that it reached."""
    tops = [segment.steps.high for segment in timing.attempt.segments if segment.steps.high >= 0]
    # Ranks that join later begin at a higher step.
    positions = [position for segment in timing.attempt.segments if (position := segment.position) is not None]
    timing.position = min(positions, default=None)
    if timing.position is None:
        loads = [step for time, step in run.loads if timing.window[0] <= time <= timing.window[1]]
        if loads:
            timing.position = min(loads)
        elif timing.index == 0 and timing.saves:
            timing.position = 0
    timing.top = max(tops) if tops else (max(step for _, step in timing.saves) if timing.saves else timing.position)


def _outcome(timing: Timing, run: RunFacts, following: Attempt | None) -> None:
    """Sets how the attempt ended, when that was noticed, and when ranks were started again."""
    segments = list(timing.attempt.segments)
    begin, end = timing.window
    patience = max(5.0, 3 * (timing.usual_step_s or 0.0))
    ends: list[tuple[float, str]] = []
    for segment in segments + [node for node in run.nodes if node not in segments]:
        time = segment.terminated
        if time is not None and begin <= time <= end:
            ends.append((time, segment.reason))
    told = last_told(timing.marks)
    notices = [
        m.time
        for m in timing.marks
        if m.kind in NOTICES
        and m.time >= timing.progress - patience
        and not was_over(told.get(m.fields.get("incident")), timing.progress, near_s=patience)
    ]
    finished = [segment for segment in segments if segment.finished]
    bad = [time for time, reason in ends if reason in ABNORMAL]
    planned = [time for time, reason in ends if reason in PLANNED]
    preempted = any(m.kind == EventKind.PREEMPTION_NOTICE for m in timing.marks if m.time >= timing.progress - 300.0)

    if finished and len(finished) * 2 >= len(segments) and not bad:
        timing.outcome = "finished"
        moments = [_work_done(s) for s in finished]
        timing.ended = max((m for m in moments if m is not None), default=timing.progress)
    elif (planned or preempted) and not bad:
        timing.outcome = "planned"
        timing.ended = max([time for time in planned], default=timing.progress)
        timing.noticed = timing.progress
    elif following is not None and all(segment.rollback for segment in following.segments):
        timing.outcome = "rolled back"
        timing.noticed = min(notices) if notices else None
    elif bad or notices or following is not None:
        timing.outcome = "failed"
        told_ends = [time for time, reason in ends if reason not in _WELL and time >= timing.progress]
        seen = bad + notices + told_ends
        timing.noticed = max(min(seen), timing.progress) if seen else None
    elif ends:
        # The older library's launchers log that an attempt ended, but not how.
        timing.outcome = "finished"
        timing.ended = max(time for time, _ in ends)
    starts = [m.time for m in timing.marks if m.kind == EventKind.RANKS_STARTED]
    timing.relaunched = max((t for t in starts if t >= timing.progress), default=None)
    if timing.noticed is not None:
        timing.noticed = min(max(timing.noticed, timing.progress), end)
    if timing.ended is not None:
        timing.ended = min(max(timing.ended, timing.progress), end)


def _work_done(segment: Segment) -> float | None:
    """When training and the last wait for a save had ended; the end of the process when that is not logged."""
    if segment.train_ended is None:
        return segment.terminated
    return max([segment.train_ended, *(time for time, _ in segment.stalls)])


def _lost(timings: list[Timing]) -> None:
    """Marks lost work: when an attempt begins at step R, the work of earlier attempts after R is lost."""
    # A heap of (minus the last kept step, attempt), the farthest first, because a job may have thousands of attempts.
    kept: list[tuple[int, int]] = []
    for index, timing in enumerate(timings):
        others: list[tuple[int, int]] = []
        position = timing.position
        if position is not None:
            loaded = any(segment.loaded is not None for segment in timing.attempt.segments)
            rollback = all(segment.rollback for segment in timing.attempt.segments)
            while kept and -kept[0][0] > position:
                top, number = heapq.heappop(kept)
                earlier = timings[number]
                # Beginning at a lower step loses no work when nothing was loaded and the earlier attempt had finished,
                # or its process goes on (another fit in one script).
                if loaded or not (earlier.outcome == "finished" or rollback):
                    earlier.lost_above, earlier.lost_by, top = position, index, -position
                others.append((top, number))
        for one in others:
            heapq.heappush(kept, one)
        if timing.top is not None:
            heapq.heappush(kept, (-timing.top, index))


def save_pace(timings: Sequence[Timing]) -> float | None:
    """Usual seconds between checkpoints, for logs without steps."""
    gaps = [
        b[0] - a[0] for t in timings for a, b in zip(t.saves, t.saves[1:], strict=False) if b[1] > a[1] and b[0] > a[0]
    ]
    return median(gaps) if gaps else None
