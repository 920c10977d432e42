"""A named daemon thread that runs jobs in order, and whose idleness can be awaited."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from resiliency.errors import AgentError

__all__ = ["Worker", "no_thread"]

logger = logging.getLogger(__name__)


def no_thread(error: RuntimeError) -> str:
    """What a thread that cannot be started means, and what to do about it."""
    return (
        f"{error}: the user, or the container's pids cgroup, has as many processes and threads as it may; raise that"
        " limit (ulimit -u, pids.max)"
    )


class Worker:
    """Runs submitted jobs one after another. Thread: submit from any; jobs run on this worker's own thread.

    Args:
        nice: niceness of its thread, 0 to 19. With 19 it only gets CPU time that nobody else wants.
    """

    def __init__(self, name: str, *, nice: int = 0) -> None:
        self._name = name
        self._nice = nice
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()  # entered in native code, see resiliency.agent.client
        self._wake = threading.Condition(self._lock)
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, unless it runs already; then :meth:`submit` does not raise. Blocks: no.

        Raises:
            AgentError: the thread cannot be started.
        """
        with self._lock:
            if self._closed or self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise AgentError(f"{self._name}: {no_thread(error)}") from error
            self._thread = thread

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job; the first one starts the thread. After :meth:`close` jobs are dropped. Blocks: no.

        Raises:
            AgentError: the thread cannot be started; the job is not queued.
        """
        with self._lock:
            if self._closed:
                return
            self.start()
            self._jobs.append(job)
            self._wake.notify_all()

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._jobs and not self._running

    def wait_idle(self, deadline: float) -> bool:
        """Waits until nothing is queued or running; False when ``deadline`` (monotonic seconds) passes first."""
        with self._lock:
            while self._jobs or self._running:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._wake.wait(left)
        return True

    def _run(self) -> None:
        if self._nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)  # on Linux: of this thread only
        while True:
            with self._lock:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = True
            try:
                job()
            except (
                Exception
            ):  # Boundary: one failed job must not end the agent; jobs report expected errors themselves.
                logger.exception("%s: job failed", self._name)
            finally:
                with self._lock:
                    self._running = False
                    self._wake.notify_all()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Drops queued jobs, and ends the thread after the running one. Blocks: up to ``timeout_s``. Idempotent."""
        with self._lock:
            self._closed = True
            self._jobs.clear()
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                logger.warning(
                    "thread %s is still running a job after %.0f s; it ends with the process", self._name, timeout_s
                )
