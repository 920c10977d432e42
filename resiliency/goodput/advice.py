"""What to change, from what was measured: one sentence for each of the largest causes. Pure.

A rule speaks only where figures of the log support it; a cause without one has no advice. What a change would return
is at most what it can take away, in wall time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.named_spans import spans_of
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.taxonomy import BUCKETS, Bucket
from resiliency.goodput.timing import Timing
from resiliency.goodput.words import duration, figure, precise

__all__ = ["Advice", "advise", "largest_causes"]

#: A cause with a smaller share is not worth a sentence.
LEAST_SHARE = 0.01
MOST_CAUSES = 3
#: Of a restart or start: a part that is shorter, in seconds or as a share of it, is not what to mend.
PART_S, PART_SHARE = 0.5, 0.15
#: Of a step: what waits for less is no finding.
STEP_SHARE = 0.05
#: Another interval between saves is advised only when it is this much longer or shorter.
INTERVAL_FACTOR = 1.5
#: Of the steps after the first slow one, this share is slow where it lasts.
LASTING = 0.9
#: A span that is at least this share of the loop's overhead is named.
SPAN_SHARE = 0.5
#: For a hang: the least that a watchdog should wait, and how many times the longest usual step.
HANG_S, HANG_STEPS = 60.0, 10.0


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
            returns_s = min(returns_s, _wall(ledger, bucket))
            share = returns_s / max(1e-9, ledger.wall_us / 1e6)
            if share >= LEAST_SHARE / 2:
                text = f"{words} would return up to {duration(returns_s)}, {figure(share)} of the run"
                found[bucket] = Advice(bucket=bucket, text=text, returns_s=returns_s)
    return found


#: What was measured and what to do, up to "would return", and seconds of wall time.
_Said = tuple[str, float]


def _wall(ledger: Ledger, bucket: Bucket) -> float:
    return ledger.wall[bucket] / 1e6


def _of_each(count: int, what: str) -> str:
    return f"of each of {count} {what}s" if count > 1 else f"of the {what}"


def _launched(ledger: Ledger) -> bool:
    """``resiliency run`` has started the job: it logs when it starts ranks."""
    return any(mark.kind == EventKind.RANKS_STARTED for mark in ledger.facts.marks)


def _restarted(ledger: Ledger) -> list[Timing]:
    return [timing for timing in ledger.timings[1:] if timing.train is not None]


# -- starts -----------------------------------------------------------------------------------------------------------


def _restart(ledger: Ledger) -> _Said | None:
    count = len(_restarted(ledger))
    parts = {part: wall / 1e6 for part, (wall, _) in ledger.start_parts(Bucket.RESTART).items()}
    if not count or not parts:
        return None
    ours = _launched(ledger)
    ways: dict[StartPart, tuple[str, str]] = {
        StartPart.IMPORTS: (
            "imports are",
            "`--preload` of what the script imports, with standby ranks"
            if ours
            else "`resiliency run`, whose ranks are forked from a process that has imported them,",
        ),
        StartPart.PROCESSES: (
            "until its processes are up take",
            "standby ranks (no `--no-standby`)" if ours else "`resiliency run`, which sees a death at once and forks,",
        ),
        StartPart.RANKS_END: ("until other ranks end take", "ranks that stay in their processes (`restartable`)"),
        StartPart.SCRIPT: ("the script before its callbacks takes", "moving that work behind a cache"),
        StartPart.RENDEZVOUS: ("the process group takes", "fewer groups and a nearer store"),
        StartPart.AGENT: ("the checkpointer and its agent take", "a nearer or faster checkpoint folder"),
        StartPart.FIRST_BATCH: ("the first batch after the load takes", "a loader that starts faster"),
    }
    if not ours:
        del ways[StartPart.RANKS_END]
    worst = max((part for part in ways if part in parts), key=lambda part: parts[part], default=None)
    if worst is None or parts[worst] / count < PART_S or parts[worst] < PART_SHARE * sum(parts.values()):
        return None
    verb, way = ways[worst]
    if worst in (StartPart.PROCESSES, StartPart.RANKS_END):
        words = f"{duration(parts[worst] / count)} {_of_each(count, 'restart')} pass until"
        words += " its processes are up" if worst is StartPart.PROCESSES else " the other ranks have ended"
    else:
        words = f"{verb} {duration(parts[worst] / count)} {_of_each(count, 'restart')}"
    return f"{words}: {way}", parts[worst]


def _first_start(ledger: Ledger) -> _Said | None:
    launched = [segment.launched for segment in ledger.facts.segments if segment.launched is not None]
    launched += [mark.time for mark in ledger.facts.marks if mark.kind == EventKind.LAUNCHER_STARTED]
    if ledger.facts.scheduled is not None and launched:
        waited = min(launched) - max(ledger.start, ledger.facts.scheduled)
        if waited > max(PART_S, PART_SHARE * _wall(ledger, Bucket.FIRST_START)):
            return f"{duration(waited)} pass from scheduling to the launcher: smaller images and a free queue", waited
    return None


def _restore(ledger: Ledger) -> _Said | None:
    """Only where the same job has restored faster from another tier."""
    tiers = {name: tier for name, tier in ledger.facts.tiers.items() if tier.restore_n}
    means = {name: tier.restore_s / tier.restore_n for name, tier in tiers.items()}
    if len(means) < 2:
        return None
    slow, fast = max(means, key=lambda name: means[name]), min(means, key=lambda name: means[name])
    whole = sum(tier.restore_s for tier in tiers.values())
    saved = tiers[slow].restore_s * (1 - means[fast] / means[slow])
    if means[slow] < INTERVAL_FACTOR * means[fast]:
        return None
    words = (
        f"a restore from {slow} takes {duration(means[slow])}, from {fast} {duration(means[fast])}: a copy in {fast}"
    )
    return f"{words} at every restart", _wall(ledger, Bucket.RESTORE) * saved / whole


def _warm_up(ledger: Ledger) -> _Said | None:
    count = sum(timing.train is not None for timing in ledger.timings)
    warm = _wall(ledger, Bucket.WARM_UP)
    if count < 2 or not ledger.usual_step_s:
        return None
    words = f"the first steps {_of_each(count, 'attempt')} take {duration(warm / count)} longer than usual"
    return f"{words}: a compilation cache that outlives the process", warm * (count - 1) / count


# -- failures ---------------------------------------------------------------------------------------------------------


def _detection(ledger: Ledger) -> _Said | None:
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
    if hung and saved > PART_S:
        each = f"{duration(waited / hung)} pass until {'a' if hung > 1 else 'the'} hang is noticed"
        return f"{each}, a usual step takes {_step(ledger)}: `--hang-timeout {math.ceil(longest)}`", saved
    failed = [timing for timing in ledger.timings if timing.outcome == "failed" and timing.noticed is not None]
    if failed and not hung and not _launched(ledger):
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
    """``every`` steps apart, each costing ``cost_s`` of training; ``best`` is the number of steps apart that would cost
    the least, and ``returns_s`` what that would return."""

    every: float
    cost_s: float
    failures: int
    best: int
    returns_s: float


def _saves(ledger: Ledger) -> _Saves | None:
    """The interval between saves that costs the least: what a save costs against what a failure loses.

    After a failure half of an interval is lost on average. With saves every T seconds of training, T/2 a failure and c
    a save are lost, which is least at T = sqrt(2 c / failures per second).
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
    lost_s = _wall(ledger, Bucket.LOST_WORK)
    cost_s = (_wall(ledger, Bucket.CHECKPOINT_STALL) + _wall(ledger, Bucket.INTERFERENCE)) / count
    training_s = steps * usual
    best = max(1, round(math.sqrt(2 * cost_s * training_s / failures) / usual))
    now_s = lost_s + cost_s * count
    then_s = lost_s * min(1.0, best / every) if best < every else failures * best * usual / 2
    then_s += cost_s * steps / best
    return _Saves(every=every, cost_s=cost_s, failures=failures, best=best, returns_s=now_s - then_s)


def _lost_work(ledger: Ledger) -> _Said | None:
    saves = _saves(ledger)
    if saves is None or saves.best * INTERVAL_FACTOR > saves.every or saves.returns_s <= 0:
        return None
    return f"{_save_figures(saves)}: a save every {_steps(saves.best)}", saves.returns_s


def _interference(ledger: Ledger) -> _Said | None:
    saves = _saves(ledger)
    if saves is None or saves.best < INTERVAL_FACTOR * saves.every or saves.returns_s <= 0:
        return None
    return f"{_save_figures(saves)}: a save every {_steps(saves.best)}", saves.returns_s


def _stall(ledger: Ledger) -> _Said | None:
    rarer = _interference(ledger)
    if rarer is not None:
        return rarer
    segments = [segment for timing in ledger.timings for segment in timing.attempt.segments]
    eager = sum(segment.stall_between_s for segment in segments)
    whole = sum(segment.stall_s for segment in segments)
    count = sum(segment.saves for segment in segments)
    if not count or whole <= 0:
        return None
    stalled = _wall(ledger, Bucket.CHECKPOINT_STALL)
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


# -- steps ------------------------------------------------------------------------------------------------------------


def _per_step(ledger: Ledger, name: str) -> dict[int, tuple[float, float]]:
    """Seconds of each lane by step: of that part, and of the whole step."""
    found = {}
    lanes = {lane for timing in ledger.timings for lane in timing.attempt.lanes}
    for lane in lanes:
        totals = [s.steps.total() for t in ledger.timings for s in t.attempt.lanes.get(lane, []) if s.steps.high >= 0]
        n = sum(total.n for total in totals)
        if n:
            part = sum(float(getattr(total, name)) for total in totals)
            found[lane] = (part / n, sum(total.step_s for total in totals) / n)
    return found


def _data_wait(ledger: Ledger) -> _Said | None:
    lanes = _per_step(ledger, "data_s")
    if not lanes:
        return None
    mean = sum(wait for wait, _ in lanes.values()) / len(lanes)
    step = sum(whole for _, whole in lanes.values()) / len(lanes)
    if mean < STEP_SHARE * step:
        return None
    worst = max(lanes, key=lambda lane: lanes[lane][0])
    others = [wait for lane, (wait, _) in lanes.items() if lane != worst]
    if others and lanes[worst][0] > 3 * sum(others) / len(others):
        where = next((one.host for one in ledger.lanes if one.lane == worst and one.host), "")
        words = f"rank {worst}{f' on {where}' if where else ''} waits {precise(lanes[worst][0])} a step for its loader"
        words += f", the others {precise(sum(others) / len(others))}: its disk or loader mended"
    else:
        words = f"the loader takes {precise(mean)} of each step of {precise(step)}: more workers, or prefetching,"
    return words, _wall(ledger, Bucket.DATA_WAIT)


def _loop(ledger: Ledger) -> _Said | None:
    lanes = _per_step(ledger, "loop_s")
    if not lanes:
        return None
    mean = sum(loop for loop, _ in lanes.values()) / len(lanes)
    step = sum(whole for _, whole in lanes.values()) / len(lanes)
    if mean < STEP_SHARE * step:
        return None
    if (named := _span_within(ledger, _wall(ledger, Bucket.LOOP))) is not None:
        return named
    words = f"callbacks, loggers and moving the batch take {precise(mean)} of each step of {precise(step)}"
    return f"{words}: doing that every tenth step", 0.9 * _wall(ledger, Bucket.LOOP)


def _span_within(ledger: Ledger, loop_s: float) -> _Said | None:
    """The span of the script's own that is most of the time between batches."""
    spent: dict[str, list[float]] = {}
    for one in spans_of(ledger):
        train = ledger.timings[one.attempt].train
        if one.ended and train is not None and one.start >= train:
            spent.setdefault(one.name, []).append(ledger.kept_us(one.start, one.end) / 1e6)
    if not spent:
        return None
    name = max(spent, key=lambda each: sum(spent[each]))
    ranks = max(1, len({one.rank for one in spans_of(ledger) if one.name == name}))
    took, count = sum(spent[name]) / ranks, max(1, round(len(spent[name]) / ranks))
    if took < SPAN_SHARE * loop_s:
        return None
    times = f"{count:,} times {duration(took / count)}" if count > 1 else duration(took)
    return f"the span `{name}`, {times}, is most of it: half as often", min(took, loop_s) / 2


def _slowdown(ledger: Ledger) -> _Said | None:
    best = ledger.best_step_s
    found = [one for parts in ledger.splits.values() for part in parts for one in part.slow if one.excess_s > 0]
    if not best or not found:
        return None
    lanes = {lane for (_, lane), parts in ledger.splits.items() if any(part.slow for part in parts)}
    per_step = sum(one.excess_s for one in found) / sum(one.n for one in found)
    slow, first = sum(one.n for one in found) // len(lanes), max(1, min(one.first for one in found))
    top = max((timing.top or 0 for timing in ledger.timings), default=0)
    who = f"of rank {min(lanes)} " if len(lanes) == 1 and len(ledger.lanes) > 1 else ""
    words = f"{slow:,} steps {who}take {precise(best + per_step)} to compute instead of {precise(best)}"
    if slow >= LASTING * (top - first):
        words += f", from step {first:,} on"
    words += ": what changed there, mended,"
    return words, _wall(ledger, Bucket.SLOWDOWN)


def _straggler(ledger: Ledger) -> _Said | None:
    cost: dict[int, float] = {}
    data: dict[int, float] = {}
    for late in ledger.late.values():
        for lane, seconds in late.blamed.items():
            cost[lane] = cost.get(lane, 0.0) + seconds
            data[lane] = data.get(lane, 0.0) + late.blamed_data.get(lane, 0.0)
    whole = sum(cost.values())
    if not whole:
        return None
    worst = max(cost, key=lambda lane: cost[lane])
    if cost[worst] < 0.5 * whole:
        return None
    host = next((one.host for one in ledger.lanes if one.lane == worst), "")
    cause = "its data loader" if data[worst] > 0.5 * cost[worst] else "its computing"
    words = f"rank {worst}{f' on {host}' if host else ''} is {figure(cost[worst] / whole)} of it, by {cause}"
    way = "its loader or disk mended" if data[worst] > 0.5 * cost[worst] else "another host in its place"
    return f"{words}: {way}", _wall(ledger, Bucket.STRAGGLER) * cost[worst] / whole


def _scaled_down(ledger: Ledger) -> _Said | None:
    missing = max((ledger.capacity - max(t.attempt.world, len(t.attempt.lanes)) for t in ledger.timings), default=0)
    if missing <= 0 or ledger.unit == "host":
        return None
    seconds = _wall(ledger, Bucket.SCALED_DOWN) * ledger.capacity / missing
    words = f"up to {missing} of {ledger.capacity} ranks were missing, for {duration(seconds)} in all"
    return f"{words}: a spare host (`--spares 1`)", _wall(ledger, Bucket.SCALED_DOWN)


def _idle(ledger: Ledger) -> _Said | None:
    ends = [timing.ended for timing in ledger.timings[-1:] if timing.outcome == "finished" and timing.ended is not None]
    if not ends or ledger.end - ends[0] < PART_S:
        return None
    after = ledger.end - ends[0]
    return f"the job goes on for {duration(after)} after its training: releasing the hosts then", after


_RULES: dict[Bucket, Callable[[Ledger], _Said | None]] = {
    Bucket.FIRST_START: _first_start,
    Bucket.RESTART: _restart,
    Bucket.RESTORE: _restore,
    Bucket.WARM_UP: _warm_up,
    Bucket.DETECTION: _detection,
    Bucket.LOST_WORK: _lost_work,
    Bucket.CHECKPOINT_STALL: _stall,
    Bucket.INTERFERENCE: _interference,
    Bucket.DATA_WAIT: _data_wait,
    Bucket.LOOP: _loop,
    Bucket.SLOWDOWN: _slowdown,
    Bucket.STRAGGLER: _straggler,
    Bucket.SCALED_DOWN: _scaled_down,
    Bucket.IDLE: _idle,
}
