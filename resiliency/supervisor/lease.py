"""Decides which of several supervisors with one state file leads. On one host only, and without comparing clocks.

The leader holds a lock on a file beside the state file: when its process ends in any way, the kernel gives the lock to
one that waits. All of them map a page of that file, where the leader names itself and increases a counter. So a leader
that was stopped (SIGSTOP, a debugger, a host that swaps) is replaced as well, and when it runs again it sees that in
memory before it sends anything. Safety depends on neither, but on the term: every transaction of the store compares it,
and monitors refuse a lower one.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import sqlite3
import struct
import threading
import time

import psutil

from resiliency.errors import ConfigError
from resiliency.supervisor.store import Store

__all__ = ["Lease"]

logger = logging.getLogger(__name__)

#: Seconds from the release of the lock to the end of a process that ends: the kernel closes its files first.
_ENDS_S = 0.2
#: Layout of the page: a counter, the leader's process id, when that process started in microseconds, its term.
_PAGE = struct.Struct("=QQQQ")
_COUNTER = struct.Struct("=Q")


class Lease:
    """This process's part in the election. Thread: the event loop's. Blocks: never.

    Args:
        store: the state file to lead.
        lease_s: a leader whose counter has stood still for this many seconds is replaced.

    Raises:
        ConfigError: the file beside the state file cannot be used.
    """

    def __init__(self, store: Store, *, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._me = os.getpid(), _started_us(os.getpid())
        self._term = 0
        self._count = 0
        self._path = store.path + ".lock"
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._fd).st_size < mmap.PAGESIZE:
                os.ftruncate(self._fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self._fd, mmap.PAGESIZE)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be used: {error.strerror}; it lies beside the state file"
            ) from error
        self._locked = False
        self._waiter: threading.Thread | None = None
        self._woken = asyncio.Event()
        self._closed = False
        #: Whether the last attempt to take over failed.
        self._failed = False

    @property
    def looks_every_s(self) -> float:
        """Seconds between two increments of the leader, and between two looks of a supervisor that stands by."""
        return self._lease_s / 5

    def is_mine(self) -> bool:
        """Whether this process leads, and no other has taken over. To be asked before anything is sent."""
        _, pid, started, term = self._read()
        return self._term != 0 and (pid, started) == self._me and term == self._term

    def renew(self) -> None:
        """Increments the counter, if this process still leads."""
        if self.is_mine():
            self._count += 1
            # Only the counter: a process that was stopped here, and replaced, does not name itself leader again.
            self._page[: _COUNTER.size] = _COUNTER.pack(self._count)

    async def wait_for_turn(self) -> int:
        """Waits until this process leads, and returns its term. While the state file cannot be written (a leader that
        was stopped in a transaction holds it), tries again."""
        self._term = 0
        self._start_waiter()
        seen, still_s, looked_s = self._read(), 0.0, time.monotonic()
        said = False
        while True:
            now_s = time.monotonic()
            present = self._read()
            gap_s = now_s - looked_s
            if present != seen or gap_s > 3 * self.looks_every_s:  # the leader runs, or this process did not
                seen, still_s = present, 0.0
            else:
                still_s += gap_s
            looked_s = now_s
            ended = self._locked and not self._runs(present)
            # Having the lock does not prove that the leader ended: a leader may have taken over without it.
            if ended or still_s >= self._lease_s:
                term = await asyncio.to_thread(self._try_to_take_over)
                if term is not None:
                    if not ended:
                        logger.warning("the leader has not counted for %.1f s, and is replaced", still_s)
                    self._term, self._count = term, present[0] + 1
                    self._write()
                    return term
                seen, still_s = self._read(), 0.0
                await self._wait(self.looks_every_s)
                looked_s = time.monotonic()
                continue
            if not said:
                said = True
                logger.info("process %d leads; this one stands by", present[1])
            if self._locked:
                self._unlock()  # so that the leader, which runs without the lock, can get it
                await self._wait(min(_ENDS_S, self.looks_every_s))  # the leader may be ending just now
            else:
                await self._wait(self.looks_every_s)
            self._start_waiter()

    def _try_to_take_over(self) -> int | None:
        try:
            term = self._take_over()
        except sqlite3.Error as error:
            if not self._failed:
                logger.error(
                    "the state file %s cannot be taken over: %s. A leader that was stopped while it wrote may hold it:"
                    " let it go on, or kill it; this is tried again",
                    self._store.path,
                    error,
                )
            self._failed = True
            return None
        self._failed = False
        return term

    def _take_over(self) -> int | None:
        return self._store.take_over(self._store.term(), f"process {self._me[0]}")

    async def _wait(self, seconds: float) -> None:
        self._woken.clear()
        try:
            await asyncio.wait_for(self._woken.wait(), seconds)
        except asyncio.TimeoutError:
            return

    # -- the lock -----------------------------------------------------------------------------------------------------

    def _start_waiter(self) -> None:
        """Takes the lock, or starts a thread that waits for it: only the lock tells at once that a process has
        ended."""
        if self._locked or self._waiter is not None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._locked = True
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            arguments = (loop, os.open(self._path, os.O_RDWR | os.O_CLOEXEC))
            # A daemon thread, because flock cannot be interrupted, and it must not hold up the end of the process.
            self._waiter = threading.Thread(target=self._await_lock, args=arguments, name="lease-lock", daemon=True)
            self._waiter.start()

    def _await_lock(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            loop.call_soon_threadsafe(self._got_lock, fd)
        except RuntimeError:  # the loop was closed
            os.close(fd)

    def _got_lock(self, fd: int) -> None:
        self._waiter = None
        if self._closed:
            os.close(fd)
            return
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self._locked = True
        self._woken.set()

    def _unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._locked = False

    def release(self) -> None:
        """Gives leadership up. Another supervisor can lead at once."""
        if self.is_mine():
            self._page[: _PAGE.size] = _PAGE.pack(self._count + 1, 0, 0, self._term)
        self._term = 0
        if self._locked:
            self._unlock()

    def close(self) -> None:
        self.release()
        self._closed = True
        self._page.close()
        os.close(self._fd)

    # -- the page -----------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[int, int, int, int]:
        found: tuple[int, int, int, int] = _PAGE.unpack_from(self._page)
        return found

    def _write(self) -> None:
        self._page[: _PAGE.size] = _PAGE.pack(self._count, *self._me, self._term)

    def _runs(self, page: tuple[int, int, int, int]) -> bool:
        """Whether the page names another process than this one, and that process still runs."""
        _, pid, started, _ = page
        if pid == 0 or (pid, started) == self._me:
            return False
        return _started_us(pid) == started


def _started_us(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        # a killed process may stay a zombie when its parent has not waited for it
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1e6)
    except psutil.NoSuchProcess:
        return 0
