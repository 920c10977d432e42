"""Keeps shard files ready for the next saves, with their pages in memory. Low priority, beside the training.

A new file is filled with zeros, because the first touch of a page takes ten times as long as a later copy. A file of a
deleted step is used again only with proof that no process has it open (:mod:`resiliency.storage.shared_files`): a
reader of the old step, a stopped writer of a dead attempt, a link somebody made. Nor where another file may share its
blocks. Where the file system writes to other blocks than a file has, there is nothing to prepare.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterable

from resiliency.agent._reporter import Notify
from resiliency.agent._traces import Traces
from resiliency.agent._worker import Worker
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import FileReady
from resiliency.storage.manifest import FILES_DIR, META_DIR
from resiliency.storage.shared_files import is_ours_alone, write_zeros
from resiliency.storage.tiers.local import copies_on_write, may_share_blocks, used_by_this_host_only

__all__ = ["MOST_READY", "SMALL_FILE", "FilePool"]

logger = logging.getLogger(__name__)

#: Files below this size are made by the save itself.
SMALL_FILE = 1 << 20
#: Files made ready for the first saves; and kept ready on a disk, once a save has found none.
MOST_READY = 2
#: Kept ready once there are steps: a second one is that of a step to be deleted. To make another one beside the second
#: save, of 1 GiB, made that take 230 ms instead of 150.
_KEPT = 1
#: A file of a deleted step may be so much too short: a number of another length in its record makes 64 bytes.
_LENGTHENED = 64 << 10
#: Bytes of a new file that are written at a time; a multiple of 2 MiB.
_PIECE = 64 << 20


class FilePool:
    """The prepared files of one host and run.

    Threads: all methods from any; the work is done on ``resiliency-agent-files``.

    Args:
        config: of this attempt.
        notify: sends a message to a rank, here that a file is ready.
        traces: of saves that take place meanwhile.
    """

    def __init__(self, config: AgentConfig, notify: Notify, *, traces: Traces | None = None) -> None:
        self._config, self._notify = config, notify
        self._traces = traces or Traces(notify)
        self._folder = os.path.join(config.local.address, META_DIR, config.run, FILES_DIR)
        self._prefix = f"{config.node}-a{config.attempt:04d}-{config.token}-{config.local_ranks[0]}-"
        self._worker = Worker("resiliency-agent-files", nice=19)
        self._ready: dict[str, FileReady] = {}  # by path
        self._used: list[str] = []  # files of deleted steps
        self._number = 0
        self._nbytes = self._wanted = 0
        self._saved: deque[None] = deque()  # one for each file of a save since the last look
        self._taken = 0  # files whose saves had no record at the last look
        self._lacked = False  # a save has found none

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def take_leftovers(self) -> None:
        """Takes over prepared files of earlier attempts of this host, as it does files of deleted steps: their pages
        are in memory, so that a restart need not wait for new ones. Small ones are deleted. Blocks: for the renames."""
        config = self._config
        # The whole name: that of another host may begin with this one's.
        mine = re.compile(rf"{re.escape(config.node)}-a(\d+)-([0-9a-f]{{6}})-\d+-\d+\.(free|used)")
        for name in _listing(self._folder):
            found = mine.fullmatch(name)
            if found and int(found[1]) <= config.attempt and found[2] != config.token:
                self._take(os.path.join(self._folder, name))
        self.refill()

    def _take(self, path: str) -> None:
        try:
            if os.stat(path).st_size >= SMALL_FILE:
                self._keep_used(path)
                return
        except OSError as error:
            logger.debug("%s cannot be taken over: %s", path, error)
        _unlink(path)

    def expect(self, nbytes: int, count: int) -> None:
        """Sets what :meth:`refill` prepares before the first save: ``count`` files, at most two. A save needs the
        second while the step before it is still there."""
        self._nbytes, self._wanted = nbytes, max(self._wanted, min(count, MOST_READY))

    def saved(self, nbytes: int) -> None:
        """Sets what :meth:`refill` keeps ready from the first record of a save on. Call once per file of a save."""
        self._nbytes, self._wanted = nbytes, MOST_READY if self._lacked else _KEPT
        self._saved.append(None)

    def refill(self, *, more_to_come: bool = False, unless_taken: bool = False) -> None:
        """Queues the preparation of the files that are missing.

        To make a file of zeros, and to delete that of a step instead of using it again, took 0.28 s of a core in each
        save of 256 MiB.

        Args:
            more_to_come: a step will be deleted soon, whose file can be used again: the last file that is missing is
                not made anew.
            unless_taken: likewise where a save has taken one meanwhile: a step is deleted after it.
        """
        if self._nbytes >= SMALL_FILE or self._used:
            self._worker.submit(lambda: self._refill(more_to_come, unless_taken))

    def use_again(self, path: str) -> None:
        """Takes the shard file of a deleted step out of its folder; it is prepared again, or deleted.

        A small one is never prepared, so it is deleted at once: its place is free when the step is.

        Raises:
            OSError: it cannot be moved or deleted.
        """
        if os.stat(path).st_size < SMALL_FILE:
            os.unlink(path)
            return
        os.makedirs(self._folder, exist_ok=True)
        self._keep_used(path)
        self._worker.submit(self._refill)

    def _keep_used(self, path: str) -> None:
        target = self._new_path("used")
        os.rename(path, target)
        self._used.append(target)

    def make_room(self, *, timeout_s: float) -> None:
        """Deletes the files that are ready; the next refill makes new ones. Blocks: up to ``timeout_s``, behind a file
        that is being prepared."""
        self._worker.submit(self._delete_all)
        self._worker.wait_idle(time.monotonic() + timeout_s)

    def announce(self, rank: int) -> None:
        """Tells a rank that has just connected which files are ready."""

        def tell() -> None:
            for file in self._ready.values():
                self._notify(rank, file)

        self._worker.submit(tell)

    def close(self) -> None:
        """Ends the thread and deletes the files that are left. Idempotent."""
        self._worker.close()
        self._delete_all()

    # -- on the pool's thread -----------------------------------------------------------------------------------

    def _delete_all(self) -> None:
        for path in (*self._ready, *self._used):
            _unlink(path)
        self._ready.clear()
        self._used.clear()

    def _refill(self, more_to_come: bool = False, unless_taken: bool = False) -> None:
        left = {path: file for path, file in self._ready.items() if os.path.lexists(path)}
        more_to_come = more_to_come or (unless_taken and len(left) < len(self._ready))
        self._notice_lack(taken=len(self._ready) - len(left))
        self._ready = left
        # What differs by less is the end of the file, which a save writes and does not map.
        for path in [path for path, file in self._ready.items() if file.nbytes < self._nbytes - _LENGTHENED]:
            del self._ready[path]  # of no use for the saves that come now
            _unlink(path)
        if copies_on_write(self._folder):
            self._say_none()
            self._wanted = 0
        try:
            while self._nbytes >= SMALL_FILE and len(self._ready) < self._wanted:
                used = self._used_file()
                if used is None and more_to_come and len(self._ready) == self._wanted - 1:
                    return
                with self._traces.span("prepare", bytes=self._nbytes):
                    self._offer(used or self._new_file())
        except OSError as error:
            # The save that finds no file makes its own, and reports what is wrong.
            logger.info("no shard file of %d bytes can be prepared in %s: %s", self._nbytes, self._folder, error)
            self._say_none()
        if len(self._ready) >= self._wanted or self._nbytes < SMALL_FILE:
            kept = 0 if self._nbytes else MOST_READY  # nobody has said yet what the next saves need
            while len(self._used) > kept:
                _unlink(self._used.pop(0))

    def _notice_lack(self, taken: int) -> None:
        """Saves that follow each other so fast that one found no file need a second one. On a ramdisk it would take
        memory."""
        self._taken += taken
        while self._saved:
            self._saved.popleft()
            if self._taken:
                self._taken -= 1
            elif self._config.durable:
                self._lacked, self._wanted = True, MOST_READY

    def _say_none(self) -> None:
        for rank in self._config.local_ranks:
            self._notify(rank, FileReady(path="", inode=0, nbytes=0))

    def _offer(self, path: str) -> None:
        found = os.stat(path)
        # Its own size: a save of another size may have changed what is wanted while it was made.
        self._ready[path] = FileReady(path=path, inode=found.st_ino, nbytes=found.st_size)
        for rank in self._config.local_ranks:
            self._notify(rank, self._ready[path])

    def _used_file(self) -> str | None:
        """A file of a deleted step that is large enough, and that nobody has open."""
        while self._used:
            path = self._used.pop()
            try:
                nbytes, size = self._nbytes, os.stat(path).st_size
                fits = nbytes - _LENGTHENED <= size <= 2 * nbytes
                # The proof is this kernel's: of a process on another host it knows nothing.
                if fits and used_by_this_host_only(path) and not may_share_blocks(path) and is_ours_alone(path):
                    _lengthen(path, size, nbytes)
                    target = self._new_path("free")
                    os.rename(path, target)
                    return target
            except OSError as error:
                logger.debug("%s cannot be used again: %s", path, error)
            _unlink(path)
        return None

    def _new_file(self) -> str:
        """A file of zeros, or a used one that comes meanwhile and can be taken. That is ready at once, and a save that
        finds none makes its own, in memory that the kernel has to find: 1 GiB took 2 s where a used file takes 0.1."""
        os.makedirs(self._folder, exist_ok=True)
        path, nbytes = self._new_path("free"), self._nbytes  # which a save of another size may change meanwhile
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for start in range(0, nbytes, _PIECE):
                used = self._used_file()
                if used is not None:
                    _unlink(path)
                    return used
                write_zeros(fd, start, min(start + _PIECE, nbytes), in_memory=not self._config.durable)
        except BaseException:
            _unlink(path)
            raise
        finally:
            os.close(fd)
        return path

    def _new_path(self, kind: str) -> str:
        self._number += 1
        return os.path.join(self._folder, f"{self._prefix}{self._number:06d}.{kind}")


def _listing(folder: str) -> Iterable[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _lengthen(path: str, size: int, nbytes: int) -> None:
    """Adds zeros to a file that is too short, by writing: pages of a hole would need blocks when they are stored to."""
    if size < nbytes:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.pwrite(fd, bytes(nbytes - size), size) < nbytes - size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        finally:
            os.close(fd)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            logger.info("%s cannot be deleted: %s", path, error)
