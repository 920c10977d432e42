"""The older library's names of its events, and their order at equal times."""

from __future__ import annotations

from resiliency.events import EventKind
from resiliency.goodput_measure.calculator import EVENT_TYPE_ORDER

__all__ = [
    "CHECKPOINT_LOADED",
    "CHECKPOINT_SAVED",
    "EVENT_TYPE_ORDER",
    "JOB_STARTED",
    "JOB_TERMINATED",
    "USER_SCHEDULED",
    "USER_TERMINATED",
]

USER_SCHEDULED = EventKind.USER_SCHEDULED
USER_TERMINATED = EventKind.USER_TERMINATED
JOB_STARTED = EventKind.JOB_STARTED
JOB_TERMINATED = EventKind.JOB_TERMINATED
CHECKPOINT_LOADED = EventKind.CHECKPOINT_LOADED
CHECKPOINT_SAVED = EventKind.CHECKPOINT_SAVED
