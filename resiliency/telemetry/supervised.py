"""A supervisor calls a job by its workload, the job's own processes by their run: what belongs together. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from resiliency.telemetry.facts import RunFacts

__all__ = ["join_supervisors"]


def join_supervisors(runs: Mapping[str, RunFacts]) -> dict[str, RunFacts]:
    """Runs by name, those that only a supervisor wrote of as a part of the run they are about.

    That is the one whose ranks tell the workload's name, or the only one. The facts that are given do not change.
    """
    told = {name: run for name, run in runs.items() if run.segments or run.nodes}
    joined = dict(runs)
    for name, run in runs.items():
        if name in told or not run.marks or run.scheduled is not None or run.saves:
            continue
        owners = [owner for owner, other in told.items() if name in other.workloads] or list(told)
        if len(owners) != 1:
            continue
        one = joined[owners[0]] = copy.copy(joined[owners[0]])
        one.marks = [*one.marks, *run.marks]
        one.others = {**run.others, **one.others}
        one.events += run.events
        del joined[name]
    return joined
