"""Times when this process began an attempt and reached training; the goodput report splits a restart by them."""

from __future__ import annotations

import functools
import os
import stat
import sys
import time
from dataclasses import dataclass
from typing import Any

from resiliency.settings import JOB_VARIABLE, LAUNCHER_VARIABLE, all_variables, environment

__all__ = ["callback_made", "process_age_s", "script_begins", "start_fields"]

#: Torchrun's command line contains one of these.
_TORCHRUN = (b"torchrun", b"torch.distributed", b"torch/distributed")
#: Monotonic time of this import; a fresh process has imported torch and Lightning by then.
_IMPORTED_S = time.monotonic()


@dataclass
class _Times:
    """Monotonic seconds. ``began``: start of the attempt; None: the start of the process."""

    pid: int
    began: float | None = None
    callback: float | None = None
    #: When init_process_group was called, and when it returned.
    group: tuple[float, float] | None = None
    watches_group: bool = False
    told: bool = False


_times = _Times(pid=0)


def _own() -> _Times:
    global _times
    if _times.pid != os.getpid():
        _times = _Times(pid=os.getpid())
    return _times


def script_begins() -> None:
    """Resets the times, in a process that is older than its attempt: a forked rank, or one that goes on."""
    global _times
    _times = _Times(pid=os.getpid(), began=time.monotonic())


def callback_made() -> None:
    """Records that the script has made a callback, which means that its imports are done."""
    times = _own()
    times.callback = time.monotonic()
    if not times.told and environment().launch.job:
        _time_group(times)


def start_fields() -> dict[str, Any]:
    """Fields for the first ``job_started`` event of an attempt, in seconds: ``since_process_s``, ``since_callback_s``,
    ``imports_s`` (in a new process, until it has imported this library), ``since_group_s`` and ``group_s`` (since
    init_process_group was called, and how long it took) and, where torchrun has started the process,
    ``since_launcher_s``. Also ``logs``, the files that its output goes to, and ``workload``, a supervisor's name for
    the job.

    Empty on later calls, and where no launcher has started the process: in a notebook the process starts long before
    the job.
    """
    times = _own()
    if times.told or not environment().launch.job:
        return {}
    times.told = True
    now = time.monotonic()
    began = times.began if times.began is not None else now - process_age_s()
    fields: dict[str, Any] = {"since_process_s": round(now - began, 6)}
    launcher_s = _torchrun_age_s()
    if launcher_s is not None:
        fields["since_launcher_s"] = round(launcher_s, 6)
    if times.callback is not None and times.callback >= began:
        fields["since_callback_s"] = round(now - times.callback, 6)
        if times.began is None:  # a process that is older than its attempt has most imports from before
            fields["imports_s"] = round(max(0.0, min(_IMPORTED_S, times.callback) - began), 6)
    if times.group is not None:
        called, returned = times.group
        fields.update(since_group_s=round(now - called, 6), group_s=round(returned - called, 6))
    if workload := all_variables().get(JOB_VARIABLE):
        fields["workload"] = workload
    if logs := _output_files():
        fields["logs"] = logs
    return fields


def _output_files() -> list[str]:
    """Paths of the regular files that standard output and standard error of this process go to; empty for pipes."""
    found = []
    for fd in (1, 2):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
            is_file = stat.S_ISREG(os.fstat(fd).st_mode) and os.path.samestat(os.stat(path), os.fstat(fd))
        except OSError:
            continue  # closed, or the file was deleted
        if is_file and path not in found:
            found.append(path)
    return found


# -- the process group ------------------------------------------------------------------------------------------------


def _time_group(times: _Times) -> None:
    """Times the next init_process_group call. Does nothing where torch is missing, or when it is timed already."""
    torch: Any = sys.modules.get("torch.distributed")
    initialise = getattr(torch, "init_process_group", None)
    if initialise is None or times.watches_group:
        return
    times.watches_group = True

    @functools.wraps(initialise)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        if torch.init_process_group is init_process_group:
            torch.init_process_group = initialise
        called = time.monotonic()
        try:
            return initialise(*arguments, **named)
        finally:
            times.group = (called, time.monotonic())

    torch.init_process_group = init_process_group


def _torchrun_age_s() -> float | None:
    """Seconds since torchrun started, when it is this process's parent; else None. Other launchers log their start, or
    are unknown; a notebook that launches ranks began long before the job."""
    variables, parent = all_variables(), os.getppid()
    if not variables.get("TORCHELASTIC_RUN_ID") or variables.get(LAUNCHER_VARIABLE):
        return None
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            command = file.read()
        return process_age_s(parent) if any(word in command for word in _TORCHRUN) else None
    except OSError:
        return None  # another user's process, which the container hides


def process_age_s(process: int | str = "self") -> float:
    """Seconds since a process started, to a hundredth of a second, as the kernel counts.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{process}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
