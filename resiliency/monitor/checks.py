"""Checks whether this host is healthy, and resets its devices."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from resiliency.monitor.watchdogs.registry import Watchdogs
from resiliency.settings import all_variables

__all__ = ["Problem", "device_count", "problems_of_host", "reset_devices"]

logger = logging.getLogger(__name__)

#: What is wrong, in words; "" when nothing is.
Problem = str

#: Name of the environment variable that gives a reset program its devices.
DEVICES_VARIABLE = "RESILIENCY_DEVICES"
_LONGEST_OUTPUT = 500
#: Has an entry for each GPU that NVIDIA's driver could set up when it was loaded.
_GPUS = "/proc/driver/nvidia/gpus"


def device_count() -> int:
    """How many GPUs NVIDIA's driver has, without those that were lost before it was loaded; 0: there is no driver."""
    try:
        return len(os.listdir(_GPUS))
    except OSError:
        return 0


async def problems_of_host(
    watchdogs: Watchdogs,
    within_s: float,
    *,
    launcher_is_warm: Callable[[float], Awaitable[Problem]],
    state_is_written: Callable[[], Problem],
) -> Problem:
    """Looks at every watchdog, the launcher, and the disk of the state folder, and returns what is wrong. Blocks: up to
    ``within_s``.

    Args:
        launcher_is_warm: waits up to the given seconds for the launcher, and returns what is wrong with it.
        state_is_written: writes the state folder, and returns what is wrong with it.
    """
    deadline_s = time.monotonic() + within_s
    found = [state_is_written()]
    late, warm = await asyncio.gather(watchdogs.look_all(within_s), launcher_is_warm(within_s))
    found += [*late, warm, *watchdogs.problems()]
    if time.monotonic() > deadline_s + 1.0:
        found.append(f"the check took longer than {within_s:.1f} s")
    return "; ".join(dict.fromkeys(filter(None, found)))


async def reset_devices(command: str, devices: Sequence[str], within_s: float) -> Problem:
    """Runs the reset program, or ``nvidia-smi --gpu-reset`` where nvidia-smi exists, and returns what is wrong. Blocks:
    up to ``within_s``; then the program and its session are killed.

    Args:
        command: the command line, split as a shell would, run without a shell; "": nvidia-smi.
        devices: PCI addresses; empty: all devices.
    """
    if command:
        words = shlex.split(command)
    elif shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--gpu-reset", *(["-i", ",".join(devices)] if devices else [])]
    else:
        return "this host has no nvidia-smi; pass --reset-command with a program that resets its devices"
    env = {**all_variables(), DEVICES_VARIABLE: ",".join(devices)}
    logger.warning("devices are reset: %s", shlex.join(words))
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"{words[0]} cannot be started: {error.strerror}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(), within_s)
    except asyncio.TimeoutError:
        return f"{words[0]} has not ended within {within_s:.0f} s, and was killed"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(asyncio.CancelledError):
                await process.wait()
    if process.returncode:
        text = output.decode(errors="replace").strip()[-_LONGEST_OUTPUT:]
        return f"{words[0]} has ended with status {process.returncode}: {text}"
    return ""
