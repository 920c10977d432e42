"""The ends of workloads, as a cluster keeps them with the job: there, a stop outlives the state of every supervisor.
Pure: no input, no output, no clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from resiliency.runtime.typed_json import from_jsonable, to_jsonable
from resiliency.supervisor.model import Workload, WorkloadState

__all__ = ["End", "ends_of", "ends_text"]

_LONGEST_REASON = 500


@dataclass(frozen=True, kw_only=True)
class End:
    """A workload was stopped.

    Attributes:
        generation: its last one. A later one was begun after that.
        by_hand: an operator has stopped it; otherwise it was given up.
    """

    workload: str
    generation: int
    by_hand: bool
    reason: str


def ends_text(workloads: Iterable[Workload]) -> str:
    """What is to be kept of these workloads; "": none was stopped."""
    ends = [
        End(workload=each.name, generation=each.generation, by_hand=each.by_hand, reason=each.reason[:_LONGEST_REASON])
        for each in workloads
        if each.state is WorkloadState.STOPPED
    ]
    return json.dumps([to_jsonable(end) for end in sorted(ends, key=lambda end: end.workload)]) if ends else ""


def ends_of(text: str) -> list[End]:
    """What was kept.

    Raises:
        ValueError: somebody else has written the text.
    """
    found = json.loads(text or "[]")
    if not isinstance(found, list):
        raise ValueError("it is no list")
    return [from_jsonable(End, each) for each in found]
