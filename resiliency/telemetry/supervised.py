"""Joins what a supervisor wrote of a job to the job's own events: the supervisor's carry the name of the workload, the
job's own that of the run. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from resiliency.telemetry.facts import RunFacts

__all__ = ["join_supervisors"]


def join_supervisors(runs: Mapping[str, RunFacts]) -> dict[str, RunFacts]:
    """Returns the runs by name; a run that only a supervisor wrote of becomes a part of the job's own run.

    That is the run whose ranks tell the name of the workload, or the only run with ranks; where there is no such run,
    or more than one, the supervisor's stays as it is. The facts passed in do not change.
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
