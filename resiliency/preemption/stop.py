"""Takes a rank from a notice to the place where all ranks stop, and ends the process when it does not get there in
time."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

from resiliency.preemption.notice import Notice
from resiliency.preemption.position import Position, stop_after

__all__ = ["Stop", "end_process"]

logger = logging.getLogger(__name__)

#: Share of the grace after which a rank that has not reached the agreed place is interrupted wherever it is.
BOUNDARY_SHARE = 0.5
#: Share of the grace that is kept for the end of the process, and the most seconds of it.
_END_SHARE, _END_S = 0.1, 3.0
#: Seconds between two interruptions of a rank that does not stop.
_AGAIN_S = 1.0


class Stop:
    """Stops one rank after a notice. Thread: any; the callbacks are called on threads of this object.

    Args:
        rank: of this process.
        announce: tells all other ranks of a notice.
        gather: takes the batch that this rank has published, and returns those of all ranks. Raises RuntimeError or
            OSError when ranks are missing.
        noticed: called once, with the notice.
        interrupt: makes the main thread leave what it does; called again as long as it does not.
        end: ends the process at once.
    """

    def __init__(
        self,
        *,
        rank: int,
        announce: Callable[[Notice], None],
        gather: Callable[[int], list[int]],
        noticed: Callable[[Notice], None],
        interrupt: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.position = Position()
        #: The first notice.
        self.notice: Notice | None = None
        self._announce, self._gather = announce, gather
        self._noticed, self._interrupt, self._end = noticed, interrupt, end
        self._began = _now()
        self._deadline = float("inf")
        self._boundary_by = float("inf")
        self._changed = threading.Condition()
        self._left = self._closed = False
        self._agreed: bool | None = None
        self._told: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="resiliency-stop", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Takes a notice; later ones change nothing. Thread: any. Blocks: no."""
        self._told.put(notice)

    @property
    def seconds_left(self) -> float:
        """Seconds until this process should have ended; infinite without a notice."""
        return max(0.0, self._deadline - time.monotonic())

    def batch_ended(self) -> bool:
        """Called by the training thread at the end of a batch. Returns True when it must stop here. Blocks, after a
        notice: until the ranks have agreed, up to 60 s, and not beyond the boundary's share of the grace."""
        return self.position.batch_ended(timeout_s=max(0.0, min(self._boundary_by - time.monotonic(), 60.0)))

    def agreed(self, *, timeout_s: float) -> bool:
        """Waits for the agreement. Returns True when all ranks have received the notice, so that they can save
        together. Blocks: until that is known, up to ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._agreed is not None or self._closed, timeout_s)
            return bool(self._agreed)

    def _says(self, *, agreed: bool) -> None:
        with self._changed:
            self._agreed = agreed
            self._changed.notify_all()

    def _run(self) -> None:
        notice = self._told.get()
        if notice is None:
            return
        self._began = began = _now()
        self._deadline = began + notice.grace_s - min(_END_S, _END_SHARE * notice.grace_s)
        self._boundary_by = began + BOUNDARY_SHARE * notice.grace_s
        published = self.position.publish()
        self.notice = notice
        # On a thread of its own: a store whose process was stopped does not answer, and the grace must be watched
        # meanwhile.
        threading.Thread(target=self._agree, args=(notice, published), name="resiliency-agree", daemon=True).start()
        self._watch()

    def _agree(self, notice: Notice, published: int) -> None:
        try:
            if notice.rank == self.rank:
                self._announce(notice)
            self._noticed(notice)
            self.position.decided(stop_after(self._gather(published)))
            self._says(agreed=True)
        except (RuntimeError, OSError) as error:
            logger.warning(
                "rank %d was told to go by %s, and cannot agree with the other ranks on where to stop (%s): nothing can"
                " be saved together, and it leaves",
                self.rank,
                notice.source,
                error,
            )
            self.position.decided(None)
            self._says(agreed=False)

    def _watch(self) -> None:
        with self._changed:
            left_s = max(0.0, self._boundary_by - _now())
            self._changed.wait_for(lambda: self._left or self._closed or self._agreed is False, left_s)
            left = self._left or self._closed
        if not left:
            logger.warning(
                "rank %d has not reached the batch where all ranks stop: its main thread is interrupted", self.rank
            )
        while not left and _now() < self._deadline:
            self._interrupt()
            with self._changed:
                left = self._changed.wait_for(lambda: self._left or self._closed, _AGAIN_S)
        with self._changed:
            ended = self._changed.wait_for(lambda: self._closed, max(0.0, self._deadline - _now()))
        if not ended:
            logger.error(
                "rank %d still runs %.1f s after it was told to go: its process is ended. Its main thread:\n%s",
                self.rank,
                _now() - self._began,
                _main_stack(),
            )
            self._end()

    def leaves(self) -> None:
        """The main thread has left what it did: do not interrupt it any more. Idempotent. Thread: any."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the watch. Idempotent. Blocks: up to a second."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._told.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(1)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"


def end_process(code: int) -> None:
    """Ends this process at once."""
    os._exit(code)


def _now() -> float:
    return time.monotonic()
