"""Advice on training itself: loaders, loops, slow ranks and slow steps. Pure."""

from __future__ import annotations

from resiliency.goodput.advice_words import Said, wall
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.named_spans import spans_of
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.words import duration, figure, precise

__all__ = ["data_wait", "idle", "loop", "scaled_down", "slowdown", "straggler"]

#: A part that takes a smaller share of each step gets no advice.
STEP_SHARE = 0.05
#: A slowdown counts as lasting when this share of the steps after the first slow one is slow.
LASTING = 0.9
#: The advice names a span that takes at least this share of the loop overhead.
SPAN_SHARE = 0.5
#: Idle time of fewer seconds gets no advice.
LEAST_S = 0.5


def _per_step(ledger: Ledger, name: str) -> dict[int, tuple[float, float]]:
    """By lane, mean seconds per step: of the part ``name`` (a field of the step totals), and of the whole step."""
    found = {}
    lanes = {lane for timing in ledger.timings for lane in timing.attempt.lanes}
    for lane in lanes:
        totals = [s.steps.total() for t in ledger.timings for s in t.attempt.lanes.get(lane, []) if s.steps.high >= 0]
        n = sum(total.n for total in totals)
        if n:
            part = sum(float(getattr(total, name)) for total in totals)
            found[lane] = (part / n, sum(total.step_s for total in totals) / n)
    return found


def data_wait(ledger: Ledger) -> Said | None:
    lanes = _per_step(ledger, "data_s")
    if not lanes:
        return None
    mean = sum(wait for wait, _ in lanes.values()) / len(lanes)
    step = sum(whole for _, whole in lanes.values()) / len(lanes)
    if mean < STEP_SHARE * step:
        return None
    worst = max(lanes, key=lambda lane: lanes[lane][0])
    others = [wait for lane, (wait, _) in lanes.items() if lane != worst]
    returns_s = wall(ledger, Bucket.DATA_WAIT)
    if others and lanes[worst][0] > 3 * sum(others) / len(others):
        where = next((one.host for one in ledger.lanes if one.lane == worst and one.host), "")
        words = f"rank {worst}{f' on {where}' if where else ''} waits {precise(lanes[worst][0])} a step for its loader"
        words += f", the others {precise(sum(others) / len(others))}: repairing its disk or loader"
        # The other ranks go on waiting: only what the worst rank waits longer than they do can be returned.
        returns_s *= (lanes[worst][0] - sum(others) / len(others)) / (mean * len(lanes))
    else:
        words = f"the loader takes {precise(mean)} of each step of {precise(step)}: more workers, or prefetching,"
    return words, returns_s


def loop(ledger: Ledger) -> Said | None:
    lanes = _per_step(ledger, "loop_s")
    if not lanes:
        return None
    mean = sum(loop for loop, _ in lanes.values()) / len(lanes)
    step = sum(whole for _, whole in lanes.values()) / len(lanes)
    if mean < STEP_SHARE * step:
        return None
    if (named := _span_within(ledger, wall(ledger, Bucket.LOOP))) is not None:
        return named
    words = f"callbacks, loggers and moving the batch take {precise(mean)} of each step of {precise(step)}"
    return f"{words}: doing these only every tenth step", 0.9 * wall(ledger, Bucket.LOOP)


def _span_within(ledger: Ledger, loop_s: float) -> Said | None:
    """Advice on the script's own span that takes most of the loop overhead; None when no span takes enough of it."""
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
    return f"the span `{name}`, {times}, is most of the loop overhead: running it half as often", min(took, loop_s) / 2


def slowdown(ledger: Ledger) -> Said | None:
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
    words += ": undoing what changed there"
    return words, wall(ledger, Bucket.SLOWDOWN)


def straggler(ledger: Ledger) -> Said | None:
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
    return f"{words}: {way}", wall(ledger, Bucket.STRAGGLER) * cost[worst] / whole


def scaled_down(ledger: Ledger) -> Said | None:
    whole = ledger.capacity // ledger.gpus_per_rank
    missing = max((whole - max(t.attempt.world, len(t.attempt.lanes)) for t in ledger.timings), default=0)
    if missing <= 0 or ledger.unit == "host":
        return None
    seconds = wall(ledger, Bucket.SCALED_DOWN) * whole / missing
    words = f"up to {missing} of {whole} ranks were missing, for {duration(seconds)} in all"
    return f"{words}: a spare host (`--spares 1`)", wall(ledger, Bucket.SCALED_DOWN)


def idle(ledger: Ledger) -> Said | None:
    ends = [timing.ended for timing in ledger.timings[-1:] if timing.outcome == "finished" and timing.ended is not None]
    if not ends or ledger.end - ends[0] < LEAST_S:
        return None
    after = ledger.end - ends[0]
    return f"the job goes on for {duration(after)} after its training: releasing the hosts then", after
