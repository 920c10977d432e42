"""Refuses the lines of processes that cannot have been, and says which lines of a log were refused. Pure.

Our writers produce none of them: such a log was edited, or another program wrote it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from resiliency.telemetry.facts import RunFacts, Segment

__all__ = ["refusal_note", "refuse_impossible"]

#: Quality counter -> why its lines were refused.
_REASONS = {
    "bad_values": "with a kind, attempt, rank or step that cannot be",
    "bad_times": "without a time",
    "refused_outside_life": "from outside the life of their process",
    "refused_rank": "of a rank beyond the size of the job",
}


def refuse_impossible(run: RunFacts) -> RunFacts:
    """A copy of ``run`` without the ranks beyond the size of their attempt, and without processes that did something
    and never started, where the others' starts are logged. ``quality`` counts their events and steps."""
    sizes: dict[int | None, int] = {}
    for one in run.segments:
        for size in (one.world, one.world_before):
            if size:
                sizes[one.attempt] = max(size, sizes.get(one.attempt, 0))
    starts = any(one.started is not None for one in run.segments)
    kept, gone, quality = [], set[int](), Counter(run.quality)
    for one in run.segments:
        if 0 < sizes.get(one.attempt, 0) <= one.lane:
            quality["refused_rank"] += one.events + one.steps.n
        elif starts and one.acts and not _began(one):
            quality["refused_outside_life"] += one.events
        else:
            kept.append(one)
            continue
        gone.add(id(one))
    marks = [mark for mark in run.marks if id(mark.by) not in gone]
    return dataclasses.replace(run, segments=kept, marks=marks, quality=quality)


def _began(one: Segment) -> bool:
    return one.rollback or one.started is not None or one.train is not None or one.steps.high >= 0


def refusal_note(run: RunFacts) -> str:
    """One sentence with the number of refused lines by reason; "" when there are none."""
    counted = [f"{count:,} {why}" for name, why in _REASONS.items() if (count := run.quality[name])]
    return f"Refused lines, which do not count: {', '.join(counted)}." if counted else ""
