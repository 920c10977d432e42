"""Keeps shard files ready for the next saves, with their pages in memory. Runs at low priority beside the training.

A new file is filled with zeros, because the first touch of a page takes ten times as long as a later copy. A file of a
deleted step is used again only with proof that no process has it open and no link to it exists
(:mod:`resiliency.storage.shared_files`), and that nobody has read it (:mod:`resiliency.agent.reader_watch`): it could
be open in a reader of the old step, or in a stopped writer of a dead attempt, or on its way through a socket. It is not
used either where another file may share its blocks. On file systems that write changed data to new blocks (copy on
write) nothing is prepared.
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
from resiliency.agent.reader_watch import ReaderWatch
from resiliency.storage.manifest import FILES_DIR
from resiliency.storage.shared_files import is_ours_alone, write_zeros
from resiliency.storage.tiers.local import copies_on_write, may_share_blocks, used_by_this_host_only

__all__ = ["MOST_READY", "SMALL_FILE", "FilePool"]

logger = logging.getLogger(__name__)

#: Files below this size are made by the save itself.
SMALL_FILE = 1 << 20
#: Most files prepared: before the first saves, and later on a disk once a save has found none ready.
MOST_READY = 2
#: Files kept ready once there are steps; a second one comes from a deleted step. Making another one beside the second
#: save, of 1 GiB, slowed that save from 150 to 230 ms.
_KEPT = 1
#: Most bytes by which a deleted step's file may be too short: a record in it with one more digit adds 64 bytes.
_LENGTHENED = 64 << 10
#: Bytes of a new file that are written at a time; a multiple of 2 MiB.
_PIECE = 64 << 20


class FilePool:
    """The prepared files of one host and run.

    Threads: all methods from any; the work is done on ``resiliency-agent-files``.

    Args:
        config: of this attempt.
        notify: tells a rank that a file is ready; must not block.
        traces: of saves, to which the preparation of files adds spans.
    """

    def __init__(self, config: AgentConfig, notify: Notify, *, traces: Traces | None = None) -> None:
        self._config, self._notify = config, notify
        self._traces = traces or Traces(notify)
        self._folder = os.path.join(config.run_folder, FILES_DIR)
        self._prefix = f"{config.node}-a{config.attempt:04d}-{config.token}-{config.local_ranks[0]}-"
        self._worker = Worker("resiliency-agent-files", nice=19)
        self._readers = ReaderWatch()
        self._never_named: set[str] = set()  # of the used ones, those that were never a step's
        self._ready: dict[str, FileReady] = {}  # by path
        self._used: list[str] = []  # files of deleted steps
        self._number = 0
        self._nbytes = self._wanted = 0
        #: Files of deleted steps since the last saves, and how many are expected after those.
        self._returned = self._due = 0
        self._saved: deque[None] = deque()  # one entry per file saved since the last refill
        self._taken = 0  # files taken by saves whose record had not been counted at the last refill
        self._lacked = False  # True once a save has found no file ready

    def start(self) -> None:
        """Starts the thread. Raises: AgentError, when that cannot be."""
        self._worker.start()

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def take_leftovers(self) -> None:
        """Takes over the prepared files of earlier attempts of this host, like files of deleted steps: their pages are
        in memory, so a restart need not wait for new ones. Files of steps that they had deleted go: who has read them
        is not known. Deletes small ones. Blocks: for the renames."""
        config = self._config
        # Matched in full, because the name of another host may begin with this one's.
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
        """Sets what :meth:`refill` prepares before the first save: ``count`` files of ``nbytes``, at most two. A save
        needs the second one while the previous step's file is still in use."""
        self._nbytes, self._wanted = nbytes, max(self._wanted, min(count, MOST_READY))

    def saved(self, nbytes: int) -> None:
        """Sets the size and number of files that :meth:`refill` keeps ready from now on. Call it once per file of a
        save."""
        self._nbytes, self._wanted = nbytes, MOST_READY if self._lacked else _KEPT
        self._saved.append(None)
        # Who deletes a step after each save will do so after this one, perhaps much later.
        self._due = self._due + 1 if self._returned else 0
        self._returned = max(0, self._returned - 1)

    def refill(self, *, more_to_come: bool = False, unless_taken: bool = False) -> None:
        """Queues the preparation of missing files. Blocks: no.

        Making a file of zeros, and deleting a step's file instead of using it again, cost 0.28 s of a core for each
        save of 256 MiB.

        Args:
            more_to_come: a step will soon be deleted, whose file can be used: the last missing file is not made anew.
            unless_taken: the same, but only if a save has taken a file since the last refill, as a step is deleted
                after it.
        """
        if self._nbytes >= SMALL_FILE or self._used:
            self._worker.submit(lambda: self._refill(more_to_come, unless_taken))

    def watch(self, path: str) -> None:
        """Notices who reads a step's file from now on. Call it before the file gets a name, and for each file of which
        it is not called, expect no second use."""
        self._readers.watch(path)

    def use_again(self, path: str) -> None:
        """Takes the shard file of a deleted step out of its folder, to prepare it again or delete it later.

        A file too small to prepare is deleted at once, so that its space is free when the step is gone.

        Raises:
            OSError: it cannot be moved or deleted.
        """
        if os.stat(path).st_size < SMALL_FILE:
            os.unlink(path)
            return
        os.makedirs(self._folder, exist_ok=True)
        self._keep_used(path)
        self._returned, self._due = self._returned + 1, max(0, self._due - 1)
        self._worker.submit(self._refill)

    def _keep_used(self, path: str) -> None:
        target = self._new_path("used")
        os.rename(path, target)
        if path.endswith(".free"):
            self._never_named.add(target)
        self._used.append(target)

    def make_room(self, *, timeout_s: float) -> None:
        """Deletes the prepared files; the next refill makes new ones. Blocks: up to ``timeout_s``, until a file that is
        being prepared is finished."""
        self._worker.submit(self._delete_all)
        self._worker.wait_idle(time.monotonic() + timeout_s)

    def announce(self, rank: int) -> None:
        """Notifies a rank that has just connected of the files that are ready. Blocks: no."""

        def tell() -> None:
            for file in self._ready.values():
                self._notify(rank, file)

        self._worker.submit(tell)

    def close(self) -> None:
        """Ends the thread and deletes the files that are left. Idempotent."""
        self._worker.close()
        self._delete_all()
        self._readers.close()

    # -- on the pool's thread -----------------------------------------------------------------------------------

    def _delete_all(self) -> None:
        for path in (*self._ready, *self._used):
            _unlink(path)
        self._ready.clear()
        self._used.clear()

    def _refill(self, more_to_come: bool = False, unless_taken: bool = False) -> None:
        left = {path: file for path, file in self._ready.items() if os.path.lexists(path)}
        more_to_come = more_to_come or self._due > 0 or (unless_taken and len(left) < len(self._ready))
        self._notice_lack(taken=len(self._ready) - len(left))
        self._ready = left
        # A smaller difference lies at the end of the file, which a save writes instead of mapping it.
        for path in [path for path, file in self._ready.items() if file.nbytes < self._nbytes - _LENGTHENED]:
            del self._ready[path]  # too small for the coming saves
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
                    if used is not None:
                        self._offer(used)
                    else:
                        self._offer(*self._new_file())
        except OSError as error:
            # The save that finds no file makes its own, and reports the problem.
            logger.info("no shard file of %d bytes can be prepared in %s: %s", self._nbytes, self._folder, error)
            self._say_none()
        if len(self._ready) >= self._wanted or self._nbytes < SMALL_FILE:
            kept = 0 if self._nbytes else MOST_READY  # no save has told yet which size is needed
            while len(self._used) > kept:
                _unlink(self._used.pop(0))

    def _notice_lack(self, taken: int) -> None:
        """Keeps a second file ready once saves follow each other so fast that one of them found none. Not on a ramdisk,
        where it would take memory."""
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

    def _offer(self, path: str, is_new: bool = False) -> None:
        found = os.stat(path)
        # The file's own size, because a save of another size may have changed ``_nbytes`` while it was made.
        self._ready[path] = FileReady(path=path, inode=found.st_ino, nbytes=found.st_size, is_new=is_new)
        for rank in self._config.local_ranks:
            self._notify(rank, self._ready[path])

    def _used_file(self) -> str | None:
        """A deleted step's file that is large enough and that nobody has open, prepared for use; None when there is
        none."""
        while self._used:
            path = self._used.pop()
            try:
                nbytes, size = self._nbytes, os.stat(path).st_size
                fits = nbytes - _LENGTHENED <= size <= 2 * nbytes
                # The proof covers processes of this kernel only, not those of another host.
                local = used_by_this_host_only(path) and not may_share_blocks(path)
                # In this order: a reader that closes the file is noticed before the lease can be had.
                alone = fits and local and is_ours_alone(path)
                if alone and (path in self._never_named or not self._readers.was_read(path)):
                    _lengthen(path, size, nbytes)
                    target = self._new_path("free")
                    os.rename(path, target)
                    return target
            except OSError as error:
                logger.debug("%s cannot be used again: %s", path, error)
            _unlink(path)
        return None

    def _new_file(self) -> tuple[str, bool]:
        """A new file of zeros; or a used one, if one can be taken while zeros are written. A used one is ready at once,
        and a save that finds no file makes its own, in memory that the kernel must first find: 1 GiB then took 2 s,
        against 0.1 s. True: it is new."""
        os.makedirs(self._folder, exist_ok=True)
        path, nbytes = self._new_path("free"), self._nbytes  # a save of another size may change ``_nbytes`` meanwhile
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for start in range(0, nbytes, _PIECE):
                used = self._used_file()
                if used is not None:
                    _unlink(path)
                    return used, False
                write_zeros(fd, start, min(start + _PIECE, nbytes), in_memory=not self._config.durable)
        except BaseException:
            _unlink(path)
            raise
        finally:
            os.close(fd)
        return path, True

    def _new_path(self, kind: str) -> str:
        self._number += 1
        return os.path.join(self._folder, f"{self._prefix}{self._number:06d}.{kind}")


def _listing(folder: str) -> Iterable[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _lengthen(path: str, size: int, nbytes: int) -> None:
    """Appends zeros to a file that is too short. They are written, because a store to a page in a hole would have to
    allocate blocks."""
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
