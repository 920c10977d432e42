"""What was done about an incident, in words, from what a supervisor has logged. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from resiliency.events import EventKind
from resiliency.goodput.words import duration
from resiliency.telemetry.facts import Mark

__all__ = ["OBSERVATIONS", "last_told", "marks_of_incident", "remedy_words", "supervised_remedy", "was_over"]

_REMEDIES = {
    "nothing": "nothing",
    "restart_in_job": "ranks replaced in the job",
    "restart_workload": "restart of every process",
    "reset_devices": "devices reset",
    "hot_swap": "hot swap",
    "scale_down": "scaled down",
    "scale_up": "scaled up",
    "wait": "waited for hosts",
    "stop": "stopped",
}
#: Of a supervisor's ``observed``: what a report calls it.
OBSERVATIONS = {
    "device_fault": "Device fault",
    "host_unhealthy": "Host unhealthy",
    "drain": "Host drained",
    "straggler": "Straggler",
    "capacity": "Hosts became free",
    "no_progress": "No progress",
}


def remedy_words(kind: str) -> str:
    """What a report calls a supervisor's ``remedy``."""
    return _REMEDIES.get(kind, kind.replace("_", " "))


def last_told(known: Sequence[Mark]) -> dict[object, Mark]:
    """What the supervisor has said last of each incident, by its number."""
    last: dict[object, Mark] = {}
    for mark in known:
        number = mark.fields.get("incident")
        if number is not None and (number not in last or mark.time >= last[number].time):
            last[number] = mark
    return last


def was_over(last: Mark | None, progress: float, *, near_s: float) -> bool:
    """Whether an incident was over when an attempt last made ``progress``, so that it did not end it.

    Over is one of which the supervisor has said the last ``near_s`` before, or of which the last word is that its plan
    is done: what began an attempt may have been done a second before that attempt was lost.
    """
    return last is not None and last.time < progress - (0.0 if _is_done(last) else near_s)


def marks_of_incident(near: Sequence[Mark], known: Sequence[Mark]) -> list[Mark]:
    """All that the supervisor has logged of the incidents that the marks ``near`` a failure are about, in order."""
    numbers = {mark.fields["incident"] for mark in near if mark.fields.get("incident") is not None}
    return sorted((mark for mark in known if mark.fields.get("incident") in numbers), key=lambda mark: mark.time)


def supervised_remedy(marks: Sequence[Mark], swaps: Sequence[Mark]) -> str:
    """Its plans one after the other, with how each ended; "" when it had none.

    Args:
        marks: of the incident, in order of time.
        swaps: ``host_swapped`` and ``world_resized`` of the same time, which name hosts and sizes.
    """
    said = []
    asked = {mark.fields.get("plan") for mark in marks if mark.kind == EventKind.RESTART_REQUESTED}
    for mark in marks:
        if mark.kind == EventKind.RESTART_REQUESTED:
            ends = (other for other in marks if other.kind == EventKind.PLAN_ENDED)
            end = next((other for other in ends if other.fields.get("plan") == mark.fields.get("plan")), None)
            said.append(_plan(mark, end, swaps))
        elif mark.kind == EventKind.PLAN_ENDED and mark.fields.get("plan") not in asked:
            # A supervisor that is killed has its plans on disk, and their lines in the log not always.
            said.append(_plan(marks[0], mark, swaps, is_begin_known=False))
    return ", then ".join(said)


def _plan(asked: Mark, end: Mark | None, swaps: Sequence[Mark], *, is_begin_known: bool = True) -> str:
    kind = str((asked if is_begin_known or end is None else end).fields.get("remedy") or "")
    words = remedy_words(kind) or "restart"
    last = end.time if end is not None else float("inf")
    during = [mark for mark in swaps if asked.time - 1.0 <= mark.time <= last + 1.0]
    if kind == "hot_swap":
        pairs = [f"{mark.fields.get('old')} for {mark.fields.get('new')}" for mark in during if _is_swap(mark)]
        words += f" of {', '.join(dict.fromkeys(pairs))}" if pairs else ""
    sizes = [mark for mark in during if mark.kind == EventKind.WORLD_RESIZED]
    if sizes:
        words += f" from {sizes[-1].fields.get('old')} to {sizes[-1].fields.get('new')} hosts"
    if end is None:
        return f"{words} (not ended in the log)"
    after = f" after {duration(max(0.0, end.time - asked.time))}" if is_begin_known else ""
    if end.fields.get("outcome") == "done":
        return f"{words}, done{after}"
    why = str(end.fields.get("reason") or "")
    return f"{words}, {end.fields.get('outcome') or 'ended'}{after}" + (f" ({why})" if why else "")


def _is_done(mark: Mark) -> bool:
    is_done = mark.kind == EventKind.PLAN_ENDED and mark.fields.get("outcome") == "done"
    return is_done or mark.kind == EventKind.INCIDENT_CLOSED


def _is_swap(mark: Mark) -> bool:
    return mark.kind == EventKind.HOST_SWAPPED
