"""Incidents of a run: failure, remedy and cost. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.remedies import (
    OBSERVATIONS,
    last_told,
    marks_of_incident,
    remedy_words,
    supervised_remedy,
    was_over,
)
from resiliency.goodput.split import SLOW_STEP
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.timing import Timing
from resiliency.telemetry.facts import Mark

__all__ = ["Incident", "incidents"]

#: At most this many incidents of each kind are kept, the costliest ones. Tables show fewer, and say so.
MOST = 10_000
#: At most this many output files are listed for one incident.
MOST_LOGS = 4
#: A slow step that took less than this many seconds more than the usual step is not an incident.
STALL_S = 10.0
#: Equal notices from the ranks of one host within this many seconds are one incident.
SAME_S = 5.0
#: Kinds of events that say what ended an attempt, the most specific first.
_TELLING = (
    EventKind.HOST_LOST,
    EventKind.OBSERVED,
    EventKind.HANG_DETECTED,
    EventKind.PREEMPTION_NOTICE,
    EventKind.WORKER_LOST,
    EventKind.WORLD_RESIZED,
    EventKind.HOST_SWAPPED,
    EventKind.RESTART_REQUESTED,
)


_HOW = ("signal", "exit_code")
#: A mark up to this many seconds before the last progress may be about the failure that followed.
NEAR_S = 300.0
_CHANGES = frozenset({EventKind.HOST_SWAPPED, EventKind.WORLD_RESIZED})


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure or other loss of time.

    Attributes:
        time: UTC seconds: the last sign of progress before the attempt ended; for other incidents, when it was logged.
        attempt: index, from 0, of the attempt that it ended (or happened in).
        what: what happened, a sentence fragment.
        where: host or rank, "" when unknown.
        remedy: what was done.
        gpu_s: GPU-seconds it cost, by bucket.
        lost_steps: steps that had to be run again.
        ended_attempt: False when training went on.
    """

    time: float
    attempt: int
    what: str
    where: str
    remedy: str
    gpu_s: dict[Bucket, float]
    lost_steps: int = 0
    ended_attempt: bool = True
    #: Files with the output of the named rank, or of all ranks of the attempt when no rank is named.
    logs: tuple[str, ...] = ()

    @property
    def cost_gpu_s(self) -> float:
        return sum(self.gpu_s.values())


def incidents(ledger: Ledger) -> list[Incident]:
    """All incidents of a run, in order of time."""
    context = _Context.of(ledger)
    ended = [_ended(ledger, timing, context) for timing in ledger.timings if _went_wrong(timing)]
    found = [one for kind in (ended, _survived(ledger), _stalls(ledger)) for one in _costliest(kind)]
    if not ledger.is_whole:
        found = [incident for incident in found if ledger.holds(incident.time) or incident.cost_gpu_s > 0]
    return sorted(found, key=lambda incident: incident.time)


def _costliest(found: list[Incident]) -> list[Incident]:
    return sorted(found, key=lambda incident: -incident.cost_gpu_s)[:MOST]


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What all incidents of a run need, gathered once because there may be thousands of incidents.

    Attributes:
        tails: by attempt, GPU-microseconds by bucket after its last step.
        starts: by attempt, GPU-microseconds by bucket before its first batch, and its warm-up.
        lost: by attempt, GPU-microseconds of its work that later attempts ran again.
        thrown: by attempt that began at an older step, the attempts whose work was lost by that.
        told: marks of a supervisor that carry an incident's number.
        last_told: the last of these marks, by incident number.
        changes: marks of host swaps and of changes of the world size.
    """

    tails: dict[int, Counter[Bucket]]
    starts: dict[int, Counter[Bucket]]
    lost: Counter[int]
    thrown: dict[int, list[Timing]]
    told: list[Mark]
    last_told: dict[object, Mark]
    changes: list[Mark]

    @classmethod
    def of(cls, ledger: Ledger) -> _Context:
        tails: dict[int, Counter[Bucket]] = defaultdict(Counter)
        starts: dict[int, Counter[Bucket]] = defaultdict(Counter)
        lost: Counter[int] = Counter()
        for lane in ledger.lanes:
            gpus = lane.copies * ledger.gpus_per_rank
            for interval in lane.intervals:
                parts, attempt = interval.parts, interval.attempt
                lost[attempt] += parts.get(Bucket.LOST_WORK, 0) * gpus
                if interval.phase in ("detection", "restart", "end"):
                    for bucket in (Bucket.DETECTION, Bucket.RESTART, Bucket.CHECKPOINT_STALL):
                        tails[attempt][bucket] += parts.get(bucket, 0) * gpus
                starts[attempt][Bucket.WARM_UP] += parts.get(Bucket.WARM_UP, 0) * gpus
                if interval.phase in ("start", "restore"):
                    for bucket in (Bucket.RESTART, Bucket.RESTORE):
                        starts[attempt][bucket] += parts.get(bucket, 0) * gpus
        thrown: dict[int, list[Timing]] = defaultdict(list)
        for timing in ledger.timings:
            if timing.lost_by is not None:
                thrown[timing.lost_by].append(timing)
        told = [mark for mark in ledger.facts.marks if mark.fields.get("incident") is not None]
        return cls(
            tails=tails,
            starts=starts,
            lost=lost,
            thrown=thrown,
            told=told,
            last_told=last_told(told),
            changes=[mark for mark in ledger.facts.marks if mark.kind in _CHANGES],
        )


def _went_wrong(timing: Timing) -> bool:
    return timing.outcome in ("failed", "planned", "rolled back")


def _next(ledger: Ledger, timing: Timing) -> Timing | None:
    return ledger.timings[timing.index + 1] if timing.index + 1 < len(ledger.timings) else None


def _ended(ledger: Ledger, timing: Timing, context: _Context) -> Incident:
    following = _next(ledger, timing)
    costs = Counter(context.tails.get(timing.index, {}))
    thrown: Sequence[Timing] = ()
    if following is not None:
        costs.update(context.starts.get(following.index, {}))
        thrown = context.thrown.get(following.index, ())
        costs[Bucket.LOST_WORK] += sum(context.lost[earlier.index] for earlier in thrown)
    lost = sum((t.top or 0) - (t.lost_above or 0) for t in thrown)
    near = [mark for mark in timing.marks if mark.time >= timing.progress - NEAR_S]
    near = [
        mark
        for mark in near
        if not was_over(context.last_told.get(mark.fields.get("incident")), timing.progress, near_s=SAME_S)
    ]
    what, where, rank = _describe(timing, following, near)
    about = marks_of_incident(near, context.told)
    told = supervised_remedy(about, context.changes)
    return Incident(
        time=timing.progress,
        attempt=timing.index,
        what=what,
        where=where,
        remedy=_remedy(timing, following, near, told),
        gpu_s={bucket: amount / 1e6 for bucket, amount in costs.items() if amount},
        lost_steps=max(0, lost),
        logs=_logs(timing, rank),
    )


def _logs(timing: Timing, rank: int | None) -> tuple[str, ...]:
    lanes = timing.attempt.lanes
    about = lanes.get(rank, []) if rank is not None else [piece for pieces in lanes.values() for piece in pieces]
    return tuple(dict.fromkeys(path for segment in about for path in segment.logs))[:MOST_LOGS]


def _describe(timing: Timing, following: Timing | None, near: Sequence[Mark]) -> tuple[str, str, int | None]:
    """What happened, where, and to which rank, from the most specific notice ``near`` the end."""
    near = [m for m in near if m.kind in _TELLING]
    near = [m for m in near if m.kind != EventKind.OBSERVED or m.fields.get("observation") in OBSERVATIONS]
    mark = min(near, key=_telling, default=None)
    if mark is not None and mark.kind == EventKind.WORKER_LOST:
        # An agent logs only that a rank died; the rank's launcher also logs its signal or exit code.
        same = (m for m in near if m.kind == mark.kind and m.rank == mark.rank and not m.fields.keys().isdisjoint(_HOW))
        mark = next(same, mark)
    if mark is None:
        reasons = sorted({s.reason for s in timing.attempt.segments if s.reason and s.reason != "finished"})
        if timing.outcome == "rolled back":
            is_loaded = following is not None and _loaded(following)
            words = "Went back to an older checkpoint" if is_loaded else "Steps counted from an earlier one again"
            return words, "", None
        if timing.outcome == "planned":
            return f"Stopped by {reasons[0] if reasons else 'request'}", "", None
        if reasons:
            return f"Ended by {reasons[0]}", "", None
        told = any(segment.terminated is not None for segment in timing.attempt.segments)
        return ("Ended, without a reason in the log" if told else "Ended without a word"), "", None
    fields = mark.fields
    where = str(fields.get("lost_host") or (f"rank {mark.rank}" if mark.rank is not None else mark.host))
    if mark.kind == EventKind.HOST_SWAPPED and fields.get("old"):
        where = str(fields["old"])
    elif "incident" in fields and mark.rank is None and "lost_host" not in fields:
        where = ""  # the mark's host is the supervisor's, not the place of the incident
    if mark.kind == EventKind.WORKER_LOST:
        if fields.get("signal") not in (None, ""):
            return f"Worker killed by signal {fields['signal']}", where, mark.rank
        if fields.get("exit_code") not in (None, ""):
            return f"Worker exited with code {fields['exit_code']}", where, mark.rank
        return "Worker lost", where, mark.rank
    if mark.kind == EventKind.HANG_DETECTED:
        quiet = fields.get("quiet_s")
        return (
            ("Hang" + (f", no progress for {quiet:.0f} s" if isinstance(quiet, (int, float)) else "")),
            where,
            mark.rank,
        )
    names = {
        EventKind.HOST_LOST: "Host lost",
        EventKind.PREEMPTION_NOTICE: "Preempted",
        EventKind.WORLD_RESIZED: "World resized",
        EventKind.HOST_SWAPPED: "Host swapped",
        EventKind.RESTART_REQUESTED: "Restart requested",
    }
    reason = str(fields.get("reason") or "")
    if mark.kind == EventKind.OBSERVED:
        kind = str(fields.get("observation"))
        return OBSERVATIONS[kind] + (f": {reason}" if reason and reason != kind else ""), where, mark.rank
    return names[mark.kind] + (f": {reason}" if reason else ""), where, mark.rank


def _loaded(timing: Timing) -> bool:
    """True when the log shows that the attempt began by loading a checkpoint."""
    return any(segment.loaded is not None or segment.restore is not None for segment in timing.attempt.segments)


def _telling(mark: Mark) -> float:
    """Sort key of a mark: the more specific, the lower. A straggler comes after a lost worker, because a slow rank
    explains a remedy but not a death."""
    after = EventKind.WORKER_LOST if mark.fields.get("observation") == "straggler" else None
    return _TELLING.index(mark.kind) if after is None else _TELLING.index(after) + 0.5


def _hosts(timing: Timing) -> dict[int, str]:
    return {lane: pieces[-1].host for lane, pieces in timing.attempt.lanes.items()}


def _remedy(timing: Timing, following: Timing | None, near: Sequence[Mark], supervised: str) -> str:
    """What was done about a failure, from the supervisor's plans or a mark ``near`` the end of the attempt, and from
    the next attempt. The remedy that began the failed attempt does not count."""
    at = ""
    if following is not None and following.position is not None:
        source = next((s.loaded_from for s in following.attempt.segments if s.loaded_from), "")
        at = f" at step {following.position:,}" + (f" from {source}" if source else "")
    if supervised:
        return supervised + (f"; resumed{at}" if at else "")
    told = remedy_words(next((str(m.fields["remedy"]) for m in near if m.fields.get("remedy")), ""))
    if following is None:
        return told or "none: the job ended"
    before, after = _hosts(timing), _hosts(following)
    seen = ""
    if len(after) != len(before):
        seen = f"scaled {'down' if len(after) < len(before) else 'up'} from {len(before)} to {len(after)} ranks"
    else:
        gone, came = (
            sorted(set(before.values()) - set(after.values())),
            sorted(set(after.values()) - set(before.values())),
        )
        if gone and came:
            seen = f"swapped {', '.join(gone)} for {', '.join(came)}"
        elif timing.outcome == "rolled back" or all(s.rollback for s in following.attempt.segments):
            seen = "reloaded in the same process" if _loaded(following) else "went on in the same process"
        else:
            seen = "restarted"
    seen += at
    return f"{told}: {seen}" if told and told not in seen else seen


_SURVIVED = {
    EventKind.CHECKPOINT_FAILED: "Save failed",
    EventKind.CHECKPOINT_CORRUPT: "Corrupt checkpoint found",
    EventKind.CHECKPOINT_REPAIRED: "Checkpoint repaired",
    EventKind.CHECKPOINT_PASSED_OVER: "Damaged checkpoint passed over",
    EventKind.CHECKPOINT_NAME_REFUSED: "Checkpoint without its name",
    EventKind.AGENT_LOST: "Host agent lost",
}


def _survived(ledger: Ledger) -> list[Incident]:
    """Incidents that did not end an attempt. Equal notices from several ranks of one host at one time are one
    incident."""
    found = []
    told: dict[tuple[str, str], float] = {}
    for timing in ledger.timings:
        for mark in sorted((mark for mark in timing.marks if mark.kind in _SURVIVED), key=lambda mark: mark.time):
            incident = _minor(timing, mark)
            about = (incident.what, incident.where)
            if mark.time - told.get(about, -math.inf) > SAME_S:
                found.append(incident)
                told[about] = mark.time
    return found


def _minor(timing: Timing, mark: Mark) -> Incident:
    reason = str(mark.fields.get("reason") or mark.fields.get("path") or "")
    at = f" at step {mark.step:,}" if mark.step is not None else ""
    retry = mark.fields.get("will_retry")
    remedy = "retried" if retry is True else "not retried" if retry is False else str(mark.fields.get("source") or "")
    what = f"{_SURVIVED[mark.kind]}{at}" + (f": {reason}" if reason else "")
    where = str(mark.fields.get("tier") or mark.host)
    return Incident(
        time=mark.time, attempt=timing.index, what=what, where=where, remedy=remedy, gpu_s={}, ended_attempt=False
    )


def _stalls(ledger: Ledger) -> list[Incident]:
    """Steps of the lowest rank that took many times the usual step time without an event that explains it."""
    found: list[Incident] = []
    for timing in ledger.timings:
        lanes: Sequence[int] = sorted(timing.attempt.lanes)
        if not lanes:
            continue
        for segment in timing.attempt.lanes[lanes[0]]:
            usual = timing.usual_step_s
            if not usual:
                continue
            warm = {head.step >> segment.steps.shift for head in segment.steps.head[:3]}
            for key, window in sorted(segment.steps.windows.items()):
                waited = window.data_s + window.stall_s + window.eval_s + window.loop_s
                excess = window.max_s - usual - waited
                if key in warm or window.flight_n or excess < max(STALL_S, SLOW_STEP * usual):
                    continue
                time = segment.window_end(window)
                cost = {Bucket.UNKNOWN: excess * ledger.capacity}
                what = f"A step took {window.max_s:,.0f} s, usual {usual:.3g} s; no event says why"
                found.append(
                    Incident(
                        time=time or timing.progress,
                        attempt=timing.index,
                        what=what,
                        where="",
                        remedy="went on by itself",
                        gpu_s=cost,
                        ended_attempt=False,
                    )
                )
    return found
