"""Shard files mapped into memory, one per save.

A file belongs to one step for ever: it is made in the step's folder, and nobody writes to it once it is sealed. The
first touch of a page takes ten times as long as a later copy, so the agent prepares files whose pages are already in
memory (:mod:`resiliency.agent.file_pool`), and a save moves one into its step. The ranks of a host that write one file
together open it by its path in the step; the first one makes it. Disk blocks are allocated before a file is mapped,
because a store into a hole on a full disk raises SIGBUS.

On a ramdisk each process faults once per 4 KiB when it first stores into a file, even if another process has made the
pages: 512 MiB take 464 to 798 ms where a copy takes 181 to 354, and 192 to 217 once the pages are in the process's page
tables. A background thread enters them there when the agent has prepared a file; on a disk only in a new one, whose
pages are still to be written: a save of 256 MiB took 31 ms instead of 42. The pages of a deleted step's file are on the
disk already, and would be written once more.

Threads: any.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from resiliency.agent._worker import Worker
from resiliency.errors import AgentError, TierError
from resiliency.regular_file import open_regular
from resiliency.storage.file_end import hold, lengthen
from resiliency.storage.shared_files import move_without_replacing
from resiliency.storage.tiers.local import on_ramdisk, stores_may_end_the_process

__all__ = ["Arena", "Slot"]

logger = logging.getLogger(__name__)

_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
#: Bytes whose pages are mapped per call.
_POPULATE = 16 << 20
#: Niceness of the thread that maps pages. Mapping is 60 ms of work per GiB; with niceness 19, beside a model that
#: computes on all cores, it took longer than the second until the next save. A copy into pages that are not mapped
#: takes 200 ms longer.
_NICE = 5
_MOST_PREPARED = 8

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # not mmap.madvise, which would hold the GIL
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass
class Slot:
    """One mapped shard file.

    Attributes:
        path: of the file in its step.
        inode: of the file; shows whether the path still leads to this file.
        nbytes: number of bytes mapped; the file may be longer.
        address: of the first mapped byte in this process.
        in_memory: the file is on a ramdisk.
        fresh: the file is on a disk and was not prepared: stores would make its pages, with one fault per 4 KiB, so
            ``pwrite`` is faster. 1 GiB took 0.3 to 3.4 s by stores (even after zeros were written), 0.26 to 0.40 s by
            writes.
        small_pages: stores fault once per 4 KiB, so ``pwrite`` is faster.
        populated: pages were entered into the page table in advance, so stores show nothing about their size.
        writes_only: a store might need a disk block that is not there, which would end the process; only ``pwrite`` is
            allowed.
    """

    path: str
    inode: int
    fd: int
    map: mmap.mmap
    nbytes: int
    address: int
    in_memory: bool = False
    fresh: bool = False
    small_pages: bool = False
    populated: bool = False
    writes_only: bool = False

    def close(self) -> None:
        """Unmaps the file, which itself stays. Idempotent. Thread: any, once nothing uses the mapping."""
        if self.fd < 0:
            return
        try:
            self.map.close()
        except BufferError:
            # A tensor still uses the mapping, which is unmapped together with the last such tensor.
            logger.debug("mapping of %s still has views", self.path)
        os.close(self.fd)
        self.fd = -1

    def _leave(self) -> None:
        """In a forked child: closes the parent's file. The mapping is not in the child (MADV_DONTFORK), and unmapping
        its addresses would unmap what the child has put there since; so the mapping object is kept for ever instead."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.map))


#: Open slots of this process, by object id.
_open_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()


def _after_fork_in_child() -> None:
    for slot in list(_open_slots.values()):
        slot._leave()
    _open_slots.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(eq=False)
class _Prepared:
    """A file that the agent has prepared.

    Attributes:
        slot: its mapping; None: it is not mapped yet.
        taken: a save uses the file, or it is gone; the background thread must not touch its mapping any more.
    """

    path: str
    inode: int
    nbytes: int
    slot: Slot | None = None
    taken: bool = False

    def drop(self) -> None:
        self.taken = True
        if self.slot is not None:
            self.slot.close()


class Arena:
    """Makes the shard files of one rank on one local tier.

    Args:
        part: index of this rank among those that write a file together.
        writers: number of those ranks; 0: this rank writes none.
    """

    def __init__(self, *, part: int = 0, writers: int = 1) -> None:
        self._part, self._writers = part, writers
        self._lock = threading.Lock()
        self._prepared: deque[_Prepared] = deque()
        self._pages = Worker("resiliency-pages", nice=_NICE)
        #: True when the agent has said that it cannot prepare a file.
        self.none_to_come = False
        self._small_pages = False
        self._in_memory: dict[int, bool] = {}  # device of the file system -> whether it is a ramdisk
        self._writes_only: dict[int, bool] = {}

    def offer(self, path: str, inode: int, nbytes: int, *, is_new: bool = False) -> None:
        """Notes a file that the agent has prepared, or with path "" that it can prepare none. Another rank of the host
        may take the file first. ``is_new``: its bytes have not been written to a disk yet. Blocks: no."""
        with self._lock:
            self.none_to_come = not path
            if not path:
                return
            file = _Prepared(path, inode, nbytes)
            self._prepared.append(file)
            if len(self._prepared) > _MOST_PREPARED:
                self._prepared.popleft().drop()
            with suppress(OSError, AgentError):  # another rank has taken the file; no thread can be started
                device = os.stat(path).st_dev
                to_disk_anyway = is_new and not self._is_writes_only(device, path)
                if self._writers and (to_disk_anyway or self._is_in_memory(device, path)):
                    self._pages.submit(lambda: self._populate(file))

    @property
    def prepared(self) -> int:
        """Number of prepared files that no save has taken yet."""
        with self._lock:
            while self._prepared and not _is(self._prepared[0]):
                self._prepared.popleft().drop()
            return sum(map(_is, self._prepared))

    def wait_mapped(self, deadline: float) -> bool:
        """Blocks until the offered files are mapped, so that a save into one does not fault; False when ``deadline``
        (monotonic seconds) passes first."""
        return self._pages.wait_idle(deadline)

    def open(self, path: str, nbytes: int, *, writers: int = 1) -> Slot:
        """The mapped file of a save, of at least ``nbytes`` bytes.

        Args:
            path: of the file in its step; the same for all ranks that write it.
            writers: number of ranks that write it.

        Raises:
            TierError: the disk is full or the folder cannot be written.
        """
        try:
            with self._lock:
                return self._open(path, nbytes, writers)
        except OSError as error:
            raise _tier_error(error, os.path.dirname(path), nbytes) from error

    def _open(self, path: str, nbytes: int, writers: int) -> Slot:
        self._writers = writers
        os.makedirs(os.path.dirname(path), exist_ok=True)
        while self._prepared and not os.path.lexists(path):
            if move_without_replacing(self._prepared[0].path, path):
                break
            if not os.path.lexists(path):
                self._prepared.popleft().drop()  # taken by another rank for another step, or not movable to here
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        prepared: _Prepared | None = None
        try:
            found = os.fstat(fd)
            prepared = next((file for file in self._prepared if file.inode == found.st_ino), None)
            if prepared is not None:
                self._prepared.remove(prepared)
            if writers > 1:
                hold(fd, nbytes)  # locked, so that ranks that disagree on the size cannot cut it under each other
            lengthen(fd, nbytes, alone=writers == 1)
            slot = _take(prepared, path, fd, nbytes) or _map(path, fd, nbytes)
        except BaseException:
            # The half made file may hold all space that was left on the disk. No other rank can finish this step
            # either. A mapping would keep it, too.
            _remove(path, fd)
            os.close(fd)
            if prepared is not None and not prepared.taken:
                prepared.drop()
            raise
        slot.in_memory = self._is_in_memory(found.st_dev, path)
        slot.fresh = not slot.in_memory and (prepared is None or prepared.nbytes < nbytes)
        slot.small_pages = self._small_pages
        slot.writes_only = self._is_writes_only(found.st_dev, path)
        return slot

    def _populate(self, file: _Prepared) -> None:
        """Maps this rank's part of a prepared file and enters its pages into the page table, so that a save does not
        fault."""
        with self._lock:
            if file.taken:
                return
            try:
                fd = open_regular(file.path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:  # another rank has taken it
                return
            try:
                if os.fstat(fd).st_ino != file.inode:
                    raise OSError(errno.ENOENT, "another file has its name")
                slot = _map(file.path, fd, file.nbytes)
            except (OSError, ValueError) as error:  # mmap raises ValueError when the file is shorter
                logger.debug("%s cannot be mapped in advance: %s", file.path, error)
                os.close(fd)
                return
            file.slot = slot
        kept = ctypes.c_char.from_buffer(slot.map)  # if the slot is closed meanwhile, this reference keeps the mapping
        part = self._part if self._writers > 1 else 0  # in a sharded state each rank writes a file of its own
        first, last = (file.nbytes * number // self._writers for number in (part, part + 1))
        at = first - first % mmap.PAGESIZE
        while at < last and not file.taken:
            nbytes = min(_POPULATE, last - at)
            if _madvise(ctypes.addressof(kept) + at, nbytes, _MADV_POPULATE_WRITE) != 0:
                break  # a kernel before 5.14, or a truncated file: pages are then mapped at the first touch
            slot.populated = True
            at += nbytes
        del kept

    def _is_in_memory(self, device: int, path: str) -> bool:
        if device not in self._in_memory:
            self._in_memory[device] = on_ramdisk(path)
        return self._in_memory[device]

    def _is_writes_only(self, device: int, path: str) -> bool:
        if device not in self._writes_only:
            self._writes_only[device] = stores_may_end_the_process(path)
        return self._writes_only[device]

    def close(self) -> None:
        """Closes the prepared files. Idempotent. Blocks: until the background thread has noticed, up to 5 s."""
        with self._lock:
            while self._prepared:
                self._prepared.popleft().drop()
        self._pages.close()

    def learn(self, slot: Slot) -> None:
        """Notes what a finished copy has shown about the page size of the file's file system."""
        self._small_pages = slot.small_pages


def _map(path: str, fd: int, nbytes: int) -> Slot:
    """Maps an open file; the slot takes over its descriptor."""
    mapping = mmap.mmap(fd, nbytes)
    # A forked child must not keep a file in use that the trainer has closed.
    mapping.madvise(_MADV_DONTFORK)
    anchor = ctypes.c_char.from_buffer(mapping)
    slot = Slot(path, os.fstat(fd).st_ino, fd, mapping, nbytes, ctypes.addressof(anchor))
    _open_slots[id(slot)] = slot
    return slot


def _take(prepared: _Prepared | None, path: str, fd: int, nbytes: int) -> Slot | None:
    """The slot of a file that was mapped in advance, now with descriptor ``fd``, which holds the file's locks; None
    when it was not mapped, or is too small."""
    if prepared is None:
        return None
    prepared.taken = True
    slot = prepared.slot
    if slot is None or slot.nbytes < nbytes:
        prepared.drop()
        return None
    os.close(slot.fd)
    slot.fd, slot.path, slot.nbytes = fd, path, nbytes
    return slot


def _remove(path: str, fd: int) -> None:
    """Deletes an open file, and the step's folder if that is empty then."""
    try:
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            logger.info("%s stays until the next step is committed: %s", path, error)


def _is(file: _Prepared) -> bool:
    try:
        return os.stat(file.path).st_ino == file.inode
    except OSError:
        return False


def _tier_error(error: OSError, folder: str, nbytes: int) -> TierError:
    advice = {
        errno.ENOSPC: "free space or choose another directory",
        errno.EDQUOT: "raise the quota or choose another directory",
        errno.EROFS: "the file system is read-only: choose another directory",
        errno.EACCES: "give this user write permission or choose another directory",
        errno.EPERM: "give this user write permission or choose another directory",
    }.get(error.errno or 0, "see the error above")
    permanent = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
    return TierError(
        f"no shard file of {nbytes} bytes can be made in {folder} ({error.strerror or error}); {advice}",
        retryable=not permanent,
    )
