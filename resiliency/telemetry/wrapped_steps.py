"""Finds step lines that a log shipper has wrapped, without parsing the whole text as JSON: entries of Cloud Logging
that hold the event as ``jsonPayload``, its keys in the order of our writers or of the alphabet. Pure."""

from __future__ import annotations

import re

__all__ = ["DENSE_STEP", "ENTRY_BREAK", "SORTED_STEP", "WrappedStep", "find_as_written", "find_step"]

#: The text between two entries of an array as ``gcloud logging read --format=json`` prints it.
ENTRY_BREAK = re.compile(rb"\n  \},\s*\n  \{\r?\n")

#: A well formed number below 1e9, as in the reader. Integers (``_INT``) may be written as ``40.0``.
_N = rb"(\d{1,9}(?:\.\d{1,20}|)(?:e-\d{1,3}|))"
_INT = rb"(\d{1,18})(?:\.0|)"
_TEXT = rb'"([^"\\\n]*)"'


def _pair(name: str, value: bytes, *, optional: bool = False) -> bytes:
    found = rb'"' + name.encode() + rb'":\s?' + value + rb",?\s*"
    return rb"(?:" + found + rb"|)" if optional else found


def _without_spaces(pattern: bytes) -> re.Pattern[bytes]:
    """The same pattern for text without spaces, as exporters of lines write it: it matches in four fifths of the
    time."""
    return re.compile(pattern.replace(rb"\s?", b"").replace(rb"\s*", b""))


_STEP = rb'"step"'
_FLAG = rb"(?:(true)|false)"
_OPEN = rb'"jsonPayload":\s?\{\s*'
_SORTED_TEXT = (
    _OPEN
    + _pair("attempt", _INT)
    + _pair("busy_s", _N, optional=True)
    + _pair("count", _INT, optional=True)
    + _pair("data_wait_s", _N)
    + _pair("eval_s", _N, optional=True)
    + _pair("event_type", _STEP)
    + _pair("host", _TEXT)
    + _pair("job_name", _TEXT)
    + _pair("loop_s", _N, optional=True)
    + _pair("monotonic_s", _N)
    + _pair("rank", _INT)
    + _pair("save_in_flight", _FLAG)
    + _pair("stall_s", _N)
    + _pair("step", _INT)
    + _pair("step_max_s", _N, optional=True)
    + _pair("step_s", _N)
    + _pair("timestamp", _TEXT)
    + _pair("v", rb"1(?:\.0|)")
    + rb"\}"
)
SORTED_STEP = re.compile(_SORTED_TEXT)
#: The form of most lines: sorted keys, no spaces. Where the cost of a call counts, try it before :func:`find_step`. Its
#: groups are a ``WrappedStep``.
DENSE_STEP = _without_spaces(_SORTED_TEXT)
_AS_WRITTEN = re.compile(
    _OPEN
    + _pair("timestamp", _TEXT)
    + _pair("job_name", _TEXT)
    + _pair("event_type", _STEP)
    + _pair("v", rb"1(?:\.0|)")
    + _pair("monotonic_s", _N)
    + _pair("attempt", _INT)
    + _pair("rank", _INT)
    + _pair("host", _TEXT)
    + _pair("step", _INT)
    + _pair("step_s", _N)
    + _pair("data_wait_s", _N)
    + _pair("stall_s", _N)
    + _pair("save_in_flight", _FLAG)
    + _pair("busy_s", _N, optional=True)
    + _pair("eval_s", _N, optional=True)
    + _pair("loop_s", _N, optional=True)
    + _pair("count", _INT, optional=True)
    + _pair("step_max_s", _N, optional=True)
    + rb"\}"
)
_Found = bytes | None
#: The fields of a step, in this order: attempt, busy, count, data wait, eval, host, job name, loop, monotonic time,
#: rank, save in flight, stall, step number, longest step, step time, timestamp.
WrappedStep = tuple[
    bytes,
    _Found,
    _Found,
    bytes,
    _Found,
    bytes,
    bytes,
    _Found,
    bytes,
    bytes,
    _Found,
    bytes,
    bytes,
    _Found,
    bytes,
    bytes,
]


def find_step(entry: bytes) -> WrappedStep | None:
    """Returns the step in an entry; None when there is none, or when its keys are in neither of the two orders."""
    match = SORTED_STEP.search(entry)
    if match is not None:
        return match.groups()  # type: ignore[return-value]
    return find_as_written(entry)


def find_as_written(entry: bytes) -> WrappedStep | None:
    """Returns the step in an entry whose keys are in the order of our writers; None for any other entry."""
    match = _AS_WRITTEN.search(entry)
    if match is None:
        return None
    stamp, name, mono, attempt, rank, host, step, step_s, data, stall, flight, busy, evals, loop, count, most = (
        match.groups()
    )
    return attempt, busy, count, data, evals, host, name, loop, mono, rank, flight, stall, step, most, step_s, stamp
