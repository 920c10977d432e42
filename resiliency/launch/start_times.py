"""When this process began an attempt, and got to the training: what a restart is split into by the goodput report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from resiliency.settings import LAUNCHER_VARIABLE, all_variables, environment

__all__ = ["callback_made", "process_age_s", "script_begins", "start_fields"]

#: One of these is in the command line of torchrun.
_TORCHRUN = (b"torchrun", b"torch.distributed", b"torch/distributed")


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
    """For the first ``job_started`` of an attempt: ``since_process_s``, ``since_callback_s`` and, where torchrun has
    started the process, ``since_launcher_s``, seconds.

    Nothing where no launcher has started the process: in a notebook the start of the process is not that of the job.
    """
    times = _own()
    if times.told or not environment().launch.job:
        return {}
    times.told = True
    now = time.monotonic()
    began = times.began if times.began is not None else now - process_age_s()
    fields = {"since_process_s": round(now - began, 6)}
    launcher_s = _torchrun_age_s()
    if launcher_s is not None:
        fields["since_launcher_s"] = round(launcher_s, 6)
    if times.callback is not None and times.callback >= began:
        fields["since_callback_s"] = round(now - times.callback, 6)
    return fields


def _torchrun_age_s() -> float | None:
    """How long torchrun has run, where it is this process's parent. Other launchers log their start, or are not known;
    a notebook that launches ranks began long before the job."""
    variables, parent = all_variables(), os.getppid()
    if not variables.get("TORCHELASTIC_RUN_ID") or variables.get(LAUNCHER_VARIABLE):
        return None
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            command = file.read()
        return process_age_s(parent) if any(word in command for word in _TORCHRUN) else None
    except OSError:
        return None  # another user's process, in a container that hides those


def process_age_s(process: int | str = "self") -> float:
    """Of this process or another, to a hundredth of a second, as the kernel counts.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{process}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
