"""The threads that copy snapshots, and the fence, at which the training thread helps them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from resiliency.checkpoint._cuda import DeviceCopies
from resiliency.checkpoint.snapshot import HELPER_S, Job, Snapshot
from resiliency.errors import Timeout
from resiliency.runtime.closing import close_when_left
from resiliency.spans import traced

__all__ = ["Copier"]

logger = logging.getLogger(__name__)

#: Most seconds that a fence waits after its deadline has passed.
_STOPPED_S = 10.0
#: Seconds after a save before its snapshot is closed, if no other save begins. Unmapping takes a core for some 60 ms
#: per GiB, and just then the agent needs that core for the commit, and the training thread for the answer.
_CLOSE_AFTER_S = 0.05
#: Seconds that closing waits for the threads to end.
_END_S = 60.0


class Copier:
    """Copies snapshots, one at a time, on a background thread and its helper threads.

    Threads: ``start``, ``fence`` and ``close`` from the training thread; ``on_done`` runs on the copy thread.

    Args:
        threads: number of threads that copy blocks; one of them also opens and finishes the file.
    """

    def __init__(self, *, name: str = "resiliency-copy", threads: int = 1) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._current: Snapshot | None = None
        #: Set while there is no current snapshot.
        self._idle = threading.Event()
        self._idle.set()
        #: The current snapshot, once its file is open and its sources can be read.
        self._ready: Snapshot | None = None
        self._started = 0
        self._closed = False
        self._helpers = [
            threading.Thread(target=self._help, name=f"{name}-{number}", daemon=True) for number in range(1, threads)
        ]
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        close_when_left(self, Copier.close)
        try:
            for thread in (self._thread, *self._helpers):
                thread.start()
        except RuntimeError:  # the limit of threads is reached
            self.close()
            raise

    def start(
        self,
        job: Job,
        on_done: Callable[[Snapshot], None],
        *,
        hold: Callable[[Snapshot | None], None] = lambda snapshot: None,
    ) -> Snapshot:
        """Queues copies and returns. Collective: no. Blocks: up to HELPER_S until the previous snapshot is done.

        Args:
            job: the copies; their sources must not change before :meth:`fence` has returned.
            on_done: called once, with the snapshot, on the copy thread, after the last byte or an error.
            hold: called with the snapshot before it is queued, and with None if it is not: Ctrl-C may keep this method
                from returning what must be fenced.

        Raises:
            Timeout: the previous snapshot was not done in time.
        """
        # The previous save may be recorded before the copy thread has returned from reporting it.
        if not self._idle.wait(HELPER_S):
            raise Timeout(f"the previous snapshot was not done within {HELPER_S:.0f} s")
        with self._lock:
            snapshot = Snapshot(job, on_done, DeviceCopies(job.device_copies) if job.device_copies else None)
            try:
                hold(snapshot)
                self._idle.clear()
                # In this order, because Ctrl-C may come in between: the copy thread looks once the lock is released.
                self._wake.notify_all()
                self._current = snapshot
            except BaseException:
                hold(None)
                self._idle.set()
                raise
        return snapshot

    def fence(self, snapshot: Snapshot, *, deadline_s: float) -> float:
        """Returns when nothing reads the sources any more, and decides whether they have changed. This thread helps to
        copy.

        For sources on a GPU it does not wait; instead, later work of the compute streams waits for the copies.

        Returns:
            Seconds spent here.

        Raises:
            Timeout: the copy did not finish within ``deadline_s``, and up to 10 s more (a device that hangs).
            BaseException: a signal's handler raised it meanwhile (Ctrl-C). The copy is done and agreed to, unless a
                second signal came.
        """
        began = time.monotonic()
        device = snapshot.device
        if device is not None:
            # CPU sources of the same save are private copies, see resiliency.checkpoint.shard_writer.
            device.fence()
            snapshot.decide()
            return time.monotonic() - began
        with snapshot.at_fence:
            try:
                self._end(snapshot, began, deadline_s)
            except Timeout:
                raise
            except BaseException as interrupt:
                # Ctrl-C is raised once nothing reads the tensors, for the caller may go on; a second one at once.
                self._end(snapshot, began, deadline_s)
                raise interrupt
        return time.monotonic() - began

    def _end(self, snapshot: Snapshot, began: float, deadline_s: float) -> None:
        """Helps to copy, waits for the rest, and agrees. May be interrupted and called again."""
        while snapshot.work(helping=True):
            if time.monotonic() - began > deadline_s:
                break
        snapshot.finish_copy()
        left = max(0.0, deadline_s - (time.monotonic() - began))
        # Waits a second time, because this process, and the copy with it, may have been stopped for longer than the
        # deadline.
        if not (snapshot.copied.wait(left) or snapshot.copied.wait(min(deadline_s, _STOPPED_S))):
            hangs = Timeout(
                f"the snapshot was not copied within {deadline_s:.0f} s; the device or the file system hangs"
            )
            snapshot.decide(given_up=hangs)  # sources not read yet may change from now on
            raise hangs
        snapshot.decide(fenced=True)
        snapshot.help_compare()

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until no snapshot is being copied; False when ``timeout_s`` passes first."""
        return self._idle.wait(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._current is None and not self._closed:
                    self._wake.wait()
                if self._current is None:
                    return
                snapshot = self._current
            with traced(snapshot.job.trace, "background copy"):
                snapshot.open_file()
                snapshot.wait_device()
                with self._lock:
                    self._ready, self._started = snapshot, self._started + 1
                    self._wake.notify_all()
                while snapshot.work():
                    continue
            snapshot.finish()
            with self._lock:
                self._current = self._ready = None
                self._idle.set()
                self._wake.wait_for(lambda: self._closed or self._current is not None, _CLOSE_AFTER_S)
            snapshot.close()
            del snapshot

    def _help(self) -> None:
        helped = 0
        while True:
            with self._lock:
                while not self._closed and (self._ready is None or self._started == helped):
                    self._wake.wait()
                snapshot, helped = self._ready, self._started
            while snapshot is not None and snapshot.work(helping=True):
                continue
            snapshot = None  # so that the old snapshot is not kept alive while this thread waits for the next one
            if self._closed:
                return

    def close(self) -> None:
        """Finishes the pending snapshot and ends the threads. Idempotent. Blocks: for the rest of the copy, up to 60 s
        more."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
            current = self._current
        if current is not None and current.copied.wait(HELPER_S):
            current.decide(fenced=True)
        ends = time.monotonic() + _END_S
        for thread in (self._thread, *self._helpers):
            if thread.ident is not None:  # else it could not be started
                thread.join(timeout=max(0.0, ends - time.monotonic()))
        if any(thread.is_alive() for thread in (self._thread, *self._helpers)):
            logger.warning("the copy thread is still copying after 60 s; it ends with the process")
