"""Writes a file in large pieces while the next is read and checked; a large file past the page cache (``O_DIRECT``).

The page cache is of no use for a file that is written once, synced, and read after a failure if ever. Beside training
it costs: memory for each page, found by a kernel that is short of it or, in a virtual machine, by its host. Copies of
1 GiB from a ramdisk to ext4, each with fsync, took 1.6 to 4.5 s where the memory was new and 0.6 to 0.9 where it was
not; past the page cache they take 0.5 to 0.7. FastPersist (arXiv:2406.13768) writes checkpoints in this way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from collections import deque

from resiliency.storage.blocks import BLOCK_BYTES

__all__ = ["FileWriter"]

#: Smaller files go through the page cache: their readers come soon, and they take little of it.
LARGE_FILE = 32 << 20
_BUFFERS = 2


class FileWriter:
    """Fills a file that is empty. A context manager: on exit nothing writes any more, also after an exception.

    Thread: one at a time; a thread of its own writes.

    Args:
        fd: open for writing, without ``O_APPEND``. Whether it writes past the page cache may have changed at the end.
        nbytes: of the file, as far as known.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        # A file system without a disk of its own (network, FUSE, overlay, btrfs) may do something else by this flag.
        if nbytes >= LARGE_FILE and os.major(os.fstat(fd).st_dev):
            _set_direct(fd, True)
        size = min(BLOCK_BYTES, -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        # Maps begin on a page, as is needed past the page cache.
        self._free = deque(memoryview(mmap.mmap(-1, size)) for _ in range(_BUFFERS))
        self._written: deque[tuple[memoryview, int]] = deque()  # given to the thread, which may be done with them
        self._to_write: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Bytes that were given to the kernel.
        self.written = 0

    def __enter__(self) -> FileWriter:
        thread = threading.Thread(target=self._run, name="resiliency-write")
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on none can be started when the interpreter ends
            return self
        self._thread = thread
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._to_write.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (piece := self._to_write.get()) is not None:
            self._write_now(piece)

    def _write_now(self, piece: memoryview) -> None:
        try:
            _write(self._fd, piece)
        except BaseException as error:  # Boundary: who waits for it gets it.
            self._outcomes.put(error)
        else:
            self._outcomes.put(None)

    def buffer(self) -> memoryview:
        """Memory for the next piece, the same after some pieces. Blocks: until an earlier one is written.

        Raises:
            OSError: an earlier write failed.
        """
        if not self._free:
            self._wait()
        return self._free.popleft()

    def write(self, buffer: memoryview, nbytes: int) -> None:
        """Queues the first ``nbytes`` of a buffer from :meth:`buffer`; all of it but for the last piece."""
        self._written.append((buffer, nbytes))
        if self._thread is None:
            self._write_now(buffer[:nbytes])
        else:
            self._to_write.put(buffer[:nbytes])

    def finish(self) -> None:
        """Blocks until all is written.

        Raises:
            OSError: a write failed.
        """
        while self._written:
            self._wait()

    def _wait(self) -> None:
        buffer, nbytes = self._written.popleft()
        error = self._outcomes.get()
        if error is not None:
            raise error
        self.written += nbytes
        self._free.append(buffer)


def _write(fd: int, piece: memoryview) -> None:
    while piece:
        try:
            piece = piece[os.write(fd, piece) :]
        except OSError as error:
            # The end of a file is no whole block, nor is what is left of a piece after a write that was cut short. Or
            # the file system knows the flag and refuses such writes.
            if error.errno != errno.EINVAL or not _set_direct(fd, False):
                raise


def _set_direct(fd: int, direct: bool) -> bool:
    """Returns whether that has changed anything."""
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    after = before | os.O_DIRECT if direct else before & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, after)
    except OSError:
        return False
    return after != before
