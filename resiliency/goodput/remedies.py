"""Words for what was done about an incident, from the events that a supervisor logged. Pure."""

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
#: What a report calls the ``observation`` of a supervisor's ``observed`` event.
OBSERVATIONS = {
    "device_fault": "Device fault",
    "host_unhealthy": "Host unhealthy",
    "drain": "Host drained",
    "straggler": "Straggler",
    "capacity": "Hosts became free",
    "no_progress": "No progress",
}


def remedy_words(kind: str) -> str:
    """What a report calls a supervisor's ``remedy``; an unknown one keeps its name, with spaces for underscores."""
    return _REMEDIES.get(kind, kind.replace("_", " "))


def last_told(known: Sequence[Mark]) -> dict[object, Mark]:
    """The last mark of each incident, by the number that the supervisor gave it."""
    last: dict[object, Mark] = {}
    for mark in known:
        number = mark.fields.get("incident")
        if number is not None and (number not in last or mark.time >= last[number].time):
            last[number] = mark
    return last


def was_over(last: Mark | None, progress: float, *, near_s: float) -> bool:
    """True when an incident was over before an attempt's last ``progress``, so that it did not end the attempt.

    It was over when its last mark is more than ``near_s`` seconds older than the progress. A last mark that closes the
    incident, or says that its plan is done, may be any time older, because the plan that began an attempt may have been
    done only a second before the attempt was lost.
    """
    return last is not None and last.time < progress - (0.0 if _is_done(last) else near_s)


def marks_of_incident(near: Sequence[Mark], known: Sequence[Mark]) -> list[Mark]:
    """The marks in ``known`` of all incidents that the marks ``near`` a failure belong to, in order of time."""
    numbers = {mark.fields["incident"] for mark in near if mark.fields.get("incident") is not None}
    return sorted((mark for mark in known if mark.fields.get("incident") in numbers), key=lambda mark: mark.time)


def supervised_remedy(marks: Sequence[Mark], swaps: Sequence[Mark]) -> str:
    """The supervisor's plans for an incident in order, each with its outcome; "" when there was no plan.

    Args:
        marks: the marks of the incident, in order of time.
        swaps: marks ``host_swapped`` and ``world_resized``; those during a plan name its hosts and sizes.
    """
    said = []
    asked = {mark.fields.get("plan") for mark in marks if mark.kind == EventKind.RESTART_REQUESTED}
    for mark in marks:
        if mark.kind == EventKind.RESTART_REQUESTED:
            ends = (other for other in marks if other.kind == EventKind.PLAN_ENDED)
            end = next((other for other in ends if other.fields.get("plan") == mark.fields.get("plan")), None)
            said.append(_plan(mark, end, swaps))
        elif mark.kind == EventKind.PLAN_ENDED and mark.fields.get("plan") not in asked:
            # The line that began this plan may be missing: a killed supervisor has its plans on disk, but did not
            # always log them.
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
