"""Advice on starts, restarts and restores. Pure."""

from __future__ import annotations

from resiliency.events import EventKind
from resiliency.goodput.advice_words import INTERVAL_FACTOR, Said, launched, of_each, wall
from resiliency.goodput.ledger import Ledger
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.timing import Timing
from resiliency.goodput.words import duration

__all__ = ["first_start", "restart", "restore", "warm_up"]

#: A part of a start that is shorter than this, in seconds or as a share of the whole start, gets no advice.
PART_S, PART_SHARE = 0.5, 0.15


def _restarted(ledger: Ledger) -> list[Timing]:
    return [timing for timing in ledger.timings[1:] if timing.train is not None]


def restart(ledger: Ledger) -> Said | None:
    count = len(_restarted(ledger))
    parts = {part: wall / 1e6 for part, (wall, _) in ledger.start_parts(Bucket.RESTART).items()}
    if not count or not parts:
        return None
    ours = launched(ledger)
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
        words = f"{duration(parts[worst] / count)} {of_each(count, 'restart')} pass until"
        words += " its processes are up" if worst is StartPart.PROCESSES else " the other ranks have ended"
    else:
        words = f"{verb} {duration(parts[worst] / count)} {of_each(count, 'restart')}"
    return f"{words}: {way}", parts[worst]


def first_start(ledger: Ledger) -> Said | None:
    launched = [segment.launched for segment in ledger.facts.segments if segment.launched is not None]
    launched += [mark.time for mark in ledger.facts.marks if mark.kind == EventKind.LAUNCHER_STARTED]
    if ledger.facts.scheduled is not None and launched:
        waited = min(launched) - max(ledger.start, ledger.facts.scheduled)
        if waited > max(PART_S, PART_SHARE * wall(ledger, Bucket.FIRST_START)):
            return f"{duration(waited)} pass from scheduling to the launcher: smaller images and a free queue", waited
    return None


def restore(ledger: Ledger) -> Said | None:
    """Advice when the same job restored faster from another tier; None otherwise."""
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
    return f"{words} at every restart", wall(ledger, Bucket.RESTORE) * saved / whole


def warm_up(ledger: Ledger) -> Said | None:
    count = sum(timing.train is not None for timing in ledger.timings)
    warm = wall(ledger, Bucket.WARM_UP)
    if count < 2 or not ledger.usual_step_s:
        return None
    words = f"the first steps {of_each(count, 'attempt')} take {duration(warm / count)} longer than usual"
    return f"{words}: a compilation cache that outlives the process", warm * (count - 1) / count
