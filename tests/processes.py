"""Waiting for processes that are no children of this one."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable

import psutil


def wait_ended(processes: Iterable[psutil.Process], *, timeout_s: float) -> list[psutil.Process]:
    """Waits until all have ended; returns those that still run after ``timeout_s``.

    A zombie has ended. psutil waits until it is reaped, which for an orphan is done by init, in some containers seconds
    later or never.
    """
    deadline = time.monotonic() + timeout_s
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
