"""Writes a file in large pieces while the next piece is read and checked. Large files bypass the page cache
(``O_DIRECT``).

The page cache does not help a file that is written once, synced, and read at most after a failure. Beside training it
costs memory for each page, which the kernel, or the host of a virtual machine, must find while memory is short. Copies
of 1 GiB from a ramdisk to ext4, each with fsync, took 1.6 to 4.5 s where the memory was new and 0.6 to 0.9 s where it
was not; past the page cache they take 0.5 to 0.7 s. FastPersist (arXiv:2406.13768) writes checkpoints in this way.
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

#: Smaller files go through the page cache, because they are read soon and take little of it.
LARGE_FILE = 32 << 20
_BUFFERS = 2


class FileWriter:
    """Fills an empty file. A context manager: after exit nothing writes any more, also after an exception.

    Thread: one at a time; it starts a thread that writes.

    Args:
        fd: open for writing, without ``O_APPEND``. ``O_DIRECT`` may be set or cleared on it afterwards.
        nbytes: size of the file, as far as known.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        # File systems without a disk of their own (network, FUSE, overlay, btrfs) may handle the flag differently.
        if nbytes >= LARGE_FILE and os.major(os.fstat(fd).st_dev):
            _set_direct(fd, True)
        size = min(BLOCK_BYTES, -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        # Maps begin on a page boundary, which O_DIRECT requires.
        self._free = deque(memoryview(mmap.mmap(-1, size)) for _ in range(_BUFFERS))
        self._written: deque[tuple[memoryview, int]] = deque()  # queued for the thread, or written
        self._to_write: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Bytes that are known to be written to the kernel.
        self.written = 0

    def __enter__(self) -> FileWriter:
        thread = threading.Thread(target=self._run, name="resiliency-write")
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 and later start no thread once the interpreter ends
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
        except BaseException as error:  # Boundary: passed on to whoever waits for the write.
            self._outcomes.put(error)
        else:
            self._outcomes.put(None)

    def buffer(self) -> memoryview:
        """Returns memory for the next piece; buffers are used in turn. Blocks: until an earlier piece is written.

        Raises:
            OSError: an earlier write failed.
        """
        if not self._free:
            self._wait()
        return self._free.popleft()

    def write(self, buffer: memoryview, nbytes: int) -> None:
        """Queues the first ``nbytes`` of a buffer from :meth:`buffer`. Only the last piece of a file may be shorter
        than its buffer."""
        self._written.append((buffer, nbytes))
        if self._thread is None:
            self._write_now(buffer[:nbytes])
        else:
            self._to_write.put(buffer[:nbytes])

    def finish(self) -> None:
        """Waits until everything is written. Blocks: as long as that takes.

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
            # The end of a file is no whole block, nor is the rest of a piece after a short write. Or the file system
            # accepts the flag and refuses such writes.
            if error.errno != errno.EINVAL or not _set_direct(fd, False):
                raise


def _set_direct(fd: int, direct: bool) -> bool:
    """Sets or clears O_DIRECT. Returns whether the flag was changed."""
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    after = before | os.O_DIRECT if direct else before & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, after)
    except OSError:
        return False
    return after != before
