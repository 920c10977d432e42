"""When this process began an attempt, and got to the training: what a restart is split into by the goodput report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from resiliency.settings import environment

__all__ = ["callback_made", "script_begins", "start_fields"]


@dataclass
class _Times:
    """Monotonic seconds. ``began`` None: when the process was made."""

    pid: int
    began: float | None = None
    callback: float | None = None
    told: bool = False


_times = _Times(pid=0)


def _own() -> _Times:
    global _times
    if _times.pid != os.getpid():
        _times = _Times(pid=os.getpid())
    return _times


def script_begins() -> None:
    """Begins the times anew, in a process that is older than its attempt: a rank that was forked, or that stays."""
    global _times
    _times = _Times(pid=os.getpid(), began=time.monotonic())


def callback_made() -> None:
    """The script has made a callback: its imports are over."""
    _own().callback = time.monotonic()


def start_fields() -> dict[str, float]:
    """For the first ``job_started`` of an attempt: ``since_process_s`` and ``since_callback_s``, seconds.

    Nothing where no launcher has started the process: in a notebook the start of the process is not that of the job.
    """
    times = _own()
    if times.told or not environment().launch.job:
        return {}
    times.told = True
    now = time.monotonic()
    began = times.began if times.began is not None else now - _process_age_s()
    fields = {"since_process_s": round(now - began, 6)}
    if times.callback is not None and times.callback >= began:
        fields["since_callback_s"] = round(now - times.callback, 6)
    return fields


def _process_age_s() -> float:
    """To a hundredth of a second, as the kernel counts."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
