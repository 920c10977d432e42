"""Finding processes below another one, and waiting for processes that are no children of this one."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.patience import PATIENCE


def child_pids(process: str) -> list[int]:
    """From the kernel's own lists: psutil reads every process of the machine, which cost half a minute a run.

    Args:
        process: its number, or "self".
    """
    tasks = Path("/proc", process, "task")
    try:
        lists = [Path(tasks, task, "children").read_text() for task in os.listdir(tasks)]
        return [int(pid) for pids in lists for pid in pids.split()]
    except (FileNotFoundError, ProcessLookupError):  # a kernel without these lists, or a thread that ended just now
        try:
            return [child.pid for child in psutil.Process(None if process == "self" else int(process)).children()]
        except psutil.NoSuchProcess:
            return []


def descendant_pids(pid: int) -> list[int]:
    """All that it has started, and they have; children before their own."""
    found = child_pids(str(pid))
    for each in found:
        found += child_pids(str(each))
    return found


def described(process: psutil.Process) -> str:
    """A process with its command, parent and status."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())}"
    return f"{process.pid}, ended meanwhile"


def wait_ended(processes: Iterable[psutil.Process], *, timeout_s: float) -> list[psutil.Process]:
    """Waits until all have ended; returns those that still run after ``timeout_s``.

    A zombie has ended. psutil waits until it is reaped, which for an orphan is done by init, in some containers seconds
    later or never.
    """
    deadline = time.monotonic() + PATIENCE * timeout_s
    running = []
    for process in processes:
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if process.is_running() and not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                running.append(process)
        finally:
            os.close(fd)
    return running


def wait_stopped(pid: int) -> None:
    """Returns once a process that got SIGSTOP has stopped. One of low priority goes on until it has its next turn, which
    on a busy machine is later."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline, "the process did not stop"
        time.sleep(0.02)
