"""Process 1 of a workload's pod: it keeps the host monitor running, reaps, and ends only when checkpoints are uploaded.

The end of a container's process 1 ends everything in it, and the first pod of a JobSet that ends with 0 ends the job
(``successPolicy: Any``). So this process is small, does nothing that can fail, and ends with 0 only when the monitor
says that the job is completed. A monitor that dies is started again beside its launcher, whose ranks train on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from resiliency.settings import all_variables

__all__ = ["run_pod"]

logger = logging.getLogger(__name__)

_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WAITED = {*_ASKED, signal.SIGCHLD}
#: Seconds until a monitor that has died is started again: the first wait, doubled with each death, and the longest. A
#: monitor that has lived for the third resets the wait.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LIVED_S = 0.2, 10.0, 30.0
#: Exit status of a monitor that cannot work as it was started: another one would end as well.
_WRONG = 2
_PR_SET_CHILD_SUBREAPER = 36


def run_pod(monitor: Sequence[str], *, drain_s: float) -> int:
    """Runs until the job is completed or this process is told to end. Thread: the main one.

    Args:
        monitor: command line of the host monitor. It ends with 0 when the job is completed, or when it was told to end.
            It is started with SIGTERM blocked, and unblocks it once it can heed it, so that none is lost before.
        drain_s: seconds that other processes (agents that upload) have to end after the monitor.

    Returns:
        The exit status: 0 when the job is completed, 128 + N after signal N, that of a monitor which cannot work.
    """
    if os.getpid() != 1:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    try:
        return _Pod(monitor, drain_s).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pod:
    def __init__(self, monitor: Sequence[str], drain_s: float) -> None:
        self._command, self._drain_s = list(monitor), drain_s
        self._pid, self._started_s = 0, 0.0
        self._pause_s, self._start_at_s = _FIRST_PAUSE_S, 0.0
        self._asked: int = 0

    def run(self) -> int:
        self._start()
        while True:
            self._wait(self._start_at_s - time.monotonic() if not self._pid else None)
            status = self._reap()
            if status is not None:
                if os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, _WRONG):
                    code = os.WEXITSTATUS(status)
                    self._drain()
                    return 128 + self._asked if self._asked else code
                self._note_death(status)
            if not self._pid and time.monotonic() >= self._start_at_s:
                self._start()

    def _start(self) -> None:
        self._started_s = time.monotonic()
        self._pid = os.posix_spawn(
            self._command[0],
            self._command,
            dict(all_variables()),
            setpgroup=0,
            setsigmask=(signal.SIGTERM,),
            setsigdef=_WAITED,
        )
        if self._asked:
            os.kill(self._pid, signal.SIGTERM)  # the new monitor ends the launcher that it takes over

    def _note_death(self, status: int) -> None:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        now_s = time.monotonic()
        if now_s - self._started_s >= _LIVED_S:
            self._pause_s = _FIRST_PAUSE_S
        logger.error("the host monitor has ended with %s; ranks go on, and it is started again", how)
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _wait(self, longest_s: float | None) -> None:
        """Waits for the end of a child, or for a signal, which is passed on."""
        if longest_s is None:
            number = signal.sigwaitinfo(_WAITED).si_signo
        else:
            found = signal.sigtimedwait(_WAITED, max(0.0, longest_s))
            number = 0 if found is None else found.si_signo
        if number in _ASKED:
            logger.info("told to end (%s); ranks save, and end", signal.Signals(number).name)
            self._asked = self._asked or number
            if self._pid:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGTERM)

    def _reap(self) -> int | None:
        """Reaps what has ended. Returns the status of the monitor if it is among them."""
        found = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self._pid, found = 0, ended[1]
        return found

    def _drain(self) -> None:
        """Waits for the other processes of the pod. A second signal does not hurry it: the kubelet kills in the end."""
        until_s = time.monotonic() + self._drain_s
        said = False
        while _has_children():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                logger.warning("processes of the job still run %.0f s after its end; they are killed", self._drain_s)
                return
            if not said:
                said = True
                logger.info("waits for checkpoints to be uploaded, up to %.0f s", self._drain_s)
            signal.sigtimedwait(_WAITED, left_s)
            self._reap()


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
